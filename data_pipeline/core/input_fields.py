"""Fields of input rows on their way to columns of `documents/` and `dropped/`.

Readers write the fields of a row besides text, URL, id and date as one JSON object, in the column
`fields` of work files. Extraction counts names and kinds of values. From these counts of all inputs
one type per column is chosen, and collecting turns the objects into columns.

A value of the object is null, a boolean, a number, a text, or a mapping of one kind: of Arrow's
other types (`{"date32[day]": 19000}`), `{"json": …}` for lists and mappings, or `{"csv":
"7"}` for a text whose type follows from all texts of its column (`csv_types.py`).

Invariants:
- No value is lost: one that its column cannot hold, or that has no column, is in `more_fields`, a
  JSON object.
- The counts of a file, and of all files, take bounded memory, whatever the names.
"""

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any

import pyarrow as pa

from llmsys.data_pipeline.core.csv_types import (
    BATCH,
    INFERRED,
    LONGEST,
    MOST_WAITING,
    TEXT,
    TypeCounts,
    choose_text_type,
    convert_texts,
    count_texts,
    describe_refused_text,
    merge_texts,
)

FIELDS = "fields"  # column of work files
MORE = "more_fields"  # column of documents/ and dropped/
JSON = "json"  # kind of lists and mappings
MAX_COLUMNS = 256
NAME_CHARACTERS = 128  # longer names have no column
_MAX_NAMES = 4_096  # counted at once
_EXAMPLE_CHARACTERS = 60
_EXACT = 1 << 53  # integers up to here are exact as float64

