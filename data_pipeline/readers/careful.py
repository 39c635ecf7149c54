"""Records of a WARC or ARC file one by one, over any damage: slower than FastWARC, and the judge of what it objects to.

Reads a `Flow`, gives records that are whole, and a `Skip` for each place that holds none. Promises: every record that
begins with a legible header is delivered or named; a record that lies about its length costs no other; time is linear
in the bytes of the file; memory is bounded by `keep_bytes`.
"""

import re
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from data_pipeline.readers.flow import Flow
from data_pipeline.readers.page import Skip

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
class Record:
    """One record: `kind` is its WARC-Type, `headers` have lower-case names, `length` is what the header says in bytes.

    `block` is None where `length` is more than is kept.
    """

    offset: int
    kind: str
    headers: Mapping[str, str]
    length: int
    block: bytes | None


@dataclass(frozen=True, slots=True)
class Header:
    """A legible header of `size` bytes."""

    size: int
    kind: str
    headers: Mapping[str, str]
    length: int


class Dialect(Protocol):
    """What WARC and ARC differ in."""

    start: re.Pattern[bytes]  # finds the beginning of a record
    separator: bytes  # what stands behind every record

    def opens(self, head: bytes) -> bool:
        """Return whether a few bytes can be the beginning of a record."""

    def parse(self, head: bytes) -> Header | str:
        """Return the header at the beginning of `head`, or why there is none."""


def read_carefully(
    flow: Flow, file: str, dialect: Dialect, keep_bytes: int, *, leave: int = 0
) -> Generator[Record | Skip, None, int | None]:
    """Yield every record from where the flow stands, and a Skip for what is none.

    Returns:
        Where a faster reader can go on, `leave` records later; None at the end of the file. With 0, reading always
        goes on to the end.
    """
    found = 0
    reader = _Careful(flow, file, dialect, keep_bytes)
    while reader.more():
        if leave and found >= leave and flow.at_member() and dialect.start.match(flow.peek(_START_BYTES)):
            return flow.offset
        for item in reader.next():
            found += 1
            yield item
    return None


class _Careful:
    def __init__(self, flow: Flow, file: str, dialect: Dialect, keep_bytes: int) -> None:
        self.flow, self.file, self.dialect, self.keep = flow, file, dialect, keep_bytes

    def more(self) -> bool:
        """Whether anything but line ends is left."""
        while head := self.flow.peek(_AHEAD):
            blank = len(head) - len(head.lstrip(_SEPARATORS))
            self.flow.advance(blank)
            if blank < len(head):
                return True
        return self.flow.broken is not None

    def next(self) -> Iterator[Record | Skip]:
        """What stands here: a record, or what is wrong."""
        offset, head = self.flow.offset, self.flow.peek(_HEADER_BYTES)
        if not head:
            yield self._across()
            return
        header = self.dialect.parse(head)
        last = self._unended(head) if header == UNENDED else None
        if last:
            self.flow.advance(len(head))
            yield Record(offset, last.kind, last.headers, 0, b"")
        elif isinstance(header, Header):
            fits = header.size + header.length <= self.keep
            yield self._record(offset, header) if fits else self._long(offset, header)
        else:
            yield self._illegible(offset, head, header)

    def _unended(self, head: bytes) -> Header | None:
        """The header of the last record of a file, if all that it lacks is the blank line behind it."""
        if len(head) == _HEADER_BYTES or self.flow.broken or not head.endswith(b"\n"):
            return None
        header = self.dialect.parse(head + b"\n")
        return header if isinstance(header, Header) and not header.length else None

    def _illegible(self, offset: int, head: bytes, reason: str) -> Skip:
        """No header, or one that says nothing usable."""
        cut = len(head) < _HEADER_BYTES
        damaged = cut and self.flow.broken is not None and self.flow.broken.offset == offset
        inner = self.dialect.start.search(head, 1)
        if damaged and not inner:
            self.flow.advance(len(head))
            return self._across()
        if cut and not inner and reason == UNENDED:
            reason = "truncated"
        self._search(1)
        return Skip(self.file, offset, reason)

    def _across(self) -> Skip:
        damage = self.flow.broken
        assert damage is not None
        self.flow.cross()
        return Skip(self.file, damage.offset, damage.reason)

    def _record(self, offset: int, header: Header) -> Record | Skip:
        """What a header that says a length within the limit stands for; it is read whole once it has proved honest."""
        size = header.size + header.length
        end = self.flow.peek(1 + _AHEAD, size - 1)
        member = self.flow.next_member(size)
        if member is not None and member >= header.size and self.dialect.opens(self.flow.peek(_AHEAD, member)):
            self.flow.advance(member)
            return Skip(self.file, offset, _TOO_LONG)
        if not end:
            return self._cut(offset, header)
        following = end[1:]
        is_last = len(following) < _AHEAD and not following.strip(_SEPARATORS)
        if not (is_last or self._ends(following) or self.flow.next_member(size + 1) == size):
            self._search(header.size)
            return Skip(self.file, offset, _OTHER)
        block = self.flow.peek(header.length, header.size)
        self.flow.advance(size + (len(following) if is_last else 0))
        if is_last and self.flow.broken and self.flow.broken.offset == offset:
            return self._across()  # a check behind the record said that something in it is wrong
        return Record(offset, header.kind, header.headers, header.length, block)

    def _ends(self, following: bytes) -> bool:
        """Whether a record that is followed by these bytes ends there, whatever they begin."""
        rest = following.lstrip(_SEPARATORS)
        return not rest or self.dialect.opens(rest) or following.startswith(self.dialect.separator)

    def _cut(self, offset: int, header: Header) -> Skip:
        """A record of which the end is not there."""
        damage = self.flow.broken
        if self._search(header.size):
            return Skip(self.file, offset, _TOO_LONG)
        if damage and damage.offset == offset:
            return self._across()
        return Skip(self.file, offset, _TOO_LONG if damage else "truncated")

    def _long(self, offset: int, header: Header) -> Record | Skip:
        """A record longer than is kept: passed over, unless its length is a lie."""
        size = header.size + header.length
        ahead = self.flow.check(size - 1, _AHEAD)
        honest = Record(offset, header.kind, header.headers, header.length, None)
        if ahead is not None:
            if ahead and self._ends(ahead[1:]):
                self.flow.advance(size)
                return honest
            self._search(header.size)
            cut = not ahead and not self.flow.peek(1)
            return Skip(self.file, offset, "truncated" if cut else _OTHER)
        return self._pass(offset, header, honest)

    def _pass(self, offset: int, header: Header, honest: Record) -> Record | Skip:
        self.flow.advance(header.size)
        left, window = header.length, _FIRST
        while left:
            step = min(left, window)
            data = self.flow.peek(step + _START_BYTES)
            inner = self.dialect.start.search(data)
            if inner and inner.start() < step:
                self.flow.advance(inner.start())
                return Skip(self.file, offset, _TOO_LONG)
            if len(data) < step:
                self.flow.advance(len(data))
                damage = self.flow.broken
                if damage and damage.offset == offset:
                    return self._across()
                return Skip(self.file, offset, "truncated")
            self.flow.advance(step)
            left -= step
            window = min(window * 2, _SEARCH)
        return honest

    def _search(self, begin: int) -> bool:
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
