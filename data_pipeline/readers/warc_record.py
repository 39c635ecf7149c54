"""What a WARC record looks like to the careful reader (ISO 28500, 4): a version line, named fields, a blank line.

Reads the first bytes of a record, gives its header or what is wrong with it.
"""

import re

from data_pipeline.readers.careful import UNENDED, RecordHeader
from data_pipeline.readers.header import parse_header_fields

_START = rb"WARC/(?:1\.[01]|0\.1[78])\r?\n[A-Za-z\-]+:"
_INNER = re.compile(b"\n" + _START)  # no field of a header begins like a record
_NO_HEADER = "damaged record: no WARC header"


class WarcDialect:
    """WARC 0.17 to 1.1; lines may end without their carriage return."""

    start = re.compile(_START)
    separator = b"\r\n\r\n"

    def is_record_start(self, head: bytes) -> bool:
        """Return whether a few bytes can be the beginning of a record."""
        return head.startswith(b"WARC/") or b"WARC/".startswith(head)

    def parse_header(self, head: bytes) -> RecordHeader | str:
        """Return the header at the beginning of `head`, or why there is none."""
        if not head.startswith(b"WARC/"):
            return _NO_HEADER
        place, size = _find_blank_line(head)
        if not size or _INNER.search(head, 0, place):
            return UNENDED
        fields = parse_header_fields(head[:place].decode("utf-8", "replace"))
        try:
            length = int(fields.get("content-length", "none"))
        except ValueError:
            length = -1
        if length < 0:
            said = "Content-Length is no number" if "content-length" in fields else "no Content-Length"
            return f"damaged record: {said}"
        return RecordHeader(place + size, fields.get("warc-type", ""), fields, length)


def _find_blank_line(head: bytes) -> tuple[int, int]:
    """Where the first line ends that a blank one follows, and the bytes of both ends; (0, 0) without one."""
    found = [(place, len(ends)) for ends in (b"\n\r\n", b"\n\n") if (place := head.find(ends)) >= 0]
    return min(found, default=(0, 0))
