"""Build a page from the fields of one row of a file of documents.

Fields are found by name and converted to text; text over the limit is rejected. Such pages need no extraction.
"""

from collections.abc import Collection, Mapping
from typing import Any

from data_pipeline.readers.page_batch import Page, remove_invalid_characters

TOO_LONG = object()  # placeholder for a text that is too long to decode
_SHOWN_FIELDS, _NAME_CHARACTERS = 8, 40
_ID_CHARACTERS = 256  # longer ids are ignored: ids are kept in memory for every document


def get_field(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field; `a.b` is the field b of the mapping a, unless a field has that literal name."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def find_text_fields(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the fields that hold text; fields of a mapping a are named `a.b`."""
    names = [name for name, value in row.items() if isinstance(value, str)]
    mappings = [(name, value) for name, value in row.items() if isinstance(value, Mapping)]
    return names + [
        f"{name}.{inner}" for name, mapping in mappings for inner, value in mapping.items() if isinstance(value, str)
    ]


def describe_missing_text(text_field: str, names: Collection[str] | None = None) -> str:
    """Return the reason why a row is no document, with the fields that hold text; `names` None means unknown."""
    if names is None:
        return f"no text in field '{text_field}'"
    shown = [f"'{remove_invalid_characters(name)[:_NAME_CHARACTERS]}'" for name in sorted(names)[:_SHOWN_FIELDS]]
    more = f" and {len(names) - _SHOWN_FIELDS} more" if len(names) > _SHOWN_FIELDS else ""
    found = (
        f"text is in {', '.join(shown)}{more} (data.read.text_field names the field)" if shown else "no field has text"
    )
    return f"no text in field '{text_field}': {found}"


def build_document_page(
    offset: int, values: Mapping[str, Any], limit: int, text_field: str, names: Collection[str] | None = None
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
    if not isinstance(text, str):
        return describe_missing_text(text_field, names)
    text = remove_invalid_characters(text)
    if len(text) > limit or len(text.encode()) > limit:
        return f"longer than {limit} bytes"
    name = _format_value(values["id"])
    return Page(
        offset=offset,
        url=_format_value(values["url"]),
        date=_format_value(values["date"]),
        content_type="text/plain",
        text=text,
        id=name if 0 < len(name) <= _ID_CHARACTERS else None,
    )


def _format_value(value: Any) -> str:
    """Format a value as text: times as ISO 8601, "" for anything but text, numbers and times."""
    if isinstance(value, str):
        return remove_invalid_characters(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return str(value.isoformat()) if hasattr(value, "isoformat") else ""
