"""Rows of columns in, documents out, whatever file the columns come from.

Reads record batches with the columns that the configuration names; gives one page with its text a row. Offsets are row
numbers. What is damaged, or would take more memory than a process may, costs its row group or record batch, with the
number of rows where the file still says it.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from data_pipeline.readers.document_fields import TOO_LONG, build_document_page, describe_missing_text
from data_pipeline.readers.input_stream import InputStream, ReadError
from data_pipeline.readers.page_batch import Page, SkippedRecord
from llmsys.config.read import ReadConfig

ROWS = 128  # that become pages at once
_FEW_ROWS = 1 << 20  # any file may hold so many, and
_ROWS_PER_BYTE = 8  # a longer one so many for each of its bytes: a header says any number, and nulls take no room
DAMAGE = (pa.ArrowException, OSError, ValueError, KeyError, IndexError, MemoryError, OverflowError, TypeError)
_FIELDS = ("text", "url", "id", "date")


def list_columns(schema: pa.Schema, config: ReadConfig) -> list[str]:
    """The columns that hold the fields, whether a dot is part of their name or leads into them."""
    wanted = {getattr(config, name) for name in _FIELDS}
    wanted |= {name.split(".")[0] for name in wanted}
    return [name for name in schema.names if name in wanted]


def has_text_column(columns: list[str], config: ReadConfig) -> bool:
    """Whether the text is one of the columns or a field in one."""
    return config.text_field in columns or config.text_field.split(".")[0] in columns


def list_text_columns(schema: pa.Schema) -> list[str]:
    """Return the names of the columns that hold text, those of a structure a as `a.b`."""
    names = [one.name for one in schema if _is_text(one.type)]
    structures = [one for one in schema if pa.types.is_struct(one.type)]
    return names + [f"{one.name}.{inner.name}" for one in structures for inner in one.type if _is_text(inner.type)]


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


class DecodeLimitError(Exception):
    """What would take too much memory or time to decode."""


class RowReader:
    """Numbers the rows of one file and makes documents of them."""

    def __init__(self, source: InputStream, limit: int, config: ReadConfig) -> None:
        self.source, self.limit, self.config = source, limit, config
        self.row = self._read = 0
        self.most = max(_FEW_ROWS, source.size * _ROWS_PER_BYTE)

    def build_missing_text_skip(self, rows: int, schema: pa.Schema) -> SkippedRecord:
        """Say that no row has what is wanted, and which columns of the file hold text."""
        reason = describe_missing_text(self.config.text_field, list_text_columns(schema))
        return SkippedRecord(self.source.path, 0, reason, self.bound_row_count(rows))

    def bound_row_count(self, rows: int) -> int:
        """As many rows as a header says, if there is room for them in the file."""
        return max(1, min(rows, self.most))

    def iter_documents(
        self, batches: Iterator[pa.RecordBatch], part: str, count: int
    ) -> Iterator[Page | SkippedRecord]:
        """Yield the documents of one part of the file; `count` rows are lost when none of it can be read."""
        begin, count = self.row, self.bound_row_count(count)
        while True:
            try:
                batch = next(batches, None)
                self._read += batch.num_rows if batch else 0
                if self._read > self.most:
                    raise DecodeLimitError(f"more than {self.most} rows in a file of {self.source.size} bytes")
                found = [] if batch is None else self._build_documents(batch)
            except ReadError:
                raise
            except DecodeLimitError as error:
                yield SkippedRecord(self.source.path, self.row, str(error), max(1, begin + count - self.row))
                self.row = max(self.row, begin + count)
                return
            except DAMAGE as error:
                yield build_damage_skip(self.source, self.row, part, error, max(1, begin + count - self.row))
                self.row = max(self.row, begin + count)
                return
            if batch is None:
                return
            yield from found
            self.row += batch.num_rows

    def _build_documents(self, batch: pa.RecordBatch) -> list[Page | SkippedRecord]:
        columns = {name: _get_field_values(batch, getattr(self.config, name), 2 * self.limit) for name in _FIELDS}
        made: list[Page | SkippedRecord] = []
        for index in range(batch.num_rows):
            values = {name: column[index] for name, column in columns.items()}
            page = build_document_page(self.row + index, values, self.limit, self.config.text_field)
            made.append(SkippedRecord(self.source.path, self.row + index, page) if isinstance(page, str) else page)
        return made


def _get_field_values(batch: pa.RecordBatch, name: str, most: int) -> list[Any]:
    """The values of a field, None in each row where there is no such field."""
    found: Any = None
    if name in batch.schema.names:
        found = batch.column(name)
    else:
        first, *rest = name.split(".")
        found = batch.column(first) if first in batch.schema.names and rest else None
        for part in rest:
            found = _get_struct_field(found, part)
    if found is None:
        return [None] * batch.num_rows
    if pa.types.is_dictionary(found.type):
        found = found.dictionary_decode()
    return _decode_values(found, most)


def _get_struct_field(column: Any, part: str) -> Any:
    if column is None or not pa.types.is_struct(column.type) or column.type.get_field_index(part) < 0:
        return None
    return pc.struct_field(column, part)


def _decode_values(column: Any, most: int) -> list[Any]:
    """Values as Python has them; of a text longer than `most` bytes only the fact; what is not UTF-8 is replaced."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        column = column.view(pa.binary() if pa.types.is_string(kind) else pa.large_binary())
    column.validate(full=True)  # before anything follows an offset
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        values: list[Any] = column.to_pylist()
        return values
    is_long = pc.fill_null(pc.greater(pc.binary_length(column), most), False)
    if pc.any(is_long).as_py():
        column = pc.if_else(is_long, pa.scalar(None, column.type), column)
    texts = [None if value is None else value.decode("utf-8", "replace") for value in column.to_pylist()]
    return [TOO_LONG if long else text for long, text in zip(is_long.to_pylist(), texts, strict=True)]


def build_damage_skip(source: InputStream, row: int, part: str, error: BaseException, count: int = 1) -> SkippedRecord:
    """Name what pyarrow objects to; what the storage objects to is raised again."""
    if isinstance(error, ReadError):
        raise error
    words = str(error).strip().splitlines()
    return SkippedRecord(
        source.path, row, f"damaged {part}: {words[0][:120] if words else type(error).__name__}", count
    )
