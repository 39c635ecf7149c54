"""WARC files in, record batches of HTML pages out.

Reads .warc and .warc.gz, gives each HTTP response that carries HTML, with its charset and without its codings, in file
order. Everything that looks like a page and is not delivered is counted with file, offset and reason; nothing stops
the rest.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from fastwarc.warc import WarcRecord, WarcRecordType
from resiliparse.parse.encoding import detect_mime

from data_pipeline.readers.charset import detect_charset
from data_pipeline.readers.coding import TooLongError, decode_body
from data_pipeline.readers.page import PAGE_SCHEMA, PageBatch, Skip
from data_pipeline.readers.record import ShortRecordError, walk

_HTML = ("text/html", "application/xhtml+xml")
_BATCH_BYTES = 32 << 20  # pages are long at times; memory is bounded by bytes too
_TEXT_LIKE = ("text/", "application/octet-stream", "application/json", "application/javascript")
_OK = range(200, 300)


def read_pages(path: str, *, max_page_bytes: int, batch_pages: int = 128) -> Iterator[PageBatch]:
    """The HTML pages of one file.

    Args:
        path: a .warc or .warc.gz file; what it is shows in its bytes.
        max_page_bytes: longer pages are skipped, before and after their codings are undone.
        batch_pages: pages per batch; a batch also ends when its pages take 32 MiB.

    Yields:
        Batches in file order; the last may have no pages. At least one.
    """
    batch = _Batch()
    for found in walk(path, lambda record: _take(record, path, max_page_bytes)):
        batch.add(found)
        if len(batch.rows) >= batch_pages or batch.bytes >= _BATCH_BYTES:
            yield batch.finish()
            batch = _Batch(position=batch.position)
    yield batch.finish()


@dataclass(frozen=True, slots=True)
class _Other:
    """A record that is no page and need not be one, such as a request."""

    offset: int


@dataclass
class _Batch:
    """Pages being collected."""

    position: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    records: int = 0
    bytes: int = 0

    def add(self, found: "dict[str, Any] | Skip | _Other") -> None:
        if isinstance(found, Skip):
            self.skipped.append(found)
            self.position = max(self.position, found.offset)
            return
        self.records += 1
        if isinstance(found, _Other):
            self.position = max(self.position, found.offset)
            return
        self.rows.append(found)
        self.bytes += len(found["payload"])
        self.position = max(self.position, found["offset"])

    def finish(self) -> PageBatch:
        return PageBatch(pa.RecordBatch.from_pylist(self.rows, PAGE_SCHEMA), self.skipped, self.records, self.position)


def _take(record: WarcRecord, path: str, max_page_bytes: int) -> dict[str, Any] | Skip | _Other:
    """One record as a page, or why it is none."""
    offset = record.stream_pos
    if record.record_type != WarcRecordType.response:
        return _Other(offset)
    page = _page(record, max_page_bytes)
    if isinstance(page, str):
        return Skip(path, offset, page)
    return {**page, "file": path, "offset": offset}


def _page(record: WarcRecord, max_page_bytes: int) -> dict[str, Any] | str:
    url = (record.headers.get("WARC-Target-URI") or "").strip("<> ")
    if not url:
        return "no WARC-Target-URI"
    if not record.is_http:
        return "no HTTP response"
    try:
        record.parse_http()
    except (ValueError, OSError) as error:
        return f"unreadable HTTP header: {error}"
    headers = record.http_headers
    status = headers.status_code
    if status is None or status not in _OK:
        return f"HTTP status {status}"
    declared = (record.headers.get("WARC-Identified-Payload-Type") or record.http_content_type or "").lower()
    if declared and declared not in _HTML:
        return f"not HTML: {declared[:80]}"
    try:
        payload = _payload(record, max_page_bytes)
    except TooLongError:
        return f"longer than {max_page_bytes} bytes"
    problem = _not_html(payload, declared)
    if problem:
        return problem
    return {
        "url": _valid(url),
        "date": _valid(record.headers.get("WARC-Date") or ""),
        "content_type": _valid((record.http_content_type or "").lower()),
        "charset": detect_charset(payload, record.http_charset or ""),
        "payload": payload,
    }


def _payload(record: WarcRecord, max_page_bytes: int) -> bytes:
    length = record.content_length
    if length > max_page_bytes:
        raise TooLongError
    body = record.reader.read(length)
    if len(body) < length:
        raise ShortRecordError
    headers = record.http_headers
    return decode_body(
        body, headers.get("Transfer-Encoding") or "", headers.get("Content-Encoding") or "", max_page_bytes
    )


def _not_html(payload: bytes, declared: str) -> str:
    """Why a body is no HTML whatever its header says, "" if it may be."""
    if not payload.strip():
        return "empty page"
    found = detect_mime(payload[:1024])
    if not found.startswith(_TEXT_LIKE) and "xml" not in found and "html" not in found:
        return f"not HTML: {found} in spite of its header" if declared else f"not HTML: {found}"
    if not declared and b"<" not in payload[:1024]:
        return "not HTML: no content type and no markup"
    return ""


def _valid(text: str) -> str:
    """The text without what UTF-8 cannot carry."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\0", "")
