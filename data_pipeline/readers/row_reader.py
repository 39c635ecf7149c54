"""Build documents from rows of columns, whatever the file format.

Reads record batches with the configured columns; yields one page with text per row. Offsets are row
numbers.

Fields are found by name and converted to text; text over the limit is rejected. Such pages need no
extraction.

Invariants:
- Damage, or rows over the memory limit, lose one row group or record batch, with the number of rows
  in its header.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from llmsys.config.cleaning import ReadConfig
from llmsys.data_pipeline.readers.input_stream import InputStream, ReadError
from llmsys.data_pipeline.readers.messages import find_message_keys, format_chat, is_chat
from llmsys.data_pipeline.readers.page_batch import Page, SkippedRecord, remove_invalid_characters
from llmsys.data_pipeline.readers.row_fields import (
    ID_CHARACTERS,
    add_fields,
    find_column,
    format_value,
    list_unused_names,
    mark_value,
    read_further_fields,
)

TOO_LONG = object()  # placeholder for a text that is too long to decode
_SHOWN_FIELDS = 8
_NAME_CHARACTERS = 40


def find_text_fields(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the fields that hold text or a chat; fields of a mapping a are named
    `a.b`.

    Args:
        row: values by field.

    Returns:
        Names, those of mappings last.
    """
    names = [name for name, value in row.items() if isinstance(value, str) or is_chat(value)]
    mappings = [(name, value) for name, value in row.items() if isinstance(value, Mapping)]
    return names + [
        f"{name}.{inner}"
        for name, mapping in mappings
        for inner, value in mapping.items()
        if isinstance(value, str)
    ]


def describe_missing_text(text_field: str, names: Collection[str] | None = None) -> str:
    """Return the reason why a row is no document, with the fields that hold text; `names` None
    means unknown.
    """
    if names is None:
        return f"no text in field '{text_field}'"
    shown = [
        f"'{remove_invalid_characters(name)[:_NAME_CHARACTERS]}'"
        for name in sorted(names)[:_SHOWN_FIELDS]
    ]
    more = f" and {len(names) - _SHOWN_FIELDS} more" if len(names) > _SHOWN_FIELDS else ""
    found = (
        f"text is in {', '.join(shown)}{more} (data.read.text_field names the field)"
        if shown
        else "no field has text"
    )
    return f"no text in field '{text_field}': {found}"


def build_document_page(
    offset: int,
    values: Mapping[str, Any],
    limit: int,
    text_field: str,
    names: Collection[str] | None = None,
) -> Page | str:
    """Build the page of one row.

    Args:
        offset: position of the row, as `PAGE_SCHEMA` defines it.
        values: values of the row under the keys text, url, id and date.
        limit: maximum length of the text in UTF-8 bytes.
        text_field: configured name of the text field, for messages.
        names: fields of the row that hold text, for messages; None if they are unknown.

    Returns:
        The page, or the reason why the row is no document.
    """
    text = values["text"]
    if text is TOO_LONG:
        return f"longer than {limit} bytes"
    if is_chat(text) and (text := format_chat(text)) is None:
        return f"a message in field '{text_field}' has content other than text"
    if not isinstance(text, str):
        return describe_missing_text(text_field, names)
    text = remove_invalid_characters(text)
    if len(text) > limit or len(text.encode()) > limit:
        return f"longer than {limit} bytes"
    name = format_value(values["id"])
    return Page(
        offset=offset,
        url=format_value(values["url"]),
        date=format_value(values["date"]),
        content_type="text/plain",
        text=text,
        id=name if 0 < len(name) <= ID_CHARACTERS else None,
    )


ROWS = 128  # rows that become pages at once
# Limits of the row count, because a header can claim any number and nulls take no bytes.
_FEW_ROWS = 1 << 20  # allowed in any file
_ROWS_PER_BYTE = 8  # allowed in longer files
DAMAGE = (
    pa.ArrowException,
    OSError,
    ValueError,
    KeyError,
    IndexError,
    MemoryError,
    OverflowError,
    TypeError,
)
_FIELDS = ("text", "url", "id", "date")


