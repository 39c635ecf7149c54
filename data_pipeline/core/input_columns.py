"""Columns that the fields of input rows become, and the messages about those that do not fit.

A field keeps its name, and its column has the type that holds most of its values. Other values are
in the column `more_fields`, as JSON.

Invariants:
- The columns follow from the counts of all inputs and from the pipeline's own columns alone.
- Names of columns differ in more than case, because DuckDB's do not count it.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from llmsys.data_pipeline.core.document_schema import DROPPED_SCHEMA, build_document_schema
from llmsys.data_pipeline.core.input_fields import (
    FIELDS,
    MAX_COLUMNS,
    MORE,
    NAME_CHARACTERS,
    FieldCounts,
    build_column,
    can_hold,
    choose_type,
    convert_field,
    decode_fields,
    format_json,
    get_kind,
    parse_type,
    to_json_value,
)
from llmsys.dataset.manifest_section import InputColumn

TOKEN_COUNT = "token_count"  # column of exported documents
_PREFIX = "input_"
_RENAME = "Rename the field in the files if you want another name."
_SHOWN_NAMES = 8


@dataclass(frozen=True)
class InputColumns:
    """Columns of `documents/` and `dropped/` that come from fields of the input.

    Attributes:
        columns: Field, column and type, most values first.
        has_more: Whether there is the column `more_fields`.
        text_types: Field and type of those that have texts of CSV.
    """

    columns: tuple[tuple[str, str, str], ...] = ()
    has_more: bool = False
    text_types: tuple[tuple[str, str], ...] = ()

    def extend_schema(self, schema: pa.Schema) -> pa.Schema:
        """Return a schema with these columns instead of `fields`.

        Args:
            schema: Schema of a work file.

        Returns:
            Schema of the final file.
        """
        more = [(MORE, pa.large_string())] if self.has_more else []
        return pa.schema(
            [
                *(field for field in schema if field.name != FIELDS),
                *((column, parse_type(kind)) for _, column, kind in self.columns),
                *more,
            ],
            schema.metadata,
        )

    def unpack_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Turn the column `fields` into these columns.

        Args:
            batch: Rows of a work file, with or without the column.

        Returns:
            Rows with the schema of `extend_schema`.
        """
        schema = self.extend_schema(batch.schema)
        own = [batch.column(name) for name in batch.schema.names if name != FIELDS]
        has_fields = FIELDS in batch.schema.names
        cells = batch.column(FIELDS).to_pylist() if has_fields else [None] * batch.num_rows
        rows = [decode_fields(cell) for cell in cells]
        for name, kind in self.text_types:
            convert_field(rows, name, kind)
        arrays = [
            build_column(_take_values(rows, name, kind), kind) for name, _, kind in self.columns
        ]
        if self.has_more:
            arrays.append(pa.array(map(_format_rest, rows), pa.large_string()))
        return pa.record_batch([*own, *arrays], schema=schema)


@dataclass(frozen=True)
class ChosenColumns:
    """The columns of a dataset.

    Attributes:
        columns: The columns.
        summary: Their part of the manifest.
        notes: What does not fit: each with a value, the rule and what to do.
    """

    columns: InputColumns
    summary: tuple[InputColumn, ...]
    notes: tuple[str, ...]


def _take_values(rows: Sequence[dict[str, object]], name: str, kind: str) -> list[object]:
    """Take the values of a field that its column holds out of the rows; None for others."""
    return [
        row.pop(name) if name in row and can_hold(kind, get_kind(row[name])) else None
        for row in rows
    ]


def _format_rest(row: dict[str, object]) -> str | None:
    rest = {name: to_json_value(value) for name, value in row.items() if value is not None}
    return format_json(rest) if rest else None


