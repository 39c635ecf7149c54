"""Find the end of a zstd or lz4 frame without decoding it, and read the dictionary that zstd frames share.

Reads block headers only (RFC 8878, 3.1.1; LZ4 frame format 1.6).

Invariants:
- Steps are bounded by the size of the file.
- An invalid or truncated frame raises `FrameError`.
"""

from collections.abc import Callable

import zstandard

from data_pipeline.readers.input_stream import InputStream

ZSTD = b"\x28\xb5\x2f\xfd"
LZ4 = b"\x04\x22\x4d\x18"
_SKIPPABLE = b"\x2a\x4d\x18"  # after a byte from 0x50 to 0x5f
_DICTIONARY = b"\x5d\x2a\x4d\x18"  # WARC files in zstd carry theirs in the first frame (IIPC, Zstandard for WARC, 4)
_DICTIONARY_BYTES = 64 << 20


class FrameError(Exception):
    """The bytes are not a complete frame; the message says why."""


def is_skippable(head: bytes) -> bool:
    """Return whether four bytes begin a skippable frame."""
    return len(head) == 4 and head[1:] == _SKIPPABLE and 0x50 <= head[0] <= 0x5F


def find_skippable_frame_end(source: InputStream, start: int) -> int:
    """Return the offset of the end of the skippable frame at `start`."""
    return _require_within_file(source, start + 8 + int.from_bytes(source.read_block(start + 4, 4), "little"))


def find_zstd_frame_end(source: InputStream, start: int) -> int:
    """Return the offset of the end of the zstd frame at `start`."""
    descriptor = source.read_block(start + 4, 1)
    if not descriptor:
        raise FrameError("truncated")
    flags = descriptor[0]
    # RFC 8878, 3.1.1.1.1: bits of the frame header descriptor, and the sizes of the fields they announce
    content_size, single, checksum, dictionary = flags >> 6, flags >> 5 & 1, flags >> 2 & 1, flags & 3
    position = start + 5 + (1 - single) + (0, 1, 2, 4)[dictionary] + (single, 2, 4, 8)[content_size]
    while True:
        header = int.from_bytes(_read_exactly(source, position, 3), "little")
        last, kind, size = header & 1, header >> 1 & 3, header >> 3
        if kind == 3:  # reserved
            raise FrameError("damaged zstd frame")
        position += 3 + (1 if kind == 1 else size)  # an RLE block stores one byte
        if last:
            return _require_within_file(source, position + 4 * checksum)


def find_lz4_frame_end(source: InputStream, start: int) -> int:
    """Return the offset of the end of the lz4 frame at `start`."""
    flags = _read_exactly(source, start + 4, 1)[0]
    if flags >> 6 != 1:
        raise FrameError("damaged lz4 frame")
    position = start + 7 + 8 * (flags >> 3 & 1) + 4 * (flags & 1)
    while size := int.from_bytes(_read_exactly(source, position, 4), "little"):
        position += 4 + (size & 0x7FFF_FFFF) + 4 * (flags >> 4 & 1)
    return _require_within_file(source, position + 4 + 4 * (flags >> 2 & 1))


ENDS: dict[bytes, Callable[[InputStream, int], int]] = {ZSTD: find_zstd_frame_end, LZ4: find_lz4_frame_end}


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
