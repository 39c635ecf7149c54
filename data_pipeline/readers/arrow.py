"""How large the parts of an Arrow file or stream become, before anything is decoded.

Reads the headers of messages and the footer alone (Apache Arrow's Message and Footer in flatbuffers), gives rows and
bytes. What cannot be understood counts for nothing here: decoding it says why.

Arrow files (Feather is one) and streams in, documents out, a few rows at a time.

Reads the columns that the configuration names. What is damaged costs its record batch; so does one that would take more
memory than a process may. A stream cannot be read behind such a batch.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from data_pipeline.readers.input_stream import InputStream
from data_pipeline.readers.page_batch import Page, SkippedRecord
from data_pipeline.readers.row_reader import (
    DAMAGE,
    ROWS,
    DecodeLimitError,
    RowReader,
    build_damage_skip,
    has_text_column,
    list_columns,
)
from llmsys.config.read import ReadConfig

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


_MOST_BATCH = 128 << 20  # bytes of a record batch that is unpacked, and of all dictionaries
_SHARED_BYTES = 64 << 20  # that some rows may take when they can share bytes


def read_arrow(source: InputStream, max_text_bytes: int, config: ReadConfig) -> Iterator[Page | SkippedRecord]:
    """Yield the documents of an Arrow file (Feather is one) or stream."""
    reader = RowReader(source, max_text_bytes, config)
    is_file = source.read_at(0, 6) == b"ARROW1"
    messages = read_file_messages(source) if is_file else []
    said = [message for message in messages if message.is_batch]
    rows = sum(message.rows for message in said)
    try:
        file = pa.PythonFile(source, mode="r")
        shared = sum(message.size for message in messages if not message.is_batch)
        if shared > _MOST_BATCH:
            raise DecodeLimitError(f"dictionaries of {shared} bytes, more than {_MOST_BATCH}")
        arrow: Any = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
        columns = list_columns(arrow.schema, config)
        batches = arrow.num_record_batches if is_file else None
    except DecodeLimitError as error:
        yield SkippedRecord(source.path, 0, str(error), reader.bound_row_count(rows))
        return
    except DAMAGE as error:
        yield build_damage_skip(source, 0, "Arrow file", error)
        return
    if not has_text_column(columns, config):
        yield reader.build_missing_text_skip(rows, arrow.schema)
    elif batches is None:
        yield from reader.iter_documents(
            _iter_batch_slices(_iter_stream_batches(source, arrow), columns), "record batch", 1
        )
    else:
        for index in range(batches):
            message = said[index] if len(said) == batches else ArrowMessage(True, 1, 0)
            part = _iter_batch_slices(_iter_file_batch(arrow, index, message), columns)
            yield from reader.iter_documents(part, "record batch", message.rows)


def _iter_file_batch(arrow: Any, index: int, message: ArrowMessage) -> Iterator[pa.RecordBatch]:
    """One record batch of a file."""
    if message.size > _MOST_BATCH:
        raise DecodeLimitError(f"a record batch of {message.size} bytes, more than {_MOST_BATCH}: write smaller ones")
    yield arrow.get_batch(index)


def _iter_stream_batches(source: InputStream, arrow: Any) -> Iterator[pa.RecordBatch]:
    """The record batches of a stream, which cannot be read behind one that is too large."""
    shared = 0
    messages = read_stream_messages(source)
    while True:
        for message in messages:
            shared += 0 if message.is_batch else message.size
            if max(shared, message.size) > _MOST_BATCH:
                size = max(shared, message.size)
                raise DecodeLimitError(
                    f"{size} bytes at once, more than {_MOST_BATCH}: the rest of the stream is not read"
                )
            if message.is_batch:
                break
        batch = next(arrow, None)
        if batch is None:
            return
        yield batch


def _iter_batch_slices(batches: Iterator[pa.RecordBatch], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of batches, a few at a time: fewer where each may be as long as all that lies behind it."""
    for batch in batches:
        batch = batch.select(columns)
        simple = all(_has_unshared_bytes(column.type) for column in batch.columns)
        step = ROWS if simple else max(1, min(ROWS, _SHARED_BYTES // max(1, batch.get_total_buffer_size())))
        for start in range(0, batch.num_rows, step):
            yield batch.slice(start, step)


def _has_unshared_bytes(kind: pa.DataType) -> bool:
    """Whether no two rows of a column can share their bytes."""
    return bool(pa.types.is_primitive(kind)) or any(
        test(kind)
        for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    )
