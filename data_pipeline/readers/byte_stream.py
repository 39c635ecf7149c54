"""Decoded bytes of a file with a view ahead: from a plain file by position, from a compressed one member by member.

Reads a `Source`; gives `peek` and `advance`, where in the file the current byte came from, and what stands in the way.
Promises: memory is bounded by the bytes that are peeked at.
"""

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from data_pipeline.readers.compressed_members import CompressedMembers, DamagedMember, MemberChunk
from data_pipeline.readers.input_stream import InputStream

_STEP = 1 << 16


class ByteStream(Protocol):
    """What the careful reader needs of a file.

    Attributes:
        offset: byte of the file where the current byte lies, or where its compressed member begins.
        broken: the damage that ends what can be peeked at, None for the end of the file or when there is more.
    """

    offset: int
    damage: DamagedMember | None

    def peek(self, size: int, begin: int = 0) -> bytes:
        """Return up to `size` bytes, `begin` bytes from here, fewer only in front of damage or the end."""

    def advance(self, size: int) -> None:
        """Go on by `size` bytes, or up to damage or the end."""

    def find_next_member(self, size: int) -> int | None:
        """Bytes from here to the next beginning of a member among the next `size` that were peeked at."""

    def is_at_member(self) -> bool:
        """Whether a reader that knows nothing could begin to read the file here."""

    def skip_damage(self) -> None:
        """Go on behind the damage."""

    def peek_far(self, distance: int, size: int) -> bytes | None:
        """Return bytes far ahead without reading those between; None where that cannot be done."""


class PlainByteStream:
    """A file that is not compressed."""

    def __init__(self, source: InputStream, start: int) -> None:
        self._source, self.offset = source, start
        self.damage: DamagedMember | None = None

    def peek(self, size: int, begin: int = 0) -> bytes:
        """Return up to `size` bytes, `begin` bytes from here."""
        return self._source.read_at(self.offset + begin, size)

    def advance(self, size: int) -> None:
        """Go on by `size` bytes."""
        self.offset = min(self.offset + size, self._source.size)

    def find_next_member(self, size: int) -> int | None:
        """Return where the next member begins."""
        return None

    def is_at_member(self) -> bool:
        """Whether a reader could begin here."""
        return True

    def skip_damage(self) -> None:
        """Nothing is ever in the way."""

    def peek_far(self, distance: int, size: int) -> bytes | None:
        """Return bytes far ahead, where that can be done."""
        return self._source.read_at(self.offset + distance, size)


class CompressedByteStream:
    """A file of compressed members."""

    def __init__(self, members: CompressedMembers, start: int) -> None:
        self._pieces: Iterator[MemberChunk | DamagedMember] = members.iter_chunks(start)
        self._buffer = bytearray()
        self._used = 0  # bytes at the front of the buffer that are behind us
        self._begins: deque[tuple[int, int]] = deque()  # (place in the buffer, offset of the member)
        self.offset = start
        self.damage: DamagedMember | None = None
        self._ended = False

    def peek(self, size: int, begin: int = 0) -> bytes:
        """Return up to `size` bytes, `begin` bytes from here."""
        while len(self._buffer) - self._used < begin + size and self._fill_buffer():
            pass
        return bytes(memoryview(self._buffer)[self._used + begin : self._used + begin + size])

    def _fill_buffer(self) -> bool:
        if self.damage or self._ended:
            return False
        piece = next(self._pieces, None)
        if isinstance(piece, MemberChunk):
            if piece.is_first:
                self._begins.append((len(self._buffer), piece.offset))
                self._discard_consumed()
            self._buffer += piece.data
            return True
        self.damage, self._ended = piece, piece is None
        return False

    def advance(self, size: int) -> None:
        """Go on by `size` bytes."""
        while size:
            step = min(size, _STEP)
            there = len(self.peek(step))
            self._used += there
            size -= there
            self._discard_consumed()
            if there < step:
                return

    def _discard_consumed(self) -> None:
        """Let go of what is behind us, and say which member we are in."""
        while self._begins and self._begins[0][0] <= self._used:
            self.offset = self._begins[0][1]
            if self._begins[0][0] == self._used:
                break  # kept, to know that we stand on it
            self._begins.popleft()
        if self._used >= _STEP and self._used * 2 >= len(self._buffer):
            del self._buffer[: self._used]
            self._begins = deque((place - self._used, offset) for place, offset in self._begins)
            self._used = 0

    def find_next_member(self, size: int) -> int | None:
        """Return where the next member begins."""
        places = (place - self._used for place, _ in self._begins)
        return next((place for place in places if 0 < place < size), None)

    def is_at_member(self) -> bool:
        """Whether a reader could begin here."""
        self.peek(1)
        return bool(self._begins) and self._begins[0][0] == self._used

    def skip_damage(self) -> None:
        """Go on behind the damage."""
        if self.damage:
            self.offset = self.damage.offset
            self._buffer.clear()
            self._begins.clear()
            self._used = 0
            self.damage = None

    def peek_far(self, distance: int, size: int) -> bytes | None:
        """Return bytes far ahead, where that can be done."""
        return None
