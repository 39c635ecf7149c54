"""How large the parts of an Arrow file or stream become, before anything is decoded.

Reads the headers of messages and the footer alone (Apache Arrow's Message and Footer in flatbuffers), gives rows and
bytes. What cannot be understood counts for nothing here: decoding it says why.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from data_pipeline.readers.source import InputStream

_MOST_METADATA = 16 << 20
_RECORD_BATCH, _DICTIONARY = 3, 2


@dataclass(frozen=True, slots=True)
class ArrowMessage:
    """A record batch of so many rows, or what else an Arrow file consists of; `size` in bytes once it is unpacked."""

    is_batch: bool
    rows: int
    size: int


class _IllegibleError(Exception):
    """Not what a header looks like."""


def read_file_messages(source: InputStream) -> list[ArrowMessage]:
    """The dictionaries and then the record batches of an Arrow file, by its footer; [] when that is not legible."""
    size = int.from_bytes(source.read_at(source.size - 10, 4), "little")
    try:
        if not 0 < size <= _MOST_METADATA:
            return []
        footer = _FlatbufferTable(source.read_at(source.size - 10 - size, size))
        blocks = [struct.unpack_from("<q", block)[0] for field in (2, 3) for block in footer.read_structs(field, 24)]
        return [_read_message(source, offset)[1] for offset in blocks]
    except (_IllegibleError, IndexError, struct.error):
        return []


def read_stream_messages(source: InputStream) -> Iterator[ArrowMessage]:
    """The messages of an Arrow stream, up to the first that is not legible."""
    position = 0
    while position < source.size:
        try:
            length, message = _read_message(source, position)
        except (_IllegibleError, IndexError, struct.error):
            return
        yield message
        position += length


def _read_message(source: InputStream, position: int) -> tuple[int, ArrowMessage]:
    """Bytes of the message that begins here, and what it says."""
    mark, size = struct.unpack("<II", source.read_at(position, 8))
    if mark != 0xFFFF_FFFF or not 0 < size <= _MOST_METADATA:
        raise _IllegibleError
    message = _FlatbufferTable(source.read_at(position + 8, size))
    length, kind, begin = message.read_number(3, "q"), message.read_number(1, "B"), position + 8 + size
    if length < 0:
        raise _IllegibleError
    if kind not in (_RECORD_BATCH, _DICTIONARY):
        return 8 + size + length, ArrowMessage(False, 0, 0)
    batch = message.read_table(2) if kind == _RECORD_BATCH else message.read_table(2).read_table(1)
    buffers = [struct.unpack("<qq", one) for one in batch.read_structs(2, 16)]
    unpacked = sum(max(0, size) for _, size in buffers)
    if batch.has_field(3):  # packed: the bytes that each becomes stand in front of it, -1 where it is as it is
        said = [source.read_at(begin + start, 8) for start, packed in buffers if packed >= 8]
        unpacked += sum(max(0, int.from_bytes(one, "little", signed=True)) for one in said)
    return 8 + size + length, ArrowMessage(kind == _RECORD_BATCH, max(0, batch.read_number(0, "q")), unpacked)


class _FlatbufferTable:
    """A table of flatbuffers: the root of some bytes, or one that it leads to."""

    def __init__(self, data: bytes, place: int | None = None) -> None:
        self.data = data
        self.place = struct.unpack_from("<I", data)[0] if place is None else place

    def _get_field_offset(self, number: int) -> int:
        shapes = self.place - self._read_scalar(self.place, "i")
        if 4 + 2 * number >= self._read_scalar(shapes, "H"):
            return 0
        return self._read_scalar(shapes + 4 + 2 * number, "H")

    def _read_scalar(self, place: int, kind: str) -> int:
        if place < 0:
            raise _IllegibleError
        return int(struct.unpack_from("<" + kind, self.data, place)[0])

    def has_field(self, number: int) -> bool:
        return self._get_field_offset(number) != 0

    def read_number(self, number: int, kind: str) -> int:
        field = self._get_field_offset(number)
        return self._read_scalar(self.place + field, kind) if field else 0

    def read_table(self, number: int) -> "_FlatbufferTable":
        field = self._get_field_offset(number)
        if not field:
            raise _IllegibleError
        return _FlatbufferTable(self.data, self.place + field + self._read_scalar(self.place + field, "I"))

    def read_structs(self, number: int, size: int) -> list[bytes]:
        field = self._get_field_offset(number)
        if not field:
            return []
        begin = self.place + field + self._read_scalar(self.place + field, "I")
        count = self._read_scalar(begin, "I")
        if begin + 4 + count * size > len(self.data):
            raise _IllegibleError
        return [self.data[begin + 4 + n * size : begin + 4 + (n + 1) * size] for n in range(count)]
