"""Records of a WARC or ARC file one by one, over any damage: slower than FastWARC, and the judge of what it objects to.

Reads a `ByteStream`, gives records that are whole, and a `Skip` for each place that holds none. Promises: every record
that begins with a legible header is delivered or named; a record that lies about its length costs no other; time is
linear in the bytes of the file; memory is bounded by `keep_bytes`.
"""

import re
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from data_pipeline.readers.byte_stream import ByteStream
from data_pipeline.readers.page_batch import SkippedRecord

_HEADER_BYTES = 1 << 16
_SEPARATORS = b"\r\n"
_AHEAD = 16
_TOO_LONG = "its header says more bytes than there are"
UNENDED = "damaged record: its header does not end"
_OTHER = "its header says another length than it has"
_SEARCH = 1 << 20
_FIRST = 1 << 13
_START_BYTES = 4_096  # the beginning of a record lies within so many bytes: what two blocks of a search must share


@dataclass(frozen=True, slots=True)
class ParsedRecord:
    """One record: `kind` is its WARC-Type, `headers` have lower-case names, `length` is what the header says in bytes.

    `block` is None where `length` is more than is kept.
    """

    offset: int
    kind: str
    headers: Mapping[str, str]
    length: int
    block: bytes | None


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """A legible header of `size` bytes."""

    size: int
    kind: str
    headers: Mapping[str, str]
    length: int


class RecordDialect(Protocol):
    """What WARC and ARC differ in."""

    start: re.Pattern[bytes]  # finds the beginning of a record
    separator: bytes  # what stands behind every record

    def is_record_start(self, head: bytes) -> bool:
        """Return whether a few bytes can be the beginning of a record."""

    def parse_header(self, head: bytes) -> RecordHeader | str:
        """Return the header at the beginning of `head`, or why there is none."""


def parse_records(
    flow: ByteStream, file: str, dialect: RecordDialect, keep_bytes: int, *, leave: int = 0
) -> Generator[ParsedRecord | SkippedRecord, None, int | None]:
    """Yield every record from where the flow stands, and a Skip for what is none.

    Returns:
        Where a faster reader can go on, `leave` records later; None at the end of the file. With 0, reading always
        goes on to the end.
    """
    found = 0
    reader = _RecordParser(flow, file, dialect, keep_bytes)
    while reader.has_more():
        if leave and found >= leave and flow.is_at_member() and dialect.start.match(flow.peek(_START_BYTES)):
            return flow.offset
        for item in reader.parse_next():
            found += 1
            yield item
    return None


