"""Read documents from parquet files, a few rows at a time.

Page headers are parsed first (PageHeader in Thrift's compact protocol), so that the decoded size of
a page is known before pyarrow decodes it. Reads only the columns that the configuration names.

Invariants:
- A damaged row group, or one with a page over the memory limit, loses its own rows only.
- A page header that cannot be parsed counts as size 0 here. pyarrow reports the error when it
  decodes.
"""

from collections.abc import Collection, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from llmsys.config.cleaning import ReadConfig
from llmsys.data_pipeline.readers.input_stream import InputStream, ReadError
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

MAX_PAGE_BYTES = 192 << 20  # decompressed size of one page
_BUFFER_BYTES = 1 << 20  # of the reader of one column
_ROWS_BYTES = 64 << 20  # decompressed size of the pages that are decoded at once

_HEADER = 1 << 12  # bytes read first for a page header; with statistics it may be longer
_LONGEST_HEADER = 1 << 20
_DEPTH = 8  # a page header nests three structs
# types of the compact protocol
_STRUCT = 12
_BINARY = 8
_FIXED = {1: 0, 2: 0, 3: 1, 7: 8}  # bytes of true, false, a byte, a double
_VARINTS = (4, 5, 6)


class _IllegibleError(Exception):
    """The bytes are not a valid page header."""


def compute_largest_page(source: InputStream, column: Any, most_rows: int) -> tuple[int, int]:
    """Return the decompressed size of the largest page of a column chunk, and how many rows can be
    decoded at once.

    The pages that hold those rows take at most 64 MiB. Where a dictionary or `DELTA_BYTE_ARRAY` can
    repeat a stored value in every row, the limit is 64 MiB of repeated pages.

    Args:
        source: the parquet file.
        column: pyarrow's ColumnChunkMetaData.
        most_rows: upper limit of the rows.

    Returns:
        Bytes and rows.
    """
    starts = [
        column.data_page_offset,
        *([column.dictionary_page_offset] if column.has_dictionary_page else []),
    ]
    position = min(starts)
    left = column.num_values
    largest = 0
    rows = most_rows
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
    """Return the bytes of the header, of the page decompressed and compressed, and the number of
    its values.
    """
    # Few headers need the second, larger read.
    for size in (_HEADER, _LONGEST_HEADER):
        try:
            reader = _ThriftCompactReader(source.read_block(position, size))
            fields = reader.read_struct(0)
            break
        except IndexError:
            if size == _LONGEST_HEADER:
                raise
    # PageHeader in parquet.thrift: 2 and 3 are the sizes, 5 and 8 the headers of data pages (field
    # 1: num_values).
    unpacked = fields.get(2, -1)
    packed = fields.get(3, -1)
    data = fields.get(5) or fields.get(8) or {}
    if not (
        isinstance(unpacked, int) and isinstance(packed, int) and unpacked >= 0 and packed >= 0
    ):
        raise _IllegibleError
    return reader.position, unpacked, packed, data.get(1, 0) if isinstance(data, dict) else 0


