"""Lines of a text file, plain or compressed, with their places.

Invariants:
- Only a newline ends a line, because texts may hold U+2028 and U+0085.
- The offset of a line is the number of decoded bytes before it.
- Damage in the compression loses the line that it cuts, not the following ones.
"""

from collections.abc import Iterator

from llmsys.data_pipeline.readers.compressed_members import (
    CompressedMembers,
    DamagedMember,
    MemberChunk,
)
from llmsys.data_pipeline.readers.input_stream import InputStream

_STEP = 1 << 18


def iter_text_lines(
    source: InputStream, magic: bytes, limit: int
) -> Iterator[tuple[int, bytes | None] | DamagedMember]:
    """Yield the lines of a file.

    Args:
        source: The file.
        magic: Its compression.
        limit: Bytes of the longest line that is kept.

    Yields:
        Offset and bytes of each line without its newline, None for a longer one; and each damage
        of the compression, at its place.
    """
    lines = _LineSplitter(limit)
    for piece in _iter_chunks(source, magic):
        if isinstance(piece, DamagedMember):
            lines.discard_line()
            yield piece
            continue
        yield from lines.split_lines(piece.data)
    yield from lines.flush_last_line()


def _iter_chunks(source: InputStream, magic: bytes) -> Iterator[MemberChunk | DamagedMember]:
    if magic:
        yield from CompressedMembers(source, magic, bool).iter_chunks(0)
        return
    for position in range(0, source.size, _STEP):
        yield MemberChunk(0, source.read_block(position, _STEP), position == 0)


class _LineSplitter:
    """Splitter of chunks into lines. A line longer than `limit` bytes is counted and not stored."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.begin = 0  # decoded bytes before the current line
        self.line = bytearray()
        self.size = 0

    def split_lines(self, data: bytes) -> Iterator[tuple[int, bytes | None]]:
        """Yield the offset of each line that ends in `data`, and the line; None for a line that
        is too long.
        """
        *ended, last = data.split(b"\n")
        for line in ended:
            yield self._end_line(line)
        self._append_part(last)

    def flush_last_line(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield the last line if it has no newline."""
        if self.size:
            yield self._end_line(b"")

    def discard_line(self) -> None:
        """Drop the unfinished line."""
        self.begin += self.size
        self._start_line()

    def _start_line(self) -> None:
        self.size = 0
        self.line.clear()

    def _append_part(self, part: bytes) -> None:
        self.size += len(part)
        if self.size <= self.limit:
            self.line += part
        else:
            self.line.clear()

    def _end_line(self, part: bytes) -> tuple[int, bytes | None]:
        self._append_part(part)
        offset = self.begin
        line = bytes(self.line) if self.size <= self.limit else None
        self.begin += self.size + 1
        self._start_line()
        return offset, line