_YEAR_10000 = 253_402_300_800  # seconds since 1970
_PER_SECOND = {"day": 1 / 86_400, "s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}

# kinds of plain values
_NULL = "null"
_BOOLEAN = "boolean"
_STRING = "string"
_BROKEN = "string with half a surrogate pair"  # no UTF-8 can hold it
_NUMBER = "number"
_SMALL = "integer"
_SMALL_NEGATIVE = "negative integer"
_LARGE = "integer above 2^53"
_LARGE_NEGATIVE = "integer below -2^53"
_UNSIGNED = "integer above 2^63"
_HUGE = "integer of more than 64 bits"
_TYPED = "integer of CSV"  # of any size, so that no other type holds all of them
# Types of columns and the kinds that they hold. Of types that hold as many values the first is
# chosen.
_HELD = {
    "bool": (_BOOLEAN,),
    "int64": (_SMALL, _SMALL_NEGATIVE, _LARGE, _LARGE_NEGATIVE, _TYPED),
    "uint64": (_SMALL, _LARGE, _UNSIGNED),
    "double": (_NUMBER, _SMALL, _SMALL_NEGATIVE),
    "large_string": (_STRING,),
}
# Kinds of the texts of a CSV column by its type; that of other types is their name.
_TEXT_KINDS = {"int64": _TYPED, "bool": _BOOLEAN, "double": _NUMBER, "large_string": _STRING}
_PLAIN = {_BOOLEAN, _STRING, _BROKEN, _NUMBER, _HUGE}.union(*_HELD.values())


def encode_fields(fields: Mapping[str, Any]) -> str | None:
    """Return fields as a cell of the column `fields`.

    Args:
        fields: Values by name, as the module's docstring describes them.

    Returns:
        An object of JSON in ASCII, so that NULs and halves of surrogate pairs stay; None without
        fields.

    Raises:
        RecursionError: A value is nested too deep.
    """
    return json.dumps(fields, separators=(",", ":")) if fields else None


def decode_fields(text: str | None) -> dict[str, Any]:
    """Return the fields of a cell.

    Args:
        text: What `encode_fields` returned.

    Returns:
        Values by name.
    """
    return json.loads(text) if text else {}


def get_kind(value: Any) -> str:
    """Return the kind of a value, such as `integer` or `date32[day]`.

    Args:
        value: A value of `decode_fields`.

    Returns:
        The kind.
    """
    if value is None:
        return _NULL
    if isinstance(value, bool):
        return _BOOLEAN
    if isinstance(value, int):
        return _get_integer_kind(value)
    if isinstance(value, float):
        return _NUMBER
    if isinstance(value, str):
        return _STRING if value.isascii() or _is_unicode(value) else _BROKEN
    (kind,) = value
    return str(kind)


def _get_integer_kind(value: int) -> str:
    if abs(value) <= _EXACT:
        return _SMALL if value >= 0 else _SMALL_NEGATIVE
    if value < 0:
        return _LARGE_NEGATIVE if value >= -(1 << 63) else _HUGE
    return _LARGE if value < 1 << 63 else _UNSIGNED if value < 1 << 64 else _HUGE


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def to_json_value(value: Any) -> Any:
    """Return a value as JSON shows it: times in ISO 8601, decimals as text, bytes in base64.

    Args:
        value: A value of `decode_fields`.

    Returns:
        A value that JSON can hold.
    """
    if not isinstance(value, dict):
        return _replace_non_finite(value)
    ((kind, payload),) = value.items()
    if kind == JSON:
        return _replace_non_finite(payload)
    if not isinstance(payload, int):
        return payload
    unit = re.match(r"(?:timestamp|date32|date64)\[(\w+)", kind)
    # pyarrow formats later years as others.
    if unit is None or abs(payload) < _YEAR_10000 * _PER_SECOND[unit[1]]:
        with suppress(pa.ArrowException):  # an unknown time zone
            return build_column([value], kind).cast(pa.string())[0].as_py()
    return f"{payload} {kind}"


def to_python_value(value: Any) -> Any:
    """Return a value as Python has it: times of `datetime`, decimals, bytes, lists and mappings.

    Args:
        value: A value of `decode_fields`.

    Returns:
        The value; a time that Python cannot hold as text.
    """
    if not isinstance(value, dict):
        return value
    ((kind, payload),) = value.items()
    if kind in (JSON, TEXT):
        return payload
    try:
        return build_column([value], kind)[0].as_py()
    # nanoseconds, years after 9999, an unknown time zone
    except (pa.ArrowException, ValueError, OverflowError, KeyError):
        return to_json_value(value)


def _replace_non_finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by their names."""
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, list):
        return [_replace_non_finite(one) for one in value]
    if isinstance(value, dict):
        return {name: _replace_non_finite(one) for name, one in value.items()}
    return value


def format_json(value: Any) -> str:
    """Format a value as JSON; in ASCII if it has half of a surrogate pair.

    Args:
        value: A value that JSON can hold.

    Returns:
        Text that is UTF-8.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if _is_unicode(text) else json.dumps(value, separators=(",", ":"))


def parse_type(name: str) -> pa.DataType:
    """Return the Arrow type of a column.

    Args:
        name: A type of `choose_type`.

    Returns:
        The type; `json` is text.
    """
    if name in (JSON, "large_string"):
        return pa.large_string()
    if name == "binary":
        return pa.large_binary()
    if found := re.fullmatch(r"decimal(128|256)\((\d+), (-?\d+)\)", name):
        build = pa.decimal128 if found[1] == "128" else pa.decimal256
        return build(int(found[2]), int(found[3]))
    return _parse_time(name) if name not in _HELD else pa.type_for_alias(name)


def _parse_time(name: str) -> pa.DataType:
    if found := re.fullmatch(r"timestamp\[(\w+), tz=(.*)\]", name, re.DOTALL):
        return pa.timestamp(found[1], found[2])
    return pa.type_for_alias(name)


def build_column(values: list[Any], name: str) -> pa.Array:
    """Build a column.

    Args:
        values: Values of the kinds that the type holds, or None.
        name: The type.

    Returns:
        An array of `parse_type(name)`.
    """
    kind = parse_type(name)
    if name in _HELD:
        return pa.array(values, kind)
    payloads = [None if value is None else value[name] for value in values]
    if name == JSON:
        texts = (None if one is None else format_json(_replace_non_finite(one)) for one in payloads)
        return pa.array(texts, kind)
    if name == "binary":
        return pa.array((None if one is None else base64.b64decode(one) for one in payloads), kind)
    if pa.types.is_decimal(kind):
        return pa.array((None if one is None else Decimal(one) for one in payloads), kind)
    width = pa.int32() if kind.bit_width == 32 else pa.int64()
    return pa.array(payloads, width).cast(kind)


def can_hold(name: str, kind: str) -> bool:
    """Return whether a column of a type holds values of a kind.

    Args:
        name: The type.
        kind: A kind of `get_kind`.

    Returns:
        Whether it does, exactly.
    """
    return kind in _HELD.get(name, (name,))


def choose_type(counts: Mapping[str, int]) -> str:
    """Choose the type that holds most values of a field.

    Args:
        counts: Number of values by kind.

    Returns:
        The name of the type; `large_string` for a field without values.
    """
    held = {
        name: sum(counts.get(kind, 0) for kind in kinds) for name, kinds in sorted(_HELD.items())
    }
    held |= {kind: number for kind, number in sorted(counts.items()) if kind not in _PLAIN}
    order = [*_HELD, *sorted(held.keys() - _HELD.keys())]
    best = max(order, key=lambda name: held[name])
    return best if held[best] else "large_string"


def convert_field(rows: Sequence[dict[str, Any]], name: str, text_type: str) -> None:
    """Convert the texts of a CSV column that are in rows.

    A text that the type refuses stays: one of a file that did not count it, because it has too many
    names.

    Args:
        rows: Values by name; changed.
        name: The field.
        text_type: A type of `FieldCounts.replace_text_kinds`.
    """
    found = [row for row in rows if isinstance(row.get(name), dict) and TEXT in row[name]]
    texts = [row[name][TEXT] for row in found]
    values: list[Any] = texts
    if text_type != "large_string":
        try:
            values = convert_texts(texts, INFERRED[text_type])
        except pa.ArrowInvalid:
            for row in found if len(found) > 1 else ():
                convert_field([row], name, text_type)
            return
    for row, value in zip(found, values, strict=True):
        row[name] = value


class FieldCounts:
    """Names of fields, and for each kind of its values their number and the first one."""

    def __init__(self) -> None:
        self._names: dict[str, dict[str, list[Any]]] = {}
        # Of fields with texts of CSV: what types accept, and texts and offsets not tried yet.
        self._texts: dict[str, TypeCounts] = {}
        self._waiting: dict[str, tuple[list[str], list[int]]] = {}
        self._waiting_characters = 0
        self.num_left_out = 0  # values without a count: names are too long, or too many

    def add_cells(self, cells: Iterable[str | None], offsets: Iterable[int]) -> None:
        """Count the fields of rows.

        Args:
            cells: The column `fields`.
            offsets: Positions of the rows in their file.
        """
        for cell, offset in zip(cells, offsets, strict=True):
            for name, value in decode_fields(cell).items():
                if len(name) > NAME_CHARACTERS:
                    self.num_left_out += 1
                    continue
                kinds = self._names.setdefault(name, {})
                kind = get_kind(value)
                if kind == TEXT:
                    texts, places = self._waiting.setdefault(name, ([], []))
                    texts.append(value[TEXT][: LONGEST + 1])
                    places.append(offset)
                    self._waiting_characters += len(texts[-1])
                if kind in kinds:
                    kinds[kind][0] += 1
                elif kind == _NULL:
                    kinds[kind] = [1, offset, ""]
                else:
                    shown = json.dumps(to_json_value(value))[:_EXAMPLE_CHARACTERS]
                    kinds[kind] = [1, offset, shown]
            self._prune()
            if self._waiting_characters > MOST_WAITING:
                self._try_types(1)
        self._try_types(BATCH)

    def _try_types(self, least: int) -> None:
        """Try the types of fields with some texts that wait."""
        for name in [one for one, (texts, _) in self._waiting.items() if len(texts) >= least]:
            texts, places = self._waiting.pop(name)
            self._waiting_characters -= sum(map(len, texts))
            count_texts(self._texts.setdefault(name, {}), texts, places)

    def merge_counts(self, plain: Mapping[str, Any]) -> None:
        """Add the counts of a file.

        Args:
            plain: What `to_dict` returned for it.
        """
        for name, kinds in plain["names"].items():
            mine = self._names.setdefault(name, {})
            for kind, (number, *first) in kinds.items():
                mine.setdefault(kind, [0, *first, plain["file"]][:4])[0] += number
        for name, counts in plain.get("texts", {}).items():
            merge_texts(self._texts.setdefault(name, {}), counts, plain["file"])
        self.num_left_out += plain["left_out"]
        self._prune()

    def _prune(self) -> None:
        """Keep a quarter of the names, those with most values, when there are very many."""
        if len(self._names) > _MAX_NAMES:
            self._keep_names(_MAX_NAMES // 4)

    def _keep_names(self, most: int) -> None:
        """Keep the names with most values, and count the values of others as left out."""
        for name, kinds in self.list_names()[most:]:
            self.num_left_out += sum(number for number, *_ in kinds.values())
            del self._names[name]
            self._texts.pop(name, None)
            texts, _ = self._waiting.pop(name, ([], []))
            self._waiting_characters -= sum(map(len, texts))

    def list_names(self) -> list[tuple[str, dict[str, list[Any]]]]:
        """Return names with their kinds, those with most values first."""

        def get_order(item: tuple[str, dict[str, list[Any]]]) -> tuple[int, str]:
            name, kinds = item
            return -sum(found[0] for kind, found in kinds.items() if kind != _NULL), name

        return sorted(self._names.items(), key=get_order)

    def to_dict(self, file: str) -> dict[str, Any]:
        """Return the counts as values that JSON can hold.

        Args:
            file: The file that was counted, as messages show it.

        Returns:
            The counts of at most `MAX_COLUMNS` names.
        """
        self._keep_names(MAX_COLUMNS)
        self._try_types(1)
        texts = {"texts": self._texts} if self._texts else {}
        return {"file": file, "names": self._names, "left_out": self.num_left_out} | texts

    def replace_text_kinds(self) -> tuple[dict[str, str], dict[str, str]]:
        """Choose the types of the texts of CSV, and count them as values of these types.

        Returns:
            Types by field, and what is wrong with fields that stay texts.
        """
        types: dict[str, str] = {}
        problems: dict[str, str] = {}
        for name, counts in self._texts.items():
            types[name] = choose_text_type(counts)
            number, *first = self._names[name].pop(TEXT)
            kind = _TEXT_KINDS.get(types[name], types[name])
            self._names[name].setdefault(kind, [0, *first])[0] += number
            if types[name] == "large_string":
                problems[name] = describe_refused_text(counts, number)
        return types, problems
