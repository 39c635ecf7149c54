"""Parquet and Arrow files in, documents out, a few rows at a time.

Reads the columns that the configuration names and no others; gives one page with its text a row. What is damaged costs
its row group or record batch, with the number of rows where the file still says it. Offsets are row numbers.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.readers.field import document
from data_pipeline.readers.page import Page, Skip
from data_pipeline.readers.source import Source, UnreadableError
from llmsys.config.read import ReadConfig

_FIELDS = ("text", "url", "id", "date")
_ROWS = 128
_BATCH_BYTES = 4 << 20
_DAMAGE = (pa.ArrowException, OSError, ValueError, KeyError, IndexError, MemoryError, OverflowError, TypeError)


def read_parquet(source: Source, max_text_bytes: int, config: ReadConfig) -> Iterator[Page | Skip]:
    """Yield the documents of a parquet file."""
    try:
        file = pq.ParquetFile(
            pa.PythonFile(source, mode="r"), pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True
        )
        groups = [file.metadata.row_group(group) for group in range(file.num_row_groups)]
        rows = [group.num_rows for group in groups]
        sizes = [max(1, group.total_byte_size) for group in groups]
        columns = _columns(file.schema_arrow, config)
    except _DAMAGE as error:
        yield _damage(source, 0, "parquet file", error)
        return
    reader = _Rows(source, max_text_bytes, config)
    if config.text.split(".")[0] not in columns and config.text not in columns:
        yield reader.without_text(sum(rows))
        return
    for group, count in enumerate(rows):
        step = max(1, min(_ROWS, _BATCH_BYTES * max(count, 1) // sizes[group]))
        batches = file.iter_batches(step, row_groups=[group], columns=columns, use_threads=False)
        yield from reader.read(batches, "row group", count)


def read_arrow(source: Source, max_text_bytes: int, config: ReadConfig) -> Iterator[Page | Skip]:
    """Yield the documents of an Arrow file (Feather is one) or stream."""
    is_file = source.read_at(0, 6) == b"ARROW1"
    try:
        file = pa.PythonFile(source, mode="r")
        arrow: Any = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
        columns = _columns(arrow.schema, config)
        batches = arrow.num_record_batches if is_file else None
    except _DAMAGE as error:
        yield _damage(source, 0, "Arrow file", error)
        return
    reader = _Rows(source, max_text_bytes, config)
    if config.text.split(".")[0] not in columns and config.text not in columns:
        yield reader.without_text(1)
    elif batches is None:
        yield from reader.read((batch.select(columns) for batch in arrow), "record batch", 1)
    else:
        for index in range(batches):
            yield from reader.read(_one(arrow, index, columns), "record batch", 1)


def _one(arrow: Any, index: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    batch = arrow.get_batch(index).select(columns)
    for start in range(0, batch.num_rows, _ROWS):
        yield batch.slice(start, _ROWS)


def _columns(schema: pa.Schema, config: ReadConfig) -> list[str]:
    """The columns that hold the fields, whether a dot is part of their name or leads into them."""
    wanted = {getattr(config, name) for name in _FIELDS}
    wanted |= {name.split(".")[0] for name in wanted}
    return [name for name in schema.names if name in wanted]


class _Rows:
    """Numbers the rows of one file and makes documents of them."""

    def __init__(self, source: Source, limit: int, config: ReadConfig) -> None:
        self.source, self.limit, self.config = source, limit, config
        self.row = 0

    def without_text(self, rows: int) -> Skip:
        return Skip(self.source.path, 0, f"no text in field '{self.config.text}'", count=max(rows, 1))

    def read(self, batches: Iterator[pa.RecordBatch], part: str, count: int) -> Iterator[Page | Skip]:
        """Yield the documents of one part of the file; `count` rows are lost when none of it can be read."""
        begin = self.row
        while True:
            try:
                batch = next(batches, None)
                found = [] if batch is None else self._documents(batch)
            except UnreadableError:
                raise
            except _DAMAGE as error:
                yield _damage(self.source, self.row, part, error, max(1, count - (self.row - begin)))
                return
            if batch is None:
                return
            yield from found
            self.row += batch.num_rows

    def _documents(self, batch: pa.RecordBatch) -> list[Page | Skip]:
        columns = {name: _values(batch, getattr(self.config, name)) for name in _FIELDS}
        made: list[Page | Skip] = []
        for index in range(batch.num_rows):
            values = {name: column[index] for name, column in columns.items()}
            page = document(self.row + index, values, self.limit, self.config.text)
            made.append(Skip(self.source.path, self.row + index, page) if isinstance(page, str) else page)
        return made


def _values(batch: pa.RecordBatch, name: str) -> list[Any]:
    """The values of a field, None in each row where there is no such field."""
    found: Any = None
    if name in batch.schema.names:
        found = batch.column(name)
    else:
        first, *rest = name.split(".")
        found = batch.column(first) if first in batch.schema.names and rest else None
        for part in rest:
            found = _child(found, part)
    if found is None:
        return [None] * batch.num_rows
    if pa.types.is_dictionary(found.type):
        found = found.dictionary_decode()
    return _texts(found)


def _child(column: Any, part: str) -> Any:
    if column is None or not pa.types.is_struct(column.type) or column.type.get_field_index(part) < 0:
        return None
    return pa.compute.struct_field(column, part)


def _texts(column: Any) -> list[Any]:
    """Values as Python has them; a text that is not UTF-8 with what is not replaced."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        column = column.view(pa.binary() if pa.types.is_string(kind) else pa.large_binary())
    elif not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        column.validate(full=True)
        values: list[Any] = column.to_pylist()
        return values
    column.validate(full=True)  # before anything follows an offset
    return [None if value is None else value.decode("utf-8", "replace") for value in column.to_pylist()]


def _damage(source: Source, row: int, part: str, error: BaseException, count: int = 1) -> Skip:
    if isinstance(error, UnreadableError):
        raise error
    words = str(error).strip().splitlines()
    return Skip(source.path, row, f"damaged {part}: {words[0][:120] if words else type(error).__name__}", count)
