"""What a WARC record looks like to the careful reader (ISO 28500, 4): a version line, named fields, a blank line.

Reads the first bytes of a record, gives its header or what is wrong with it.
"""

import re

from data_pipeline.readers.careful import UNENDED, Header

_END = re.compile(rb"\r?\n\r?\n")
_NO_HEADER = "damaged record: no WARC header"


class WarcDialect:
    """WARC 0.17 to 1.1; lines may end without their carriage return."""

    start = re.compile(rb"WARC/(?:1\.[01]|0\.1[78])\r?\n[A-Za-z\-]+:")
    separator = b"\r\n\r\n"

    def opens(self, head: bytes) -> bool:
        """Return whether a few bytes can be the beginning of a record."""
        return head.startswith(b"WARC/") or b"WARC/".startswith(head)

    def parse(self, head: bytes) -> Header | str:
        """Return the header at the beginning of `head`, or why there is none."""
        if not head.startswith(b"WARC/"):
            return _NO_HEADER
        end = _END.search(head)
        if end is None:
            return UNENDED
        fields = _fields(head[: end.start()])
        try:
            length = int(fields.get("content-length", "none"))
        except ValueError:
            length = -1
        if length < 0:
            said = "Content-Length is no number" if "content-length" in fields else "no Content-Length"
            return f"damaged record: {said}"
        return Header(end.end(), fields.get("warc-type", ""), fields, length)


def _fields(header: bytes) -> dict[str, str]:
    fields: dict[str, str] = {}
    name = ""
    for line in header.decode("utf-8", "replace").replace("\r", "").split("\n")[1:]:
        if line[:1] in (" ", "\t") and name:
            fields[name] += " " + line.strip()
            continue
        said, colon, value = line.partition(":")
        name = said.strip().lower() if colon else ""
        if name in fields:
            name = ""
        elif name:
            fields[name] = value.strip()
    return fields
