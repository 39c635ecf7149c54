"""Decode a compressed file member by member, and resume at the next readable member after damage.

Reads gzip members, bzip2 and xz streams, zstd frames and lz4 frames; yields decoded `MemberChunk`s
and a `DamagedMember` per damage.

The end of a zstd or lz4 frame is found without decoding it, by block headers (RFC 8878, 3.1.1; LZ4
frame format 1.6).

Invariants:
- Memory is bounded, whatever a member decodes to.
- Everything between two readable members is named by one `DamagedMember`.
- Time is linear in the bytes of the file. The cost of damage is counted, and a file that nests
  undecodable members (never by accident) ends with one `DamagedMember` for the rest.
- Steps are bounded by the size of the file.
- An invalid or truncated frame raises `FrameError`.
"""

import bz2
import io
import lzma
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import zstandard
from fastwarc.stream_io import Lz4Reader

from llmsys.data_pipeline.readers.input_stream import InputStream, ReadError

ZSTD = b"\x28\xb5\x2f\xfd"
LZ4 = b"\x04\x22\x4d\x18"
_SKIPPABLE = b"\x2a\x4d\x18"  # after a byte from 0x50 to 0x5f
# WARC files in zstd carry theirs in the first frame (IIPC, Zstandard for WARC, 4)
_DICTIONARY = b"\x5d\x2a\x4d\x18"
_DICTIONARY_BYTES = 64 << 20


class FrameError(Exception):
    """The bytes are not a complete frame; the message says why."""


def is_skippable(head: bytes) -> bool:
    """Return whether four bytes begin a skippable frame."""
    return len(head) == 4 and head[1:] == _SKIPPABLE and 0x50 <= head[0] <= 0x5F


def find_skippable_frame_end(source: InputStream, start: int) -> int:
    """Return the offset of the end of the skippable frame at `start`."""
    return _require_within_file(
        source, start + 8 + int.from_bytes(source.read_block(start + 4, 4), "little")
    )


def find_zstd_frame_end(source: InputStream, start: int) -> int:
    """Return the offset of the end of the zstd frame at `start`."""
    descriptor = source.read_block(start + 4, 1)
    if not descriptor:
        raise FrameError("truncated")
    flags = descriptor[0]
    # RFC 8878, 3.1.1.1.1: bits of the frame header descriptor, and the sizes of the fields they
    # announce
    content_size = flags >> 6
    single = flags >> 5 & 1
    checksum = flags >> 2 & 1
    dictionary = flags & 3
    position = start + 5 + (1 - single) + (0, 1, 2, 4)[dictionary] + (single, 2, 4, 8)[content_size]
    while True:
        header = int.from_bytes(_read_exactly(source, position, 3), "little")
        last = header & 1
        kind = header >> 1 & 3
        size = header >> 3
        if kind == 3:  # reserved
            raise FrameError("damaged zstd frame")
        position += 3 + (1 if kind == 1 else size)  # an RLE block stores one byte
        if last:
            return _require_within_file(source, position + 4 * checksum)


def find_lz4_frame_end(source: InputStream, start: int) -> int:
    """Return the offset of the end of the lz4 frame at `start`."""
    flags = _read_exactly(source, start + 4, 1)[0]
    # The version, always 01.
    if flags >> 6 != 1:
        raise FrameError("damaged lz4 frame")
    # Magic, FLG, BD and the header's checksum; content size and dictionary are optional.
    position = start + 7 + 8 * (flags >> 3 & 1) + 4 * (flags & 1)
    while size := int.from_bytes(_read_exactly(source, position, 4), "little"):
        # The highest bit marks a block that is not compressed; bit 4 of the flags, a checksum after
        # each block.
        position += 4 + (size & 0x7FFF_FFFF) + 4 * (flags >> 4 & 1)
    return _require_within_file(source, position + 4 + 4 * (flags >> 2 & 1))


ENDS: dict[bytes, Callable[[InputStream, int], int]] = {
    ZSTD: find_zstd_frame_end,
    LZ4: find_lz4_frame_end,
}


def read_dictionary(source: InputStream) -> bytes | None:
    """Return the dictionary at the beginning of a zstd file; None without one."""
    if source.read_block(0, 4) != _DICTIONARY:
        return None
    size = int.from_bytes(source.read_block(4, 4), "little")
    content = source.read_block(8, min(size, _DICTIONARY_BYTES))
    if not content.startswith(ZSTD):
        return content
    try:
        return zstandard.ZstdDecompressor().decompress(content, max_output_size=_DICTIONARY_BYTES)
    except zstandard.ZstdError:
        return None


