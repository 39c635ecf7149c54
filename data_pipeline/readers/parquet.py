"""How large the pages of a parquet file become, before anything is unpacked.

Reads headers of pages alone (Apache Parquet's PageHeader in Thrift's compact protocol), gives bytes and rows. What
cannot be understood counts for nothing here: decoding it says why.

Parquet files in, documents out, a few rows at a time.

Reads the columns that the configuration names and no others. What is damaged costs its row group; so does a page that
would take more memory than a process may.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

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

MOST_BYTES = 192 << 20  # of a page that is unpacked
_ROWS_BYTES = 64 << 20

_HEADER = 1 << 12  # bytes of a page's header that are looked at first; with statistics it may be longer
_LONGEST_HEADER = 1 << 20
_DEPTH = 8
_STRUCT, _BINARY = 12, 8
_FIXED = {1: 0, 2: 0, 3: 1, 7: 8}  # bytes of true, false, a byte, a double
_VARINTS = (4, 5, 6)


class _IllegibleError(Exception):
    """Not what a header looks like."""


def compute_largest_page(source: InputStream, column: Any, most_rows: int) -> tuple[int, int]:
    """Bytes of the largest page of a column chunk (pyarrow's ColumnChunkMetaData) once it is unpacked, and how many
    rows, at most `most_rows`, can be decoded at once.

    Between the first and the last of the pages that so many rows lie in there are at most 64 MiB. A value that is
    written once can come back in every row of a dictionary, or of `DELTA_BYTE_ARRAY`.
    """
    starts = [column.data_page_offset, *([column.dictionary_page_offset] if column.has_dictionary_page else [])]
    position, left, largest, rows = min(starts), column.num_values, 0, most_rows
    end = min(position + column.total_compressed_size, source.size)
    while position < end and left > 0:
        try:
            size, unpacked, packed, values = _read_page_header(source, position)
        except (_IllegibleError, IndexError):
            break
        largest = max(largest, unpacked)
        if values:
            rows = min(rows, max(1, values * _ROWS_BYTES // max(1, unpacked)))
        position += size + packed
        left -= values
    if column.has_dictionary_page or "DELTA_BYTE_ARRAY" in column.encodings:
        rows = min(rows, max(1, _ROWS_BYTES // max(1, largest)))
    return largest, rows


def _read_page_header(source: InputStream, position: int) -> tuple[int, int, int, int]:
    """Bytes of the header, of the page unpacked and packed, and how many values it holds."""
    for size in (_HEADER, _LONGEST_HEADER):
        try:
            reader = _ThriftCompactReader(source.read_at(position, size))
            fields = reader.read_struct(0)
            break
        except IndexError:
            if size == _LONGEST_HEADER:
                raise
    unpacked, packed = fields.get(2, -1), fields.get(3, -1)
    data = fields.get(5) or fields.get(8) or {}
    if not (isinstance(unpacked, int) and isinstance(packed, int) and unpacked >= 0 and packed >= 0):
        raise _IllegibleError
    return reader.position, unpacked, packed, data.get(1, 0) if isinstance(data, dict) else 0


class _ThriftCompactReader:
    """Structs of Thrift's compact protocol: whole numbers and structs are kept by field, the rest is passed over."""

    def __init__(self, data: bytes) -> None:
        self.data, self.position = data, 0

    def read_struct(self, depth: int) -> dict[int, Any]:
        if depth > _DEPTH:
            raise _IllegibleError
        fields: dict[int, Any] = {}
        number = 0
        while head := self._read_byte():
            number = number + (head >> 4) if head >> 4 else self._read_zigzag()
            fields[number] = self._read_value(head & 15, depth)
        return fields

    def _read_value(self, kind: int, depth: int) -> Any:
        if kind in _VARINTS:
            return self._read_zigzag()
        if kind == _STRUCT:
            return self.read_struct(depth + 1)
        if kind == _BINARY:
            self._skip_bytes(self._read_varint())
        elif kind in _FIXED:
            self._skip_bytes(_FIXED[kind])
        else:
            raise _IllegibleError  # lists, sets and maps: no page header has one
        return None

    def _skip_bytes(self, size: int) -> None:
        self.position += size
        if self.position > len(self.data):
            raise IndexError

    def _read_byte(self) -> int:
        self.position += 1
        return self.data[self.position - 1]

    def _read_varint(self) -> int:
        value = shift = 0
        while shift < 70:
            byte = self._read_byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise _IllegibleError

    def _read_zigzag(self) -> int:
        value = self._read_varint()
        return value >> 1 ^ -(value & 1)


_BATCH_BYTES = 4 << 20
_MOST_FOOTER = 64 << 20


def read_parquet(source: InputStream, max_text_bytes: int, config: ReadConfig) -> Iterator[Page | SkippedRecord]:
    """Yield the documents of a parquet file."""
    if (footer := int.from_bytes(source.read_at(source.size - 8, 4), "little")) > _MOST_FOOTER:
        yield SkippedRecord(source.path, 0, f"a parquet file with a footer of {footer} bytes, more than {_MOST_FOOTER}")
        return
    try:
        file = pq.ParquetFile(
            pa.PythonFile(source, mode="r"), pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True
        )
        rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        columns = list_columns(file.schema_arrow, config)
    except DAMAGE as error:
        yield build_damage_skip(source, 0, "parquet file", error)
        return
    reader = RowReader(source, max_text_bytes, config)
    if not has_text_column(columns, config):
        yield reader.build_missing_text_skip(sum(rows), file.schema_arrow)
        return
    for group, count in enumerate(rows):
        yield from reader.iter_documents(_iter_row_group_batches(file, source, group, columns), "row group", count)


def _iter_row_group_batches(
    file: pq.ParquetFile, source: InputStream, group: int, columns: list[str]
) -> Iterator[pa.RecordBatch]:
    """A row group, so many rows at a time as can be decoded."""
    about = file.metadata.row_group(group)
    chunks = [about.column(number) for number in range(about.num_columns)]
    pages = [
        compute_largest_page(source, chunk, ROWS) for chunk in chunks if _is_column_leaf(chunk.path_in_schema, columns)
    ]
    largest, most = max(page for page, _ in pages), min(rows for _, rows in pages)
    if largest > MOST_BYTES:
        raise DecodeLimitError(f"a page of {largest} bytes, more than {MOST_BYTES}: write smaller ones")
    step = max(1, min(most, _BATCH_BYTES * max(about.num_rows, 1) // max(1, about.total_byte_size)))
    yield from file.iter_batches(step, row_groups=[group], columns=columns, use_threads=False)


def _is_column_leaf(path: str, columns: list[str]) -> bool:
    """Whether a leaf belongs to a column, whose name may have dots."""
    return any(path == name or path.startswith(f"{name}.") for name in columns)
