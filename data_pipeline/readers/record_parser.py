"""Parse the records of a WARC or ARC file one by one and resume after any damage.

It is slower than FastWARC, and decides about every record that FastWARC rejects.

Reads a `ByteStream`; yields complete records and a `SkippedRecord` for each position without one.

Invariants:
- Every record that begins with a legible header is returned or named.
- A record with a wrong length loses no other record.
- Time is linear in the bytes of the file.
- Memory is bounded by `keep_bytes`.
"""

import re
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from llmsys.data_pipeline.readers.byte_stream import ByteStream
from llmsys.data_pipeline.readers.page_batch import SkippedRecord

_HEADER_BYTES = 1 << 16
_SEPARATORS = b"\r\n"
_AHEAD = 16
_TOO_LONG = "its header says more bytes than there are"
UNENDED = "damaged record: its header does not end"
_OTHER = "its header says another length than it has"
_SEARCH = 1 << 20
_FIRST = 1 << 13
_START_BYTES = 4_096  # a record start fits into so many bytes: the overlap of two search windows


@dataclass(frozen=True, slots=True)
class ParsedRecord:
    """One record.

    Attributes:
        offset: its position in the file.
        kind: its WARC-Type.
        headers: its fields under lower-case names.
        length: bytes of its block according to the header.
        block: the block; None if it is longer than `keep_bytes`.
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
    """The differences between WARC and ARC."""

    start: re.Pattern[bytes]  # matches the beginning of a record
    separator: bytes  # follows every record

    def is_record_start(self, head: bytes) -> bool:
        """Return whether a few bytes can be the beginning of a record."""

    def parse_header(self, head: bytes) -> RecordHeader | str:
        """Return the header at the beginning of `head`, or the reason why there is none."""


def parse_records(
    stream: ByteStream, file: str, dialect: RecordDialect, keep_bytes: int, *, return_after: int = 0
) -> Generator[ParsedRecord | SkippedRecord, None, int | None]:
    """Yield every record from the current byte of the stream, and a `SkippedRecord` for anything
    else.

    Args:
        stream: the decoded bytes.
        file: path for the skipped records.
        dialect: WARC or ARC.
        keep_bytes: blocks of longer records are not read.
        return_after: number of records after which to stop where a faster reader can start; 0 for
            never.

    Returns:
        The offset at which a faster reader can continue; None at the end of the file.
    """
    found = 0
    reader = _RecordParser(stream, file, dialect, keep_bytes)
    while reader.has_more():
        if (
            return_after
            and found >= return_after
            and stream.is_at_member()
            and dialect.start.match(stream.peek(_START_BYTES))
        ):
            return stream.offset
        for item in reader.parse_next():
            found += 1
            yield item
    return None


class _RecordParser:
    def __init__(
        self, stream: ByteStream, file: str, dialect: RecordDialect, keep_bytes: int
    ) -> None:
        self.stream = stream
        self.file = file
        self.dialect = dialect
        self.keep = keep_bytes

    def has_more(self) -> bool:
        """Return whether anything but line ends is left."""
        while head := self.stream.peek(_AHEAD):
            blank = len(head) - len(head.lstrip(_SEPARATORS))
            self.stream.advance(blank)
            if blank < len(head):
                return True
        # Damage without a byte before it is still to be reported.
        return self.stream.damage is not None

    def parse_next(self) -> Iterator[ParsedRecord | SkippedRecord]:
        """Yield the record at the current byte, or the reason why there is none."""
        offset = self.stream.offset
        head = self.stream.peek(_HEADER_BYTES)
        if not head:
            yield self._skip_damage()
            return
        header = self.dialect.parse_header(head)
        last = self._parse_last_header(head) if header == UNENDED else None
        if last:
            self.stream.advance(len(head))
            yield ParsedRecord(offset, last.kind, last.headers, 0, b"")
        elif isinstance(header, RecordHeader):
            fits = header.size + header.length <= self.keep
            yield (
                self._read_record(offset, header)
                if fits
                else self._read_long_record(offset, header)
            )
        else:
            yield self._skip_illegible_record(offset, head, header)

    def _parse_last_header(self, head: bytes) -> RecordHeader | None:
        """Return the header of the last record of a file if it lacks only the blank line after
        it.
        """
        if len(head) == _HEADER_BYTES or self.stream.damage or not head.endswith(b"\n"):
            return None
        header = self.dialect.parse_header(head + b"\n")
        return header if isinstance(header, RecordHeader) and not header.length else None

    def _skip_illegible_record(self, offset: int, head: bytes, reason: str) -> SkippedRecord:
        """Skip bytes without a usable header."""
        cut = len(head) < _HEADER_BYTES
        damaged = cut and self.stream.damage is not None and self.stream.damage.offset == offset
        inner = self.dialect.start.search(head, 1)
        # The header is illegible because the damage is in it: reported once.
        if damaged and not inner:
            self.stream.advance(len(head))
            return self._skip_damage()
        if cut and not inner and reason == UNENDED:
            reason = "truncated"
        self._seek_next_record(1)
        return SkippedRecord(self.file, offset, reason)

    def _skip_damage(self) -> SkippedRecord:
        damage = self.stream.damage
        assert damage is not None
        self.stream.skip_damage()
        return SkippedRecord(self.file, damage.offset, damage.reason)

    def _read_record(self, offset: int, header: RecordHeader) -> ParsedRecord | SkippedRecord:
        """Read a record whose length is within the limit; its block is read only once the length
        is verified.
        """
        size = header.size + header.length
        end = self.stream.peek(1 + _AHEAD, size - 1)
        member = self.stream.find_next_member(size)
        if (
            member is not None
            and member >= header.size
            and self.dialect.is_record_start(self.stream.peek(_AHEAD, member))
        ):
            self.stream.advance(member)
            return SkippedRecord(self.file, offset, _TOO_LONG)
        if not end:
            return self._skip_truncated_record(offset, header)
        following = end[1:]
        # Only line ends are left in the file.
        is_last = len(following) < _AHEAD and not following.strip(_SEPARATORS)
        # What follows is no record: the length is wrong, so the block would be part of a page, or
        # more than one.
        if not (
            is_last
            or self._is_record_end(following)
            or self.stream.find_next_member(size + 1) == size
        ):
            self._seek_next_record(header.size)
            return SkippedRecord(self.file, offset, _OTHER)
        block = self.stream.peek(header.length, header.size)
        self.stream.advance(size + (len(following) if is_last else 0))
        if is_last and self.stream.damage and self.stream.damage.offset == offset:
            return self._skip_damage()  # the checksum after the record failed
        return ParsedRecord(offset, header.kind, header.headers, header.length, block)

    def _is_record_end(self, following: bytes) -> bool:
        """Return whether a record can end before these bytes."""
        rest = following.lstrip(_SEPARATORS)
        return (
            not rest
            or self.dialect.is_record_start(rest)
            or following.startswith(self.dialect.separator)
        )

    def _skip_truncated_record(self, offset: int, header: RecordHeader) -> SkippedRecord:
        """Skip a record whose end is missing."""
        damage = self.stream.damage
        if self._seek_next_record(header.size):
            return SkippedRecord(self.file, offset, _TOO_LONG)
        if damage and damage.offset == offset:
            return self._skip_damage()
        return SkippedRecord(self.file, offset, _TOO_LONG if damage else "truncated")

    def _read_long_record(self, offset: int, header: RecordHeader) -> ParsedRecord | SkippedRecord:
        """Return a record longer than the limit without its block, or the reason if its length
        is wrong.
        """
        size = header.size + header.length
        # A plain file can be looked at after the block without reading it.
        ahead = self.stream.peek_far(size - 1, _AHEAD)
        honest = ParsedRecord(offset, header.kind, header.headers, header.length, None)
        if ahead is not None:
            if ahead and self._is_record_end(ahead[1:]):
                self.stream.advance(size)
                return honest
            self._seek_next_record(header.size)
            cut = not ahead and not self.stream.peek(1)
            return SkippedRecord(self.file, offset, "truncated" if cut else _OTHER)
        return self._scan_long_record(offset, header, honest)

    def _scan_long_record(
        self, offset: int, header: RecordHeader, honest: ParsedRecord
    ) -> ParsedRecord | SkippedRecord:
        self.stream.advance(header.size)
        left = header.length
        window = _FIRST
        while left:
            step = min(left, window)
            data = self.stream.peek(step + _START_BYTES)
            inner = self.dialect.start.search(data)
            if inner and inner.start() < step:
                self.stream.advance(inner.start())
                return SkippedRecord(self.file, offset, _TOO_LONG)
            if len(data) < step:
                self.stream.advance(len(data))
                damage = self.stream.damage
                if damage and damage.offset == offset:
                    return self._skip_damage()
                return SkippedRecord(self.file, offset, "truncated")
            self.stream.advance(step)
            left -= step
            window = min(window * 2, _SEARCH)
        return honest

    def _seek_next_record(self, begin: int) -> bool:
        """Advance to the next record start after `begin` bytes, or to damage or the end; return
        whether there is one.

        The search window starts small: in files of many short records, each search costs its whole
        window.
        """
        self.stream.advance(begin - 1)  # keep one byte before: a record may have to begin a line
        window = _FIRST
        while data := self.stream.peek(window):
            inner = self.dialect.start.search(data, 1)
            if inner:
                self.stream.advance(inner.start())
                return True
            self.stream.advance(len(data) - _START_BYTES if len(data) == window else len(data))
            window = min(window * 2, _SEARCH)
        return False