def _read_exactly(source: InputStream, position: int, size: int) -> bytes:
    data = source.read_block(position, size)
    if len(data) < size:
        raise FrameError("truncated")
    return data


def _require_within_file(source: InputStream, end: int) -> int:
    if end > source.size:
        raise FrameError("truncated")
    return end


GZIP = b"\x1f\x8b\x08"
BZIP2 = b"BZh"
XZ = b"\xfd7zXZ\x00"
# Longest magic bytes that are looked for: those of bzip2 with its first block.
_MAGIC_BYTES = 10
# Dictionaries of xz -9 are 64 MiB; a header can ask for 4 GiB.
_XZ_BYTES = 256 << 20
_BLOCK = 1 << 14  # zlib discards the output of a call that meets damage
_PIECE = 1 << 17
# compressed bytes that must decode for a position to count as the start of a member
_HEAD = 1 << 10
_FIRST = 1 << 9  # first step of a search: the next member is usually near
# bytes that searches may waste: a multiple of the file size, and a constant
_MAX_WASTE = 32
_EXTRA_WASTE = 64 << 20
_DECODED_COSTS = 64  # decoding so many bytes costs as much as reading one
_ENOUGH = "more damage than is searched: the rest is not read"
_MAGIC = {
    GZIP: re.compile(rb"\x1f\x8b\x08[\x00-\x1f]"),
    ZSTD: re.compile(re.escape(ZSTD)),
    LZ4: re.compile(re.escape(LZ4)),
    # The size of blocks, and the mark of a block (digits of pi) or of the end of an empty stream.
    BZIP2: re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"),
    XZ: re.compile(re.escape(XZ)),
}

Plausible = Callable[[bytes], bool]


@dataclass(frozen=True, slots=True)
class MemberChunk:
    """Decoded bytes of the member at byte `offset` of the file; `is_first` marks its first
    chunk.
    """

    offset: int
    data: bytes
    is_first: bool


@dataclass(frozen=True, slots=True)
class DamagedMember:
    """The member at `offset` is damaged: the chunks so far are all of it, and the last of them
    may be wrong.
    """

    offset: int
    reason: str


def detect_compression(source: InputStream) -> bytes:
    """Return the magic bytes of the compression of a file, b"" for a plain one."""
    head = source.read_block(0, _MAGIC_BYTES)
    if is_skippable(head[:4]):
        return ZSTD
    found = next(
        (magic for magic in _MAGIC if head.startswith(magic) or (head and magic.startswith(head))),
        b"",
    )
    # A text may begin with three letters.
    is_text = found == BZIP2 and len(head) == _MAGIC_BYTES and not _MAGIC[BZIP2].match(head)
    return b"" if is_text else found