class _RecordParser:
    def __init__(self, flow: ByteStream, file: str, dialect: RecordDialect, keep_bytes: int) -> None:
        self.flow, self.file, self.dialect, self.keep = flow, file, dialect, keep_bytes

    def has_more(self) -> bool:
        """Whether anything but line ends is left."""
        while head := self.flow.peek(_AHEAD):
            blank = len(head) - len(head.lstrip(_SEPARATORS))
            self.flow.advance(blank)
            if blank < len(head):
                return True
        return self.flow.damage is not None

    def parse_next(self) -> Iterator[ParsedRecord | SkippedRecord]:
        """What stands here: a record, or what is wrong."""
        offset, head = self.flow.offset, self.flow.peek(_HEADER_BYTES)
        if not head:
            yield self._skip_damage()
            return
        header = self.dialect.parse_header(head)
        last = self._parse_last_header(head) if header == UNENDED else None
        if last:
            self.flow.advance(len(head))
            yield ParsedRecord(offset, last.kind, last.headers, 0, b"")
        elif isinstance(header, RecordHeader):
            fits = header.size + header.length <= self.keep
            yield self._read_record(offset, header) if fits else self._read_long_record(offset, header)
        else:
            yield self._skip_illegible_record(offset, head, header)

    def _parse_last_header(self, head: bytes) -> RecordHeader | None:
        """The header of the last record of a file, if all that it lacks is the blank line behind it."""
        if len(head) == _HEADER_BYTES or self.flow.damage or not head.endswith(b"\n"):
            return None
        header = self.dialect.parse_header(head + b"\n")
        return header if isinstance(header, RecordHeader) and not header.length else None

    def _skip_illegible_record(self, offset: int, head: bytes, reason: str) -> SkippedRecord:
        """No header, or one that says nothing usable."""
        cut = len(head) < _HEADER_BYTES
        damaged = cut and self.flow.damage is not None and self.flow.damage.offset == offset
        inner = self.dialect.start.search(head, 1)
        if damaged and not inner:
            self.flow.advance(len(head))
            return self._skip_damage()
        if cut and not inner and reason == UNENDED:
            reason = "truncated"
        self._seek_next_record(1)
        return SkippedRecord(self.file, offset, reason)

    def _skip_damage(self) -> SkippedRecord:
        damage = self.flow.damage
        assert damage is not None
        self.flow.skip_damage()
        return SkippedRecord(self.file, damage.offset, damage.reason)

    def _read_record(self, offset: int, header: RecordHeader) -> ParsedRecord | SkippedRecord:
        """What a header that says a length within the limit stands for; it is read whole once it has proved honest."""
        size = header.size + header.length
        end = self.flow.peek(1 + _AHEAD, size - 1)
        member = self.flow.find_next_member(size)
        if (
            member is not None
            and member >= header.size
            and self.dialect.is_record_start(self.flow.peek(_AHEAD, member))
        ):
            self.flow.advance(member)
            return SkippedRecord(self.file, offset, _TOO_LONG)
        if not end:
            return self._skip_truncated_record(offset, header)
        following = end[1:]
        is_last = len(following) < _AHEAD and not following.strip(_SEPARATORS)
        if not (is_last or self._is_record_end(following) or self.flow.find_next_member(size + 1) == size):
            self._seek_next_record(header.size)
            return SkippedRecord(self.file, offset, _OTHER)
        block = self.flow.peek(header.length, header.size)
        self.flow.advance(size + (len(following) if is_last else 0))
        if is_last and self.flow.damage and self.flow.damage.offset == offset:
            return self._skip_damage()  # a check behind the record said that something in it is wrong
        return ParsedRecord(offset, header.kind, header.headers, header.length, block)

    def _is_record_end(self, following: bytes) -> bool:
        """Whether a record that is followed by these bytes ends there, whatever they begin."""
        rest = following.lstrip(_SEPARATORS)
        return not rest or self.dialect.is_record_start(rest) or following.startswith(self.dialect.separator)

    def _skip_truncated_record(self, offset: int, header: RecordHeader) -> SkippedRecord:
        """A record of which the end is not there."""
        damage = self.flow.damage
        if self._seek_next_record(header.size):
            return SkippedRecord(self.file, offset, _TOO_LONG)
        if damage and damage.offset == offset:
            return self._skip_damage()
        return SkippedRecord(self.file, offset, _TOO_LONG if damage else "truncated")

    def _read_long_record(self, offset: int, header: RecordHeader) -> ParsedRecord | SkippedRecord:
        """A record longer than is kept: passed over, unless its length is a lie."""
        size = header.size + header.length
        ahead = self.flow.peek_far(size - 1, _AHEAD)
        honest = ParsedRecord(offset, header.kind, header.headers, header.length, None)
        if ahead is not None:
            if ahead and self._is_record_end(ahead[1:]):
                self.flow.advance(size)
                return honest
            self._seek_next_record(header.size)
            cut = not ahead and not self.flow.peek(1)
            return SkippedRecord(self.file, offset, "truncated" if cut else _OTHER)
        return self._scan_long_record(offset, header, honest)

    def _scan_long_record(
        self, offset: int, header: RecordHeader, honest: ParsedRecord
    ) -> ParsedRecord | SkippedRecord:
        self.flow.advance(header.size)
        left, window = header.length, _FIRST
        while left:
            step = min(left, window)
            data = self.flow.peek(step + _START_BYTES)
            inner = self.dialect.start.search(data)
            if inner and inner.start() < step:
                self.flow.advance(inner.start())
                return SkippedRecord(self.file, offset, _TOO_LONG)
            if len(data) < step:
                self.flow.advance(len(data))
                damage = self.flow.damage
                if damage and damage.offset == offset:
                    return self._skip_damage()
                return SkippedRecord(self.file, offset, "truncated")
            self.flow.advance(step)
            left -= step
            window = min(window * 2, _SEARCH)
        return honest

    def _seek_next_record(self, begin: int) -> bool:
        """Go to the next beginning of a record behind `begin` bytes, or up to damage or the end; whether there is one.

        Begins with few bytes: where records are short and many lie, each costs as much as is searched for it.
        """
        self.flow.advance(begin - 1)  # a byte of what is before, because a record may have to begin a line
        window = _FIRST
        while data := self.flow.peek(window):
            inner = self.dialect.start.search(data, 1)
            if inner:
                self.flow.advance(inner.start())
                return True
            self.flow.advance(len(data) - _START_BYTES if len(data) == window else len(data))
            window = min(window * 2, _SEARCH)
        return False