class _ThriftCompactReader:
    """Reader of structs in Thrift's compact protocol; integers and structs are kept by field
    number.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def read_struct(self, depth: int) -> dict[int, Any]:
        if depth > _DEPTH:
            raise _IllegibleError
        fields: dict[int, Any] = {}
        number = 0
        while head := self._read_byte():
            # The high bits are the distance to the field before; 0 means that the full number
            # follows.
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
        # 64 bits take at most ten bytes of seven bits.
        while shift < 70:
            byte = self._read_byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise _IllegibleError

    def _read_zigzag(self) -> int:
        value = self._read_varint()
        # 0, -1, 1, -2 are written as 0, 1, 2, 3.
        return value >> 1 ^ -(value & 1)


_BATCH_BYTES = 4 << 20
_MAX_FOOTER = 64 << 20


def read_parquet(
    source: InputStream, max_text_bytes: int, config: ReadConfig
) -> Iterator[Page | SkippedRecord]:
    """Read a parquet file.

    Args:
        source: The file.
        max_text_bytes: Longer texts are skipped.
        config: Fields of a document.

    Yields:
        Documents, and a skip for each corrupt row group or row that is none.
    """
    # The file ends with the length of the footer and the magic bytes.
    if (footer := int.from_bytes(source.read_block(source.size - 8, 4), "little")) > _MAX_FOOTER:
        yield SkippedRecord(
            source.path,
            0,
            f"a parquet file with a footer of {footer} bytes, more than {_MAX_FOOTER}",
        )
        return
    try:
        file = pq.ParquetFile(
            pa.PythonFile(source, mode="r"),
            pre_buffer=False,
            buffer_size=_BUFFER_BYTES,
            page_checksum_verification=True,
        )
        rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        columns = list_columns(file.schema_arrow, config)
        further = list_further_columns(file.schema_arrow, columns, config)
    except DAMAGE as error:
        yield build_damage_skip(source, 0, "parquet file", error)
        return
    reader = RowReader(source, max_text_bytes, config)
    if not has_text_column(columns, config):
        yield reader.build_missing_text_skip(sum(rows), file.schema_arrow)
        return
    for group, count in enumerate(rows):
        yield from reader.iter_documents(
            _iter_row_group_batches(file, source, group, (columns, further)), "row group", count
        )


def _iter_row_group_batches(
    file: pq.ParquetFile,
    source: InputStream,
    group: int,
    wanted: tuple[list[str], list[int]],
) -> Iterator[RowBatch]:
    """Yield the batches of a row group, with as many rows as the memory limit allows. Columns of
    further fields are read beside the others, which stay when those are damaged.
    """
    columns, numbers = wanted
    step = _compute_batch_rows(file, source, group, columns)
    batches = file.iter_batches(step, row_groups=[group], columns=columns, use_threads=False)
    if not numbers:
        yield from map(RowBatch, batches)
        return
    present = file.schema_arrow.names  # built at every call
    names = [present[number] for number in numbers]
    further: Iterator[pa.RecordBatch] | None = None
    note = ""
    try:
        least = min(step, _compute_batch_rows(file, source, group, names))
    except DecodeLimitError as error:
        note = f"further fields are not readable: {error}"
    else:
        batches = file.iter_batches(least, row_groups=[group], columns=columns, use_threads=False)
        further = file.iter_batches(least, row_groups=[group], columns=names, use_threads=False)
    for batch in batches:
        found = None
        if further is not None:
            try:
                found = next(further)
                if found.num_rows != batch.num_rows:
                    raise ValueError(f"{found.num_rows} rows beside {batch.num_rows} of the text")
            except ReadError:
                raise
            except (*DAMAGE, StopIteration) as error:
                found = further = None
                lines = str(error).strip().splitlines() or [type(error).__name__]
                note = f"further fields are not readable: {lines[0][:120]}"
        yield RowBatch(batch, found, note)


def _compute_batch_rows(
    file: pq.ParquetFile, source: InputStream, group: int, columns: list[str]
) -> int:
    """Return how many rows of some columns can be decoded at once.

    Raises:
        DecodeLimitError: a page is over the memory limit.
    """
    about = file.metadata.row_group(group)
    names = frozenset(columns)
    chunks = [about.column(number) for number in range(about.num_columns)]
    pages = [
        compute_largest_page(source, chunk, ROWS)
        for chunk in chunks
        if _is_column_leaf(chunk.path_in_schema, names)
    ]
    largest = max((page for page, _ in pages), default=0)
    most = min((rows for _, rows in pages), default=ROWS)
    if largest > MAX_PAGE_BYTES:
        raise DecodeLimitError(
            f"a page of {largest} bytes, more than {MAX_PAGE_BYTES}: write smaller ones"
        )
    rows = _BATCH_BYTES * max(about.num_rows, 1) // max(1, about.total_byte_size)
    return max(1, min(most, int(rows)))


def _is_column_leaf(path: str, columns: Collection[str]) -> bool:
    """Return whether a leaf belongs to one of the columns, whose names may contain dots."""
    ends = [place for place, character in enumerate(path) if character == "."]
    names = columns if isinstance(columns, frozenset) else frozenset(columns)
    return path in names or any(path[:end] in names for end in ends)
