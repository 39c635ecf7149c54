"""Read documents from Arrow files (Feather included) and Arrow streams, a few rows at a time.

Message headers and the footer are parsed first (flatbuffers), so that the decoded size is known
before pyarrow decodes.

Reads only the columns that the configuration names.

Invariants:
- A damaged record batch, or one over the memory limit, loses its own rows only; in a stream it ends
  the reading.
- A header that cannot be parsed counts as size 0 here. pyarrow reports the error when it decodes.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from llmsys.config.cleaning import ReadConfig
from llmsys.data_pipeline.readers.input_stream import InputStream
from llmsys.data_pipeline.readers.page_batch import Page, SkippedRecord
from llmsys.data_pipeline.readers.row_reader import (
    DAMAGE,
    ROWS,
    DecodeLimitError,
    RowBatch,
    RowReader,
    build_damage_skip,
    has_text_column,
    list_columns,
    list_further_columns,
)

_MAX_METADATA = 16 << 20
# MessageHeader in Message.fbs of Apache Arrow
_RECORD_BATCH = 3
_DICTIONARY = 2


@dataclass(frozen=True, slots=True)
class ArrowMessage:
    """One message of an Arrow file or stream.

    Attributes:
        is_batch: whether it is a record batch; otherwise a schema or a dictionary.
        rows: number of rows of a record batch.
        size: decompressed bytes of its buffers.
    """

    is_batch: bool
    rows: int
    size: int


class _IllegibleError(Exception):
    """The bytes are not a valid flatbuffers header."""


def read_file_messages(source: InputStream) -> list[ArrowMessage]:
    """Return the messages listed in the footer of an Arrow file, dictionaries first; [] if the
    footer is invalid.
    """
    # An Arrow file ends with the length of its footer and the six bytes ARROW1.
    size = int.from_bytes(source.read_block(source.size - 10, 4), "little")
    try:
        if not 0 < size <= _MAX_METADATA:
            return []
        # File.fbs: field 2 lists the dictionaries, 3 the record batches; a Block takes 24 bytes,
        # its offset is first.
        footer = _FlatbufferTable(source.read_block(source.size - 10 - size, size))
        blocks = [
            struct.unpack_from("<q", block)[0]
            for field in (2, 3)
            for block in footer.read_structs(field, 24)
        ]
        return [_read_message(source, offset)[1] for offset in blocks]
    except (_IllegibleError, IndexError, struct.error):
        return []


def read_stream_messages(source: InputStream) -> Iterator[ArrowMessage]:
    """Yield the messages of an Arrow stream up to the first invalid one."""
    position = 0
    while position < source.size:
        try:
            length, message = _read_message(source, position)
        except (_IllegibleError, IndexError, struct.error):
            return
        yield message
        position += length


def _read_message(source: InputStream, position: int) -> tuple[int, ArrowMessage]:
    """Return the length in bytes of the message at `position`, and the message."""
    mark, size = struct.unpack("<II", source.read_block(position, 8))
    # The mark that begins every message since Arrow 0.15.
    if mark != 0xFFFF_FFFF or not 0 < size <= _MAX_METADATA:
        raise _IllegibleError
    message = _FlatbufferTable(source.read_block(position + 8, size))
    # Message.fbs: field 1 is the kind of header, 2 the header, 3 the length of the body.
    length = message.read_number(3, "q")
    kind = message.read_number(1, "B")
    begin = position + 8 + size
    if length < 0:
        raise _IllegibleError
    if kind not in (_RECORD_BATCH, _DICTIONARY):
        return 8 + size + length, ArrowMessage(False, 0, 0)
    # A dictionary is a record batch inside of another table.
    batch = message.read_table(2) if kind == _RECORD_BATCH else message.read_table(2).read_table(1)
    buffers = [struct.unpack("<qq", buffer) for buffer in batch.read_structs(2, 16)]
    unpacked = sum(max(0, size) for _, size in buffers)
    # compressed: each buffer is preceded by its decompressed size, -1 if it is uncompressed
    if batch.has_field(3):
        prefixes = [source.read_block(begin + start, 8) for start, packed in buffers if packed >= 8]
        unpacked += sum(
            max(0, int.from_bytes(prefix, "little", signed=True)) for prefix in prefixes
        )
    return 8 + size + length, ArrowMessage(
        kind == _RECORD_BATCH, max(0, batch.read_number(0, "q")), unpacked
    )


class _FlatbufferTable:
    """A flatbuffers table: the root table of `data`, or the table at `position`."""

    def __init__(self, data: bytes, position: int | None = None) -> None:
        self.data = data
        self.position = struct.unpack_from("<I", data)[0] if position is None else position

    def _get_field_offset(self, number: int) -> int:
        vtable = self.position - self._read_scalar(self.position, "i")
        # A vtable holds its own size, that of the table, and the offset of each field: two bytes
        # each.
        if 4 + 2 * number >= self._read_scalar(vtable, "H"):
            return 0  # an optional field that was not written
        return self._read_scalar(vtable + 4 + 2 * number, "H")

    def _read_scalar(self, position: int, kind: str) -> int:
        if position < 0:
            raise _IllegibleError
        return int(struct.unpack_from("<" + kind, self.data, position)[0])

    def has_field(self, number: int) -> bool:
        return self._get_field_offset(number) != 0

    def read_number(self, number: int, kind: str) -> int:
        field = self._get_field_offset(number)
        return self._read_scalar(self.position + field, kind) if field else 0

    def read_table(self, number: int) -> "_FlatbufferTable":
        field = self._get_field_offset(number)
        if not field:
            raise _IllegibleError
        return _FlatbufferTable(
            self.data, self.position + field + self._read_scalar(self.position + field, "I")
        )

    def read_structs(self, number: int, size: int) -> list[bytes]:
        field = self._get_field_offset(number)
        if not field:
            return []
        begin = self.position + field + self._read_scalar(self.position + field, "I")
        count = self._read_scalar(begin, "I")
        if begin + 4 + count * size > len(self.data):
            raise _IllegibleError
        return [self.data[begin + 4 + n * size : begin + 4 + (n + 1) * size] for n in range(count)]


_MAX_BATCH = 128 << 20  # decompressed bytes of one record batch, and of all dictionaries
# limit of a slice whose rows can share bytes: each row may decode to the whole buffer
_SHARED_BYTES = 64 << 20


def read_arrow(
    source: InputStream, max_text_bytes: int, config: ReadConfig
) -> Iterator[Page | SkippedRecord]:
    """Read an Arrow file (Feather included) or stream.

    Args:
        source: The file.
        max_text_bytes: Longer texts are skipped.
        config: Fields of a document.

    Yields:
        Documents, and a skip for each corrupt batch or row that is none.
    """
    reader = RowReader(source, max_text_bytes, config)
    is_file = source.read_block(0, 6) == b"ARROW1"
    messages = read_file_messages(source) if is_file else []
    record_batches = [message for message in messages if message.is_batch]
    rows = sum(message.rows for message in record_batches)
    try:
        file = pa.PythonFile(source, mode="r")
        shared = sum(message.size for message in messages if not message.is_batch)
        if shared > _MAX_BATCH:
            raise DecodeLimitError(f"dictionaries of {shared} bytes, more than {_MAX_BATCH}")
        arrow: Any = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
        columns = list_columns(arrow.schema, config)
        wanted = columns, list_further_columns(arrow.schema, columns, config)
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
            _iter_batch_slices(_iter_stream_batches(source, arrow), wanted), "record batch", 1
        )
    else:
        for index in range(batches):
            message = (
                record_batches[index]
                if len(record_batches) == batches
                else ArrowMessage(True, 1, 0)
            )
            part = _iter_batch_slices(_iter_file_batch(arrow, index, message), wanted)
            yield from reader.iter_documents(part, "record batch", message.rows)


def _iter_file_batch(arrow: Any, index: int, message: ArrowMessage) -> Iterator[pa.RecordBatch]:
    """Yield one record batch of a file, if it is within the memory limit."""
    if message.size > _MAX_BATCH:
        raise DecodeLimitError(
            f"a record batch of {message.size} bytes, more than {_MAX_BATCH}: write smaller ones"
        )
    yield arrow.get_batch(index)


def _iter_stream_batches(source: InputStream, arrow: Any) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a stream; the first one over the memory limit ends it."""
    shared = 0
    messages = read_stream_messages(source)
    while True:
        # The headers up to the next record batch, which pyarrow then decodes.
        for message in messages:
            shared += 0 if message.is_batch else message.size
            if max(shared, message.size) > _MAX_BATCH:
                size = max(shared, message.size)
                raise DecodeLimitError(
                    f"{size} bytes at once, more than {_MAX_BATCH}: the rest of the stream is not "
                    "read"
                )
            if message.is_batch:
                break
        batch = next(arrow, None)
        if batch is None:
            return
        yield batch


def _iter_batch_slices(
    batches: Iterator[pa.RecordBatch], wanted: tuple[Sequence[str], Sequence[int]]
) -> Iterator[RowBatch]:
    """Yield slices of batches, with fewer rows where rows can share bytes (dictionaries, views,
    nested types).
    """
    for batch in batches:
        named, further = (batch.select(columns) for columns in wanted)
        columns = [*named.columns, *further.columns]
        simple = all(_has_unshared_bytes(column.type) for column in columns)
        size = 0 if simple else named.get_total_buffer_size() + further.get_total_buffer_size()
        step = ROWS if simple else max(1, min(ROWS, _SHARED_BYTES // max(1, size)))
        for start in range(0, named.num_rows, step):
            yield RowBatch(
                named.slice(start, step), further.slice(start, step) if wanted[1] else None
            )


def _has_unshared_bytes(kind: pa.DataType) -> bool:
    """Return whether no two rows of a column can share bytes."""
    return bool(pa.types.is_primitive(kind)) or any(
        test(kind)
        for test in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_binary,
            pa.types.is_large_binary,
        )
    )