class CompressedMembers:
    """The members of one compressed file."""

    def __init__(self, source: InputStream, magic: bytes, plausible: Plausible) -> None:
        """Open the members of `source`.

        Args:
            source: the file.
            magic: magic bytes of its compression, from `detect_compression`.
            plausible: returns whether decoded bytes look like the start of a member; used to resume
                after damage.
        """
        self.source = source
        self.magic = magic
        self.plausible = plausible
        self._zstd = _build_decompressor(source) if magic == ZSTD else None
        self._decoded = 0  # bytes of the current member
        # remaining bytes that searches may waste
        self._left = _MAX_WASTE * source.size + _EXTRA_WASTE

    def iter_chunks(self, start: int) -> Iterator[MemberChunk | DamagedMember]:
        """Decode from the member at byte `start` to the end of the file."""
        position: int | None = start
        while position is not None and position < self.source.size:
            began = self.source.work
            self._decoded = 0
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
        """Return the offset of the next plausible member, or where the search was given up; None
        if there is none.
        """
        pattern = _MAGIC[self.magic]
        size = _FIRST
        while position < self.source.size:
            began = self.source.work
            # Some bytes more, for magic bytes that begin before the border.
            block = self.source.read_block(position, size + _MAGIC_BYTES)
            for match in pattern.finditer(block):
                start = position + match.start()
                if match.start() < size and (
                    self._is_member_start(start) or self.source.work - began > self._left
                ):
                    self._left -= self.source.work - began
                    return start
            self._left -= self.source.work - began
            position += size
            size = min(size * 2, _BLOCK)
        return None

    def _is_member_start(self, position: int) -> bool:
        try:
            if self.magic == GZIP:
                head = self.source.read_block(position, _HEAD)
                return self.plausible(zlib.decompressobj(31).decompress(head, _HEAD))
            if self.magic in _DECODERS:
                first = next(self._decode_stream(position))
            else:
                # lz4 would read into damage after the frame
                end = ENDS[self.magic](self.source, position)
                first = next(self._decode_frame(position, end))
            return self.plausible(first.data[:_HEAD])
        except (FrameError, zlib.error, StopIteration):
            return False

    def _decode_member(self, position: int) -> Generator[MemberChunk, None, int]:
        """Decode one member and return the offset of its end."""
        head = self.source.read_block(position, len(XZ))
        if self.magic == ZSTD and is_skippable(head[:4]):
            return find_skippable_frame_end(self.source, position)
        if self.magic == XZ and head.startswith(b"\0"):
            return self._skip_stream_padding(position)
        if not head.startswith(self.magic):
            raise FrameError(
                "truncated"
                if self.magic.startswith(head)
                else f"damaged: no {_NAMES[self.magic]} here"
            )
        if self.magic == GZIP:
            return (yield from self._decode_gzip(position))
        if self.magic in _DECODERS:
            return (yield from self._decode_stream(position))
        try:
            end = ENDS[self.magic](self.source, position)
        except FrameError:
            yield from self._decode_frame(position)  # the bytes before the cut
            raise
        yield from self._decode_frame(position, end)
        return end

    def _decode_gzip(self, start: int) -> Generator[MemberChunk, None, int]:
        inflate = zlib.decompressobj(31)
        position = start
        begins = True
        while not inflate.eof:
            block = inflate.unconsumed_tail or self.source.read_block(position, _BLOCK)
            if not inflate.unconsumed_tail:
                position += len(block)
            if not block:
                raise FrameError("truncated")
            try:
                # At most _PIECE bytes at a time, whatever a member decodes to.
                data = inflate.decompress(block, _PIECE)
            except zlib.error as error:
                raise FrameError(
                    f"damaged gzip member: {str(error).rpartition(': ')[2]}"
                ) from error
            if data:
                self._decoded += len(data)
                yield MemberChunk(start, data, begins)
                begins = False
        return position - len(inflate.unused_data)

    def _decode_stream(self, start: int) -> Generator[MemberChunk, None, int]:
        """Decode one stream of bzip2 or xz and return the offset of its end."""
        decoder = _DECODERS[self.magic]()
        position = start
        begins = True
        while not decoder.eof:
            block = b""
            if decoder.needs_input:
                block = self.source.read_block(position, _BLOCK)
                position += len(block)
                if not block:
                    raise FrameError("truncated")
            try:
                data = decoder.decompress(block, _PIECE)
            except (OSError, ValueError, lzma.LZMAError) as error:
                raise FrameError(f"damaged {_NAMES[self.magic]}: {error}") from error
            if data:
                self._decoded += len(data)
                yield MemberChunk(start, data, begins)
                begins = False
        return position - len(decoder.unused_data)

    def _skip_stream_padding(self, position: int) -> int:
        """Return the offset after zero bytes, as they may follow a stream of xz."""
        block = self.source.read_block(position, _BLOCK)
        return position + len(block) - len(block.lstrip(b"\0"))

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


_NAMES = {
    GZIP: "gzip member",
    ZSTD: "zstd frame",
    LZ4: "lz4 frame",
    BZIP2: "bzip2 stream",
    XZ: "xz stream",
}
_DECODERS: dict[bytes, Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor]] = {
    BZIP2: bz2.BZ2Decompressor,
    XZ: lambda: lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=_XZ_BYTES),
}


def _build_decompressor(source: InputStream) -> zstandard.ZstdDecompressor:
    """Build a decompressor with the dictionary of the file, if it has one."""
    content = read_dictionary(source)
    try:
        return zstandard.ZstdDecompressor(
            zstandard.ZstdCompressionDict(content) if content else None
        )
    except zstandard.ZstdError:  # a damaged dictionary: each frame then reports its own error
        return zstandard.ZstdDecompressor()


class _StreamSlice(io.RawIOBase):
    """A byte range of a source as a binary file."""

    def __init__(self, source: InputStream, start: int, end: int) -> None:
        self._source = source
        self._start = start
        self._position = start
        self._end = end

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position - self._start

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: self._start, io.SEEK_CUR: self._position, io.SEEK_END: self._end}[
            whence
        ]
        self._position = max(self._start, min(base + offset, self._end))
        return self.tell()

    def read(self, size: int | None = -1) -> bytes:
        left = self._end - self._position
        data = self._source.read_block(
            self._position, left if size is None or size < 0 else min(size, left)
        )
        self._position += len(data)
        return data
