"""Record headers of WARC (ISO 28500, 4) and of ARC, the format before WARC (Internet Archive, "Arc File Format", 1996).

A WARC header is a version line, named fields and a blank line. An ARC header is one line of five fields (version 1) or
ten (version 2) with the length last; it is returned under WARC's field names.
"""

import re

from data_pipeline.readers.http_response import parse_header_fields
from data_pipeline.readers.record_parser import UNENDED, RecordHeader

_START = rb"WARC/(?:1\.[01]|0\.1[78])\r?\n[A-Za-z\-]+:"
_INNER = re.compile(b"\n" + _START)  # no field of a header begins like a record
_NO_HEADER = "damaged record: no WARC header"


class WarcDialect:
    """WARC 0.17 to 1.1; lines may end without a carriage return."""

    start = re.compile(_START)
    separator = b"\r\n\r\n"

    def is_record_start(self, head: bytes) -> bool:
        """Return whether a few bytes can be the beginning of a record."""
        return head.startswith(b"WARC/") or b"WARC/".startswith(head)

    def parse_header(self, head: bytes) -> RecordHeader | str:
        """Return the header at the beginning of `head`, or the reason why there is none."""
        if not head.startswith(b"WARC/"):
            return _NO_HEADER
        end, size = _find_blank_line(head)
        if not size or _INNER.search(head, 0, end):
            return UNENDED
        fields = parse_header_fields(head[:end].decode("utf-8", "replace"))
        try:
            length = int(fields.get("content-length", "none"))
        except ValueError:
            length = -1
        if length < 0:
            problem = "Content-Length is no number" if "content-length" in fields else "no Content-Length"
            return f"damaged record: {problem}"
        return RecordHeader(end + size, fields.get("warc-type", ""), fields, length)


def _find_blank_line(head: bytes) -> tuple[int, int]:
    """Return the end of the line before the first blank one, and the bytes of both line ends; (0, 0) without one."""
    found = [(index, len(ends)) for ends in (b"\n\r\n", b"\n\n") if (index := head.find(ends)) >= 0]
    return min(found, default=(0, 0))


_LINE_BYTES = 4_096
_FIELDS = (5, 10)
# An address with spaces is followed by an IP address (or a placeholder) and a date.
_SPACED = re.compile(r"([^\n]+?) ([\d.]{7,15}|[0-9A-Fa-f.]*:[0-9A-Fa-f:.]+|unknown|-) (\d{8,18}) ([^\n]+)")


class ArcDialect:
    """ARC versions 1 and 2."""

    start = re.compile(
        rb"(?m)^[a-z][a-z0-9+.\-]{1,30}:(?:[^\s]{1,2048} [^ \n]{1,64}|[^\n]{1,2048}? [0-9A-Fa-f.:]{7,45})"
        rb" \d{8,18} [^\n]{1,1024}\r?$"
    )
    separator = b"\n"

    def is_record_start(self, head: bytes) -> bool:
        """Return whether a few bytes can be the beginning of a record."""
        return re.match(rb"[a-z][a-z0-9+.\-]{1,30}(?::|$)", head) is not None

    def parse_header(self, head: bytes) -> RecordHeader | str:
        """Return the header at the beginning of `head`, or the reason why there is none."""
        line, end, _ = head[:_LINE_BYTES].partition(b"\n")
        parts = _split_fields(line.decode("utf-8", "replace"))
        if not self.is_record_start(line):
            return "damaged record: no ARC header"
        if not end:
            return UNENDED
        if len(parts) not in _FIELDS or not parts[2].isdigit():
            return f"damaged record: an ARC header of {len(parts)} fields"
        if not (parts[-1].isascii() and parts[-1].isdigit()):
            return "damaged record: its length is no number"
        kind = "warcinfo" if parts[0].startswith("filedesc:") else "response"
        headers = {
            "warc-target-uri": parts[0],
            "warc-date": _format_warc_date(parts[2]),
            "content-type": "application/http",
        }
        return RecordHeader(len(line) + 1, kind, headers, int(parts[-1]))


def _split_fields(line: str) -> list[str]:
    """Split a header line into its fields, which may hold spaces in the address and the media type."""
    parts = line.split()
    if len(parts) in _FIELDS and parts[2].isdigit():
        return parts
    spaced = _SPACED.match(line.strip())
    if spaced is None:
        return parts
    begin, after = list(spaced.groups()[:3]), spaced[4].split()
    if len(begin) + len(after) in _FIELDS or len(after) < 2:
        return [*begin, *after]
    return [*begin, " ".join(after[:-1]), after[-1]]  # a media type with parameters


def _format_warc_date(digits: str) -> str:
    """Format 20140216050221 as a WARC date; shorter dates are returned unchanged."""
    if len(digits) < 14:
        return digits
    return f"{digits[:4]}-{digits[4:6]}-{digits[6:8]}T{digits[8:10]}:{digits[10:12]}:{digits[12:14]}Z"
