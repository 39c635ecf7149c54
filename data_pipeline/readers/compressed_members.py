"""Decode a compressed file member by member, and resume at the next readable member after damage.

Reads gzip members, zstd frames and lz4 frames; yields decoded `MemberChunk`s and a `DamagedMember` per damage.

Invariants:
- Memory is bounded, whatever a member decodes to.
- Everything between two readable members is named by one `DamagedMember`.
- Time is linear in the bytes of the file. The cost of damage is counted, and a file that nests undecodable members
  (never by accident) ends with one `DamagedMember` for the rest.
"""

import io
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import zstandard
from fastwarc.stream_io import Lz4Reader

from data_pipeline.readers.frame_scanner import (
    ENDS,
    LZ4,
    ZSTD,
    FrameError,
    find_skippable_frame_end,
    is_skippable,
    read_dictionary,
)
from data_pipeline.readers.input_stream import InputStream, ReadError

GZIP = b"\x1f\x8b\x08"
_BLOCK = 1 << 14  # zlib discards the output of a call that meets damage
_PIECE = 1 << 17
_HEAD = 1 << 10  # compressed bytes that must decode for a position to count as the start of a member
_FIRST = 1 << 9  # first step of a search: the next member is usually near
_MAX_WASTE, _EXTRA_WASTE = 32, 64 << 20  # bytes that searches may waste: a multiple of the file size, and a constant
_DECODED_COSTS = 64  # decoding so many bytes costs as much as reading one
_ENOUGH = "more damage than is searched: the rest is not read"
_MAGIC = {
    GZIP: re.compile(rb"\x1f\x8b\x08[\x00-\x1f]"),
    ZSTD: re.compile(re.escape(ZSTD)),
    LZ4: re.compile(re.escape(LZ4)),
}

Plausible = Callable[[bytes], bool]


@dataclass(frozen=True, slots=True)
class MemberChunk:
    """Decoded bytes of the member at byte `offset` of the file; `is_first` marks its first chunk."""

    offset: int
    data: bytes
    is_first: bool


@dataclass(frozen=True, slots=True)
class DamagedMember:
    """The member at `offset` is damaged: the chunks so far are all of it, and the last of them may be wrong."""

    offset: int
    reason: str


def detect_compression(source: InputStream) -> bytes:
    """Return the magic bytes of the compression of a file, b"" for a plain one."""
    head = source.read_block(0, 4)
    if is_skippable(head):
        return ZSTD
    return next((magic for magic in _MAGIC if head.startswith(magic) or (head and magic.startswith(head))), b"")


