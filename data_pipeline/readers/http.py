"""The HTTP response in a record: status, headers and body, forgiving about what real servers send.

Reads the block of a record, gives a `HttpResponse`; None when there is no status line.
"""

import re
from dataclasses import dataclass

from data_pipeline.readers.header import parse_header_fields

_HEADER_BYTES = 1 << 16
_STATUS = re.compile(rb"HTTP/\d(?:\.\d)?[ \t]+(\d{3})(?!\d)")
_END = re.compile(rb"\r?\n\r?\n")
_CHARSET = re.compile(r"""charset\s*=\s*["']?\s*([^\s;"',]+)""", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """One HTTP response; names of headers are lower case, the first of several of a name counts."""

    status: int
    headers: dict[str, str]
    body: memoryview

    @property
    def content_type(self) -> str:
        """The media type, lower case, without parameters."""
        return self.headers.get("content-type", "").split(";", 1)[0].strip().lower()

    @property
    def charset(self) -> str:
        """The charset as the header says it, "" when it says none."""
        found = _CHARSET.search(self.headers.get("content-type", ""))
        return found.group(1) if found else ""


def parse_response(block: bytes) -> HttpResponse | None:
    """Split a block into header and body."""
    status = _STATUS.match(block)
    if status is None:
        return None
    end = _END.search(block, 0, _HEADER_BYTES)
    stop, begin = end.span() if end else (min(len(block), _HEADER_BYTES),) * 2
    headers = parse_header_fields(block[:stop].decode("latin-1"))
    return HttpResponse(int(status.group(1)), headers, memoryview(block)[begin:])
