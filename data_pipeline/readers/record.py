"""Walks the records of a WARC file, over damage: what is whole is delivered, what is not is named with its offset.

FastWARC reads at the speed of zlib but stops at the first damaged byte, and ends without a word where a file was cut.
This module checks how the file ends, and starts again at the next record that can be read.
"""

import mmap
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from fastwarc.warc import ArchiveIterator, WarcRecord, any_type

from data_pipeline.readers.page import Skip

Taken = TypeVar("Taken")
Bytes = Any  # mmap.mmap, which the type checker knows as a buffer only since Python 3.12

_GZIP = b"\x1f\x8b\x08"
_GZIP_MEMBER = re.compile(rb"\x1f\x8b\x08[\x00-\x1f]")
_PLAIN_RECORD = re.compile(rb"WARC/1\.[01]\r\n[A-Za-z\-]+:")
_BLOCK = 1 << 16


class ShortRecordError(Exception):
    """A record holds fewer bytes than its header says."""


def walk(path: str, take: Callable[[WarcRecord], Taken]) -> Iterator[Taken | Skip]:
    """Apply `take` to each record of a file while its bytes are there, and yield what it gives.

    Damage becomes a `Skip`, once per place: an unreadable file, a cut end, bytes that are no record, a damaged record.
    """
    try:
        if Path(path).is_dir():
            raise IsADirectoryError(21, os.strerror(21))
        with Path(path).open("rb") as stream:
            yield from _walk_stream(path, stream, take)
    except OSError as error:
        yield Skip(path, 0, f"unreadable file: {error.strerror or error}")


def _walk_stream(path: str, stream: BinaryIO, take: Callable[[WarcRecord], Taken]) -> Iterator[Taken | Skip]:
    if os.fstat(stream.fileno()).st_size == 0:
        yield Skip(path, 0, "empty file")
        return
    with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start: int | None = 0
        while start is not None:
            last, damage = start, ""
            held: Taken | Skip | None = None  # a record that a cut has broken is better named by the cut
            stream.seek(start)
            try:
                for record in ArchiveIterator(stream, record_types=any_type, parse_http=False):
                    if held is not None:
                        yield held
                    held, last = None, record.stream_pos
                    held = take(record)
            except ShortRecordError:
                damage = "truncated"
            except (OSError, ValueError, EOFError) as error:
                damage = f"damaged record: {error}"
            judge = _gzip_damage if _GZIP.startswith(data[start : start + 3]) else _plain_damage
            skip, start = judge(path, data, start, last, damage)
            if held is not None and not (skip and isinstance(held, Skip) and held.offset == skip.offset):
                yield held
            if skip:
                yield skip


def _gzip_damage(path: str, data: Bytes, start: int, last: int, damage: str) -> tuple[Skip | None, int | None]:
    """What is wrong behind the last record that was read, and where to go on."""
    position = last if data[last : last + 3] == _GZIP else start
    end: int | None = position
    while end is not None and end < len(data):
        position = end
        end, whole = _member_end(data, position)
        if not whole:
            break
    else:
        # All members are whole, so that what went wrong lies in a record, not in the file.
        return (Skip(path, last, damage) if damage else None), None
    cut = end is None and _GZIP.startswith(data[position : position + 3])
    reason = "truncated" if cut else (damage or "damaged record: no gzip member")
    return Skip(path, position, reason), _next_member(data, position + 1)


def _member_end(data: Bytes, position: int) -> tuple[int | None, bool]:
    """Where the gzip member at `position` ends, None at the end of the file; and whether it is whole."""
    inflate = zlib.decompressobj(31)
    while position < len(data):
        block = data[position : position + _BLOCK]
        try:
            inflate.decompress(block)
            while inflate.unconsumed_tail:
                inflate.decompress(inflate.unconsumed_tail)
        except zlib.error:
            return position, False
        position += len(block)
        if inflate.eof:
            return position - len(inflate.unused_data), True
    return None, False


def _next_member(data: Bytes, position: int) -> int | None:
    """Start of the next gzip member that holds a record."""
    for match in _GZIP_MEMBER.finditer(data, position):
        try:
            if zlib.decompressobj(31).decompress(data[match.start() : match.start() + 1024], 5) == b"WARC/":
                return match.start()
        except zlib.error:
            continue
    return None


def _plain_damage(path: str, data: Bytes, start: int, last: int, damage: str) -> tuple[Skip | None, int | None]:
    """The same for files that are not compressed: a record starts with its version line."""
    if not damage:
        whole = data[-2:] in (b"\r\n", b"\n\n") or data[:5] != b"WARC/"  # other compressions end as they like
        return (None if whole else Skip(path, last, "truncated")), None
    match = _PLAIN_RECORD.search(data, last + 1)
    return Skip(path, last, damage), match.start() if match else _next_member(data, last + 1)
