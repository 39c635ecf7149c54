"""The named fields of a header, as WARC records and HTTP responses both have them (ISO 28500, 4; RFC 9112, 5)."""

import re

_FOLD = re.compile(r"\n[ \t]+")  # a value that goes on in another line


def parse_header_fields(header: str) -> dict[str, str]:
    """The first value of each field by its name in lower case, without the line that the header begins with."""
    fields: dict[str, str] = {}
    for line in _FOLD.sub(" ", header.replace("\r", "")).split("\n")[1:]:
        name, colon, value = line.partition(":")
        name = name.strip().lower() if colon else ""
        if name and name not in fields:
            fields[name] = value.strip()
    return fields