def list_columns(schema: pa.Schema, config: ReadConfig) -> list[str]:
    """Return the columns that hold the configured fields; a dot may be part of a name or lead
    into a structure.
    """
    wanted = {getattr(config, f"{name}_field") for name in _FIELDS}
    wanted |= {name.split(".")[0] for name in wanted}
    return [name for name in schema.names if name in wanted]


def list_further_columns(
    schema: pa.Schema, columns: Collection[str], config: ReadConfig
) -> list[int]:
    """Return the numbers of the columns besides `columns` whose fields are kept.

    Args:
        schema: columns of a file.
        columns: those of `list_columns`.
        config: fields to keep.

    Returns:
        Numbers, rising.
    """
    if config.keep_fields == "none":
        return []
    named: set[str] | None = None
    if not isinstance(config.keep_fields, str):
        named = {*config.keep_fields, *(name.split(".")[0] for name in config.keep_fields)}
    return [
        number
        for number, name in enumerate(schema.names)
        if name not in columns and (named is None or name in named)
    ]


def has_text_column(columns: list[str], config: ReadConfig) -> bool:
    """Return whether the text is one of the columns or a field in one."""
    return config.text_field in columns or config.text_field.split(".")[0] in columns


def list_text_columns(schema: pa.Schema) -> list[str]:
    """Return the names of the columns that hold text or chats; fields of a structure a are named
    `a.b`.
    """
    names = [field.name for field in schema if _is_text(field.type) or _is_chat_column(field.type)]
    structures = [field for field in schema if pa.types.is_struct(field.type)]
    return names + [
        f"{field.name}.{inner.name}"
        for field in structures
        for inner in field.type
        if _is_text(inner.type)
    ]


