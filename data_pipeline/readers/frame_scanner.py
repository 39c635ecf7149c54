"""Where a zstd or lz4 frame ends, without decoding it, and the dictionary that zstd frames of a file share.

Reads headers of blocks (RFC 8878, 3.1.1; LZ4 frame format 1.6), gives positions. Promises: bounded steps, and a
`FrameError` for what is no frame or is cut.
"""

from collections.abc import Callable

import zstandard

from data_pipeline.readers.input_stream import InputStream

ZSTD = b"\x28\xb5\x2f\xfd"
LZ4 = b"\x04\x22\x4d\x18"
_SKIPPABLE = b"\x2a\x4d\x18"  # behind a byte from 0x50 to 0x5f
_DICTIONARY = b"\x5d\x2a\x4d\x18"  # WARC files in zstd carry theirs in the first frame (IIPC, Zstandard for WARC, 4)
_DICTIONARY_BYTES = 64 << 20


class FrameError(Exception):
    """What begins here is no whole frame; the text says why."""


def is_skippable(head: bytes) -> bool:
    """Whether four bytes begin a frame that readers pass over."""
    return len(head) == 4 and head[1:] == _SKIPPABLE and 0x50 <= head[0] <= 0x5F


def find_skippable_frame_end(source: InputStream, start: int) -> int:
    """Where the skippable frame at `start` ends."""
    return _require_within_file(source, start + 8 + int.from_bytes(source.read_at(start + 4, 4), "little"))


def find_zstd_frame_end(source: InputStream, start: int) -> int:
    """Where the zstd frame at `start` ends."""
    descriptor = source.read_at(start + 4, 1)
    if not descriptor:
        raise FrameError("truncated")
    flags = descriptor[0]
    content_size, single, checksum, dictionary = flags >> 6, flags >> 5 & 1, flags >> 2 & 1, flags & 3
    position = start + 5 + (1 - single) + (0, 1, 2, 4)[dictionary] + (single, 2, 4, 8)[content_size]
    while True:
        header = int.from_bytes(_read_exactly(source, position, 3), "little")
        last, kind, size = header & 1, header >> 1 & 3, header >> 3
        if kind == 3:
            raise FrameError("damaged zstd frame")
        position += 3 + (1 if kind == 1 else size)
        if last:
            return _require_within_file(source, position + 4 * checksum)


def find_lz4_frame_end(source: InputStream, start: int) -> int:
    """Where the lz4 frame at `start` ends."""
    flags = _read_exactly(source, start + 4, 1)[0]
    if flags >> 6 != 1:
        raise FrameError("damaged lz4 frame")
    position = start + 7 + 8 * (flags >> 3 & 1) + 4 * (flags & 1)
    while size := int.from_bytes(_read_exactly(source, position, 4), "little"):
        position += 4 + (size & 0x7FFF_FFFF) + 4 * (flags >> 4 & 1)
    return _require_within_file(source, position + 4 + 4 * (flags >> 2 & 1))


ENDS: dict[bytes, Callable[[InputStream, int], int]] = {ZSTD: find_zstd_frame_end, LZ4: find_lz4_frame_end}


def read_dictionary(source: InputStream) -> bytes | None:
    """The dictionary at the beginning of a zstd file, if there is one."""
    if source.read_at(0, 4) != _DICTIONARY:
        return None
    size = int.from_bytes(source.read_at(4, 4), "little")
    content = source.read_at(8, min(size, _DICTIONARY_BYTES))
    if not content.startswith(ZSTD):
        return content
    try:
        return zstandard.ZstdDecompressor().decompress(content, max_output_size=_DICTIONARY_BYTES)
    except zstandard.ZstdError:
        return None


def _read_exactly(source: InputStream, position: int, size: int) -> bytes:
    data = source.read_at(position, size)
    if len(data) < size:
        raise FrameError("truncated")
    return data


def _require_within_file(source: InputStream, end: int) -> int:
    if end > source.size:
        raise FrameError("truncated")
    return end
