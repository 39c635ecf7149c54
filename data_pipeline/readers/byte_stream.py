"""Decoded bytes of a file with look-ahead: by position for a plain file, member by member for a
compressed one.

Invariants:
- Memory is bounded by the bytes that were peeked at.
"""

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from llmsys.data_pipeline.readers.compressed_members import (
    CompressedMembers,
    DamagedMember,
    MemberChunk,
)
from llmsys.data_pipeline.readers.input_stream import InputStream

_STEP = 1 << 16


class ByteStream(Protocol):
    """The decoded bytes that `record_parser` reads.

    Attributes:
        offset: byte of the file where the current byte lies, or where its compressed member begins.
        damage: the damage that ends the bytes that can be peeked at; None at the end of the file
            and before it.
    """

    offset: int
    damage: DamagedMember | None

    def peek(self, size: int, begin: int = 0) -> bytes:
        """Return up to `size` bytes, `begin` bytes after the current one; fewer only before
        damage or the end.
        """

    def advance(self, size: int) -> None:
        """Move forward by `size` bytes, or up to damage or the end."""

    def find_next_member(self, size: int) -> int | None:
        """Return the distance to the next member that begins within the next `size` peeked
        bytes.
        """

    def is_at_member(self) -> bool:
        """Return whether the current byte is one at which another reader could start."""

    def skip_damage(self) -> None:
        """Continue after the damage."""

    def peek_far(self, distance: int, size: int) -> bytes | None:
        """Return `size` bytes `distance` bytes ahead without reading those between; None where
        that is impossible.
        """


class PlainByteStream:
    """An uncompressed file."""

    def __init__(self, source: InputStream, start: int) -> None:
        self._source = source
        self.offset = start
        self.damage: DamagedMember | None = None

    def peek(self, size: int, begin: int = 0) -> bytes:
        """Return up to `size` bytes, `begin` bytes after the current one."""
        return self._source.read_block(self.offset + begin, size)

    def advance(self, size: int) -> None:
        """Move forward by `size` bytes."""
        self.offset = min(self.offset + size, self._source.size)

    def find_next_member(self, size: int) -> int | None:
        """Return None: a plain file has no members."""
        return None

    def is_at_member(self) -> bool:
        """Return True: a reader could start at any byte."""
        return True

    def skip_damage(self) -> None:
        """Do nothing: a plain file has no damage."""

    def peek_far(self, distance: int, size: int) -> bytes | None:
        """Return `size` bytes `distance` bytes ahead."""
        return self._source.read_block(self.offset + distance, size)


class CompressedByteStream:
    """A file of compressed members."""

    def __init__(self, members: CompressedMembers, start: int) -> None:
        self._pieces: Iterator[MemberChunk | DamagedMember] = members.iter_chunks(start)
        self._buffer = bytearray()
        self._used = 0  # consumed bytes at the front of the buffer
        # (index in the buffer, offset of the member)
        self._begins: deque[tuple[int, int]] = deque()
        self.offset = start
        self.damage: DamagedMember | None = None
        self._ended = False

    def peek(self, size: int, begin: int = 0) -> bytes:
        """Return up to `size` bytes, `begin` bytes after the current one."""
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
        self.damage = piece
        self._ended = piece is None
        return False

    def advance(self, size: int) -> None:
        """Move forward by `size` bytes."""
        while size:
            step = min(size, _STEP)
            available = len(self.peek(step))
            self._used += available
            size -= available
            self._discard_consumed()
            if available < step:
                return

    def _discard_consumed(self) -> None:
        """Drop the consumed bytes and update `offset` to the current member."""
        while self._begins and self._begins[0][0] <= self._used:
            self.offset = self._begins[0][1]
            if self._begins[0][0] == self._used:
                break  # is_at_member needs it
            self._begins.popleft()
        if self._used >= _STEP and self._used * 2 >= len(self._buffer):
            del self._buffer[: self._used]
            self._begins = deque((index - self._used, offset) for index, offset in self._begins)
            self._used = 0

    def find_next_member(self, size: int) -> int | None:
        """Return the distance to the next member within `size` bytes."""
        distances = (index - self._used for index, _ in self._begins)
        return next((distance for distance in distances if 0 < distance < size), None)

    def is_at_member(self) -> bool:
        """Return whether the current byte is the first of a member."""
        self.peek(1)
        return bool(self._begins) and self._begins[0][0] == self._used

    def skip_damage(self) -> None:
        """Continue after the damage."""
        if self.damage:
            self.offset = self.damage.offset
            self._buffer.clear()
            self._begins.clear()
            self._used = 0
            self.damage = None

    def peek_far(self, distance: int, size: int) -> bytes | None:
        """Return None: the bytes ahead must be decoded first."""
        return None
