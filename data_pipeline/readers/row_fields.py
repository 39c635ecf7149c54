"""Further fields of a row: those that are neither its text nor its URL, id or date.

Builds the cells that `core/input_fields.py` describes, from rows of JSON and from columns of Arrow.

Invariants:
- A field that names URL, id or date stays a further field where the document cannot show its value,
  such as a mapping.
"""

import base64
import json
import re
import zoneinfo
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from llmsys.config.cleaning import ReadConfig
from llmsys.data_pipeline.core.input_fields import JSON, encode_fields, to_json_value
from llmsys.data_pipeline.readers.page_batch import Page, remove_invalid_characters

ID_CHARACTERS = 256  # longer ids are ignored: ids are kept in memory for every document
_TOO_DEEP = "fields nested too deep are not kept"
_KIND_CHARACTERS = 64
_NAME_CHARACTERS = 40
_REASON_CHARACTERS = 120


def get_field(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field; `a.b` is the field b of the mapping a, unless a field has that
    literal name.

    Args:
        row: values by field.
        name: name of the field.

    Returns:
        The value; None if there is no such field.
    """
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def format_value(value: Any) -> str:
    """Format the value of a URL, id or date as text.

    Args:
        value: the value of a row.

    Returns:
        The text, times as ISO 8601; "" for anything but text, numbers and times.
    """
    if isinstance(value, str):
        return remove_invalid_characters(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return str(value.isoformat()) if hasattr(value, "isoformat") else ""


def list_unused_names(values: Mapping[str, Any]) -> list[str]:
    """Return which of url, id and date the document cannot show as the row has them.

    Args:
        values: Values of the row under the keys url, id and date.

    Returns:
        Keys.
    """
    return [name for name in ("url", "id", "date") if not _is_shown(name, values[name])]


def _is_shown(name: str, value: Any) -> bool:
    shown = format_value(value)
    if name == "id" and len(shown) > ID_CHARACTERS:
        return False
    return value is None or (shown == value if isinstance(value, str) else shown != "")


def select_row_fields(
    row: Mapping[str, Any], values: Mapping[str, Any], config: ReadConfig
) -> dict[str, Any]:
    """Return the further fields of a row of JSON.

    Args:
        row: Values by field.
        values: Values under the keys text, url, id and date.
        config: Names of fields, and those to keep.

    Returns:
        Values by name, lists and mappings marked as JSON.
    """
    unused = list_unused_names(values)
    used = [
        getattr(config, f"{name}_field")
        for name in ("text", "url", "id", "date")
        if name not in unused
    ]
    if not isinstance(config.keep_fields, str):
        wanted = [name for name in config.keep_fields if name not in used]
        found = {name: get_field(row, name) for name in wanted}
        found = {name: value for name, value in found.items() if value is not None}
    else:
        found = dict(row)
        for name in used:
            if name in found:
                del found[name]
            else:
                _remove_nested(found, name.split("."))
    return {
        name: {JSON: value} if isinstance(value, list | dict) else value
        for name, value in found.items()
    }


def _remove_nested(row: dict[str, Any], path: Sequence[str]) -> None:
    """Remove a field inside of mappings, which are copied; an empty one goes, too."""
    first, *rest = path
    if not rest:
        row.pop(first, None)
    elif isinstance(row.get(first), dict):
        inner = dict(row[first])
        _remove_nested(inner, rest)
        if inner:
            row[first] = inner
        else:
            del row[first]


def add_fields(page: Page, fields: Mapping[str, Any], note: str = "") -> Page:
    """Add further fields to the page of a row.

    Args:
        page: The page.
        fields: Values by name, as `encode_fields` takes them.
        note: What is wrong with them; "" for nothing.

    Returns:
        The page, with a note where they cannot be kept.
    """
    cell = None
    try:
        cell = encode_fields(fields)
    except RecursionError:
        note = _TOO_DEEP
    if note:
        return replace(page, fields=cell, more_notes=(*page.more_notes, note))
    return page if cell is None else replace(page, fields=cell)


def read_column_values(column: pa.Array) -> list[Any]:
    """Return the values of a column as `encode_fields` takes them.

    Args:
        column: The column.

    Returns:
        One value per row. Text that is not UTF-8 is of kind binary.
    """
    kind = column.type
    if pa.types.is_dictionary(kind):
        return read_column_values(column.dictionary_decode())
    if pa.types.is_null(kind):
        return [None] * len(column)
    if pa.types.is_string_view(kind):
        return read_column_values(column.cast(pa.large_string()))
    if pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        return read_column_values(column.cast(pa.large_binary()))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        # As bytes: pyarrow would reject text that is not UTF-8.
        column = column.view(pa.binary() if pa.types.is_string(kind) else pa.large_binary())
        column.validate(full=True)
        return [_decode_text(value) for value in column.to_pylist()]
    column.validate(full=True)  # offsets of a damaged file may point outside of its buffers
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return [
            value if value is None or isinstance(value, int) else float(value)
            for value in column.to_pylist()
        ]
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return [None if value is None else _mark_bytes(value) for value in column.to_pylist()]
    name = str(kind)
    if pa.types.is_timestamp(kind) and kind.tz and not _is_known_zone(kind.tz):
        # No library would open a table with such a column.
        known = f"timestamp[{kind.unit}, tz=UTC]"
        payloads = column.cast(pa.int64()).to_pylist()
        return [
            None if one is None else f"{to_json_value({known: one})} {kind.tz}" for one in payloads
        ]
    if pa.types.is_decimal(kind) and kind.bit_width >= 128:
        return [None if value is None else {name: str(value)} for value in column.to_pylist()]
    is_time = pa.types.is_temporal(kind) and not pa.types.is_interval(kind)
    if is_time and len(name) <= _KIND_CHARACTERS and name.isprintable():
        width = pa.int32() if kind.bit_width == 32 else pa.int64()
        payloads = column.cast(width).to_pylist()
        return [None if value is None else {name: value} for value in payloads]
    return [mark_value(value) for value in column.to_pylist()]


def _is_known_zone(name: str) -> bool:
    if re.fullmatch(r"[+-]\d\d:\d\d", name):
        return True
    try:
        zoneinfo.ZoneInfo(name)
    except (ValueError, OSError, KeyError):
        return False
    return True


def _decode_text(value: bytes | None) -> Any:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return _mark_bytes(value)


def _mark_bytes(value: bytes) -> dict[str, str]:
    return {"binary": base64.b64encode(value).decode()}


def _to_json(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)


def find_column(batch: pa.RecordBatch, name: str) -> Any:
    """Return the column of a field, which may be in structures.

    Args:
        batch: columns of rows.
        name: name of the field; `a.b` is the field b of the structure a, unless a column has that
            literal name.

    Returns:
        The column; None without such a field.
    """
    if name in batch.schema.names:
        return batch.column(name)
    first, *rest = name.split(".")
    found = batch.column(first) if first in batch.schema.names and rest else None
    for part in rest:
        found = _get_struct_field(found, part)
    return found


def _get_struct_field(column: Any, part: str) -> Any:
    """Return a field of a structure column; None where the column is no structure or has no such
    field.
    """
    if (
        column is None
        or not pa.types.is_struct(column.type)
        or column.type.get_field_index(part) < 0
    ):
        return None
    return pc.struct_field(column, part)


def read_further_fields(
    named: pa.RecordBatch, further: pa.RecordBatch | None, config: ReadConfig
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the further fields of rows of columns.

    Args:
        named: Columns with the text, URL, id and date.
        further: Other columns; None if they cannot be read.
        config: Names of fields, and those to keep.

    Returns:
        Values by name for each row, without nulls after the first row, and what is wrong with
        columns that are left out.
    """
    rows: list[dict[str, Any]] = [{} for _ in range(named.num_rows)]
    notes = []
    for name, column in _iter_further_columns(named, further, config):
        try:
            values = read_column_values(column)
        except (pa.ArrowException, ValueError, TypeError, OverflowError, RecursionError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            shown = json.dumps(name[:_NAME_CHARACTERS])
            notes.append(f"field {shown} is not readable: {lines[0][:_REASON_CHARACTERS]}")
            continue
        for number, (row, value) in enumerate(zip(rows, values, strict=True)):
            # One null of a batch tells that there is the column.
            if value is not None or number == 0:
                row[name] = value
    return rows, notes


def _iter_further_columns(
    named: pa.RecordBatch, further: pa.RecordBatch | None, config: ReadConfig
) -> Iterator[tuple[str, pa.Array]]:
    """Yield names and columns of further fields."""
    used = [getattr(config, f"{name}_field") for name in ("text", "url", "id", "date")]
    batches = [named] if further is None else [named, further]
    if not isinstance(config.keep_fields, str):
        for name in config.keep_fields:
            found = (find_column(batch, name) for batch in batches)
            column = next((one for one in found if one is not None), None)
            if column is not None and name not in used:
                yield name, column
        return
    for name, column in zip(named.schema.names, named.columns, strict=True):
        rest: pa.Array | None = column
        for field in used:
            if field == name:
                rest = None
            elif rest is not None and field not in named.schema.names:
                first, *path = field.split(".")
                rest = remove_struct_field(rest, path) if first == name and path else rest
        if rest is not None:
            yield name, rest
    seen = Counter[str]()
    for name, column in zip(*_list_columns(further), strict=True):
        seen[name] += 1
        # Of two columns with one name both stay.
        yield name if seen[name] == 1 else f"{name} ({seen[name]})", column


def _list_columns(batch: pa.RecordBatch | None) -> tuple[list[str], list[pa.Array]]:
    return ([], []) if batch is None else (batch.schema.names, batch.columns)


def mark_value(value: Any) -> Any:
    """Return a value of a column as `encode_fields` takes it.

    Args:
        value: A Python object of pyarrow.

    Returns:
        Itself, or marked as JSON.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return {JSON: json.loads(json.dumps(value, default=_to_json))}


def remove_struct_field(column: pa.Array, path: Sequence[str]) -> pa.Array | None:
    """Return a structure without a field, which may be in structures inside of it.

    Args:
        column: The structure.
        path: Names that lead to the field.

    Returns:
        The structure; None if nothing else is in it.
    """
    if not pa.types.is_struct(column.type):
        return column
    first, *rest = path
    kept = {}
    for field in column.type:
        inner = pc.struct_field(column, field.name) if field.name != first or rest else None
        if field.name == first and rest:
            inner = remove_struct_field(inner, rest)
        if inner is not None:
            kept[field.name] = inner
    if not kept:
        return None
    return pa.StructArray.from_arrays([*kept.values()], [*kept], mask=column.is_null())