def _is_chat_column(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return (
        is_list
        and pa.types.is_struct(kind.value_type)
        and find_message_keys(kind.value_type.names) is not None
    )


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows of one row group or record batch.

    Attributes:
        named: the columns of `list_columns`.
        further: those of `list_further_columns`; None where they cannot be read.
        note: why they cannot be read; "" if they can.
    """

    named: pa.RecordBatch
    further: pa.RecordBatch | None = None
    note: str = ""


class DecodeLimitError(Exception):
    """The data would take too much memory or time to decode."""


class RowReader:
    """Builder of documents from the numbered rows of one file."""

    def __init__(self, source: InputStream, limit: int, config: ReadConfig) -> None:
        self.source = source
        self.limit = limit
        self.config = config
        self.row = self._read = 0
        self.most = max(_FEW_ROWS, source.size * _ROWS_PER_BYTE)

    def build_missing_text_skip(self, rows: int, schema: pa.Schema) -> SkippedRecord:
        """Return a skip of all rows that names the columns of the file with text."""
        reason = describe_missing_text(self.config.text_field, list_text_columns(schema))
        return SkippedRecord(self.source.path, 0, reason, self.bound_row_count(rows))

    def bound_row_count(self, rows: int) -> int:
        """Return the row count of a header, limited to what the size of the file allows."""
        return max(1, min(rows, self.most))

    def iter_documents(
        self, batches: Iterator[RowBatch], part: str, count: int
    ) -> Iterator[Page | SkippedRecord]:
        """Yield the documents of one row group or record batch.

        Args:
            batches: its rows.
            part: its name in messages.
            count: its number of rows, all lost if none of it can be read.
        """
        begin = self.row
        count = self.bound_row_count(count)
        while True:
            try:
                batch = next(batches, None)
                self._read += batch.named.num_rows if batch else 0
                if self._read > self.most:
                    raise DecodeLimitError(
                        f"more than {self.most} rows in a file of {self.source.size} bytes"
                    )
                found = [] if batch is None else self._build_documents(batch)
            except ReadError:
                # The storage failed, not the file: read_pages reports it as retryable.
                raise
            except DecodeLimitError as error:
                yield SkippedRecord(
                    self.source.path, self.row, str(error), max(1, begin + count - self.row)
                )
                self.row = max(self.row, begin + count)
                return
            except DAMAGE as error:
                yield build_damage_skip(
                    self.source, self.row, part, error, max(1, begin + count - self.row)
                )
                self.row = max(self.row, begin + count)
                return
            if batch is None:
                return
            yield from found
            self.row += batch.named.num_rows

    def _build_documents(self, rows: RowBatch) -> list[Page | SkippedRecord]:
        batch = rows.named
        columns = {
            name: _get_field_values(batch, getattr(self.config, f"{name}_field"), 2 * self.limit)
            for name in _FIELDS
        }
        is_missing = find_column(batch, self.config.text_field) is None
        names = list_text_columns(batch.schema) if is_missing else None
        documents: list[Page | SkippedRecord] = []
        fields, notes = [dict[str, Any]() for _ in range(batch.num_rows)], [rows.note]
        if self.config.keep_fields != "none":
            fields, more = read_further_fields(batch, rows.further, self.config)
            notes += more
        note = "; ".join(filter(None, notes))
        for index in range(batch.num_rows):
            values = {name: column[index] for name, column in columns.items()}
            page = build_document_page(
                self.row + index, values, self.limit, self.config.text_field, names
            )
            if isinstance(page, str):
                documents.append(SkippedRecord(self.source.path, self.row + index, page))
                continue
            if self.config.keep_fields != "none":
                page = self._add_fields(page, values, fields[index], note)
            documents.append(page)
        return documents

    def _add_fields(
        self, page: Page, values: Mapping[str, Any], fields: dict[str, Any], note: str
    ) -> Page:
        for name in list_unused_names(values):
            field = getattr(self.config, f"{name}_field")
            if values[name] is TOO_LONG:
                note = f"{note}; field {field} is not kept: longer than {2 * self.limit} bytes"
            elif self.config.keep_fields == "all" or field in self.config.keep_fields:
                fields[field] = mark_value(values[name])
        return add_fields(page, fields, note.removeprefix("; "))


def _get_field_values(batch: pa.RecordBatch, name: str, most: int) -> list[Any]:
    """Return the values of a field; all None without such a field."""
    found = find_column(batch, name)
    if found is None:
        return [None] * batch.num_rows
    if pa.types.is_dictionary(found.type):
        found = found.dictionary_decode()
    return _decode_values(found, most)


def _decode_values(column: Any, most: int) -> list[Any]:
    """Return values as Python objects: `TOO_LONG` for texts over `most` bytes; invalid UTF-8 is
    replaced.
    """
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        # As bytes: pyarrow would raise on the first text that is not UTF-8.
        column = column.view(pa.binary() if pa.types.is_string(kind) else pa.large_binary())
    column.validate(full=True)  # offsets of a damaged file may point outside of its buffers
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        values: list[Any] = column.to_pylist()
        return values
    is_long = pc.fill_null(pc.greater(pc.binary_length(column), most), False)
    if pc.any(is_long).as_py():
        # Long texts never become Python objects.
        column = pc.if_else(is_long, pa.scalar(None, column.type), column)
    texts = [
        None if value is None else value.decode("utf-8", "replace") for value in column.to_pylist()
    ]
    return [
        TOO_LONG if long else text for long, text in zip(is_long.to_pylist(), texts, strict=True)
    ]


def build_damage_skip(
    source: InputStream, row: int, part: str, error: BaseException, count: int = 1
) -> SkippedRecord:
    """Return a skip with pyarrow's error message.

    Raises:
        ReadError: if the storage failed and not the file.
    """
    if isinstance(error, ReadError):
        raise error
    lines = str(error).strip().splitlines()
    reason = lines[0][:120] if lines else type(error).__name__
    return SkippedRecord(source.path, row, f"damaged {part}: {reason}", count)