class CompressedMembers:
    """The members of one compressed file."""

    def __init__(self, source: InputStream, magic: bytes, plausible: Plausible) -> None:
        """Open the members of `source`.

        Args:
            source: the file.
            magic: magic bytes of its compression, from `detect_compression`.
            plausible: returns whether decoded bytes look like the start of a member; used to resume after damage.
        """
        self.source, self.magic, self.plausible = source, magic, plausible
        self._zstd = _build_decompressor(source) if magic == ZSTD else None
        self._decoded = 0  # bytes of the current member
        self._left = _MAX_WASTE * source.size + _EXTRA_WASTE  # remaining bytes that searches may waste

    def iter_chunks(self, start: int) -> Iterator[MemberChunk | DamagedMember]:
        """Decode from the member at byte `start` to the end of the file."""
        position: int | None = start
        while position is not None and position < self.source.size:
            began, self._decoded = self.source.work, 0
            try:
                position = yield from self._decode_member(position)
            except FrameError as error:
                yield DamagedMember(position, str(error))
                self._left -= self.source.work - began + self._decoded // _DECODED_COSTS
                position = self._find_next_member(position + 1)
                if position is not None and self._left < 0:
                    yield DamagedMember(position, _ENOUGH)
                    return

    def _find_next_member(self, position: int) -> int | None:
        """Return the offset of the next plausible member, or where the search was given up; None if there is none."""
        pattern, size = _MAGIC[self.magic], _FIRST
        while position < self.source.size:
            began = self.source.work
            block = self.source.read_block(position, size + 8)
            for match in pattern.finditer(block):
                start = position + match.start()
                if match.start() < size and (self._is_member_start(start) or self.source.work - began > self._left):
                    self._left -= self.source.work - began
                    return start
            self._left -= self.source.work - began
            position += size
            size = min(size * 2, _BLOCK)
        return None

    def _is_member_start(self, position: int) -> bool:
        try:
            if self.magic != GZIP:
                end = ENDS[self.magic](self.source, position)  # lz4 would read into damage after the frame
                return self.plausible(next(self._decode_frame(position, end)).data[:_HEAD])
            return self.plausible(zlib.decompressobj(31).decompress(self.source.read_block(position, _HEAD), _HEAD))
        except (FrameError, zlib.error, StopIteration):
            return False

    def _decode_member(self, position: int) -> Generator[MemberChunk, None, int]:
        """Decode one member and return the offset of its end."""
        head = self.source.read_block(position, 4)
        if self.magic == ZSTD and is_skippable(head):
            return find_skippable_frame_end(self.source, position)
        if not head.startswith(self.magic):
            raise FrameError("truncated" if self.magic.startswith(head) else f"damaged: no {_NAMES[self.magic]} here")
        if self.magic == GZIP:
            return (yield from self._decode_gzip(position))
        try:
            end = ENDS[self.magic](self.source, position)
        except FrameError:
            yield from self._decode_frame(position)  # the bytes before the cut
            raise
        yield from self._decode_frame(position, end)
        return end

    def _decode_gzip(self, start: int) -> Generator[MemberChunk, None, int]:
        inflate, position, begins = zlib.decompressobj(31), start, True
        while not inflate.eof:
            block = inflate.unconsumed_tail or self.source.read_block(position, _BLOCK)
            if not inflate.unconsumed_tail:
                position += len(block)
            if not block:
                raise FrameError("truncated")
            try:
                data = inflate.decompress(block, _PIECE)
            except zlib.error as error:
                raise FrameError(f"damaged gzip member: {str(error).rpartition(': ')[2]}") from error
            if data:
                self._decoded += len(data)
                yield MemberChunk(start, data, begins)
                begins = False
        return position - len(inflate.unused_data)

    def _decode_frame(self, start: int, end: int | None = None) -> Iterator[MemberChunk]:
        part = _StreamSlice(self.source, start, self.source.size if end is None else end)
        begins = True
        try:
            file: Any = part
            stream: Any = self._zstd.stream_reader(file) if self._zstd else Lz4Reader(file)
            while data := stream.read(_PIECE):
                self._decoded += len(data)
                yield MemberChunk(start, data, begins)
                begins = False
        except ReadError:
            raise
        except (zstandard.ZstdError, OSError, ValueError) as error:
            raise FrameError(f"damaged {_NAMES[self.magic]}: {error}") from error


_NAMES = {GZIP: "gzip member", ZSTD: "zstd frame", LZ4: "lz4 frame"}


def _build_decompressor(source: InputStream) -> zstandard.ZstdDecompressor:
    """Build a decompressor with the dictionary of the file, if it has one."""
    content = read_dictionary(source)
    try:
        return zstandard.ZstdDecompressor(zstandard.ZstdCompressionDict(content) if content else None)
    except zstandard.ZstdError:  # a damaged dictionary: each frame then reports its own error
        return zstandard.ZstdDecompressor()


class _StreamSlice(io.RawIOBase):
    """A byte range of a source as a binary file."""

    def __init__(self, source: InputStream, start: int, end: int) -> None:
        self._source, self._start, self._position, self._end = source, start, start, end

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position - self._start

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: self._start, io.SEEK_CUR: self._position, io.SEEK_END: self._end}[whence]
        self._position = max(self._start, min(base + offset, self._end))
        return self.tell()

    def read(self, size: int | None = -1) -> bytes:
        left = self._end - self._position
        data = self._source.read_block(self._position, left if size is None or size < 0 else min(size, left))
        self._position += len(data)
        return data