def choose_columns(
    counts: FieldCounts,
    statistics: Iterable[str],
    wanted: Collection[str] | None,
    typed: Collection[str] = (),
) -> ChosenColumns:
    """Choose the columns of all fields.

    Args:
        counts: Those of all inputs.
        statistics: Names of the pipeline's columns besides the fixed ones.
        wanted: `data.read.keep_fields`, if it is a list.
        typed: Names of `data.read.column_types`.

    Returns:
        The columns, and messages about what does not fit.
    """
    own = [*build_document_schema(()).names, *statistics, *DROPPED_SCHEMA.names]
    taken = {name.lower() for name in (*own, FIELDS, MORE, TOKEN_COUNT)}
    text_types, problems = counts.replace_text_kinds()
    names = counts.list_names()
    left_out = counts.num_left_out
    columns: list[InputColumn] = []
    notes: list[str] = []
    # A name that is free is not taken away by one that must change.
    order = sorted(names[:MAX_COLUMNS], key=lambda item: _clean_name(item[0]).lower() in taken)
    for field, kinds in order:
        numbers = {kind: found[0] for kind, found in kinds.items() if kind != "null"}
        chosen = choose_type(numbers)
        column = _find_free_name(_clean_name(field), taken)
        taken.add(column.lower())
        if column != field:
            notes.append(
                f"field {_quote_name(field)} is the column {column}: a column of documents/ or "
                f"dropped/ has its name, or no table can have it. {_RENAME}"
            )
        other = {kind: found for kind, found in kinds.items() if _is_other(chosen, kind)}
        notes += [_describe_other(field, chosen, kind, found) for kind, found in other.items()]
        if problem := problems.get(field):
            notes.append(
                f"field {_quote_name(field)}: {problem}, so the column has the texts as they are. "
                f"Correct the file, or name the type in data.read.column_types: then such rows are "
                "left out and counted."
            )
        columns.append(
            InputColumn(
                column=column,
                field=field.encode("utf-8", "backslashreplace").decode(),
                type=chosen,
                values=sum(numbers.values()),
                other_values=sum(found[0] for found in other.values()),
            )
        )
    left_out += sum(found[0] for _, kinds in names[MAX_COLUMNS:] for found in kinds.values())
    if left_out:
        notes.append(
            f"{left_out} values of fields have no column: a table has the {MAX_COLUMNS} fields "
            f"with most values, and names of at most {NAME_CHARACTERS} characters. They are in "
            f"{MORE} as JSON. Name the fields to keep in data.read.keep_fields."
        )
    if typed and wanted is not None:
        typed = [name for name in typed if name in wanted]
    for key, asked in (("keep_fields", wanted or ()), ("column_types", typed)):
        if missing := [name for name in asked if name not in dict(names)]:
            found_names = ", ".join(_quote_name(name) for name, _ in names[:_SHOWN_NAMES])
            notes.append(
                f"data.read.{key} names {', '.join(map(_quote_name, missing))}, which no document "
                f"has; found: {found_names or 'none'}. Correct the name, or leave it out."
            )
    has_more = bool(left_out) or any(column.other_values for column in columns)
    order_names = {field: number for number, (field, _) in enumerate(names)}
    pairs = sorted(zip(order, columns, strict=True), key=lambda pair: order_names[pair[0][0]])
    kept = tuple((item[0], one.column, one.type) for item, one in pairs)
    fields = {field for field, _, _ in kept}
    texts = sorted((field, kind) for field, kind in text_types.items() if field in fields)
    return ChosenColumns(
        InputColumns(kept, has_more, tuple(texts)),
        tuple(one for _, one in pairs),
        tuple(notes),
    )


def _is_other(chosen: str, kind: str) -> bool:
    return kind != "null" and not can_hold(chosen, kind)


def _describe_other(field: str, chosen: str, kind: str, found: Sequence[object]) -> str:
    number, offset, value, file = found
    return (
        f"field {_quote_name(field)}: {number} values are of kind {kind}, such as {value} in "
        f"{file} at {offset}, but most are {chosen}. The column has nulls there, and {MORE} has "
        "the values as JSON. Write one type in all files, or leave the field out of "
        "data.read.keep_fields."
    )


def _quote_name(name: str) -> str:
    return json.dumps(name[:NAME_CHARACTERS])


def _clean_name(name: str) -> str:
    """Return a name that Arrow, DuckDB and parquet can hold."""
    # NUL ends a name in Arrow's C interface.
    return name.replace("\0", "").encode("utf-8", "replace").decode() or _PREFIX


def _find_free_name(name: str, taken: Collection[str]) -> str:
    while name.lower() in taken:
        name = _PREFIX + name
    return name
