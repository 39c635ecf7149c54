"""Records of WARC and ARC files in, pages out: HTML of HTTP responses and resources, and the texts of WET files.

Reads one record at a time, gives it as a page with its charset and without its codings, or the reason why it is none.
A record whose digest is another than its header says was changed after it was written: what becomes of it is a setting.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from resiliparse.parse.encoding import detect_mime

from data_pipeline.readers.careful import Record
from data_pipeline.readers.charset import decide_charset, decode_text
from data_pipeline.readers.coding import DecodedBody, TooLongError, decode_body, without_chunks
from data_pipeline.readers.digest import block_problem, payload_problem
from data_pipeline.readers.http import Response, parse_response
from data_pipeline.readers.page import Other, Page, Skip, valid
from llmsys.config.read import ReadConfig

_HTML = ("text/html", "application/xhtml+xml")
_TEXT_LIKE = ("text/", "application/octet-stream", "application/json", "application/javascript")
_OK = range(200, 300)
_HEADER_ROOM = 1 << 16  # an HTTP header counts for nothing in the length of a page


class PageTaker:
    """Makes pages of the records of one file."""

    def __init__(self, file: str, max_page_bytes: int, config: ReadConfig) -> None:
        self.file, self.limit, self.config = file, max_page_bytes, config
        self.keep_bytes = max_page_bytes + _HEADER_ROOM

    def take(self, record: Record) -> Page | Skip | Other:
        """One record as a page, or why it is none."""
        try:
            made = _MAKERS[record.kind](self, record)
        except TooLongError:
            made = f"longer than {self.limit} bytes"
        if isinstance(made, str):
            return Skip(self.file, record.offset, made)
        return made or Other(record.offset)

    def response(self, record: Record) -> Page | str:
        """The HTML of an HTTP response."""
        get = record.headers.get
        url = (get("warc-target-uri") or "").strip("<> ")
        if not url:
            return "no WARC-Target-URI"
        if not (get("content-type") or "").lower().startswith("application/http"):
            return "no HTTP response"
        block = _kept(record)
        response = parse_response(block)
        if response is None:
            return "no HTTP response" if "msgtype" not in (get("content-type") or "") else "unreadable HTTP header"
        if response.status not in _OK:
            return f"HTTP status {response.status}"
        declared = (get("warc-identified-payload-type") or response.content_type).lower()
        if declared and declared not in _HTML:
            return f"not HTML: {declared[:80]}"
        if len(response.body) > self.limit:
            raise TooLongError
        body = decode_body(response, self.limit)
        if not body.is_text:
            return f"damaged {response.headers.get('content-encoding', '')[:20]} coding"
        return self._page(record, url, body, declared, response.charset, response.content_type, response)

    def resource(self, record: Record) -> Page | str | None:
        """A page that was stored without the answer of a server; what declares no HTML is no page."""
        declared, _, parameters = (record.headers.get("content-type") or "").partition(";")
        url = (record.headers.get("warc-target-uri") or "").strip("<> ")
        if declared.strip().lower() not in _HTML or not url:
            return None
        body = DecodedBody(_kept(record))
        charset = parameters.rpartition("charset=")[2].strip(" \"'")
        return self._page(record, url, body, declared.strip().lower(), charset, declared.strip().lower(), None)

    def conversion(self, record: Record) -> Page | str | None:
        """The text of a WET file, which is a document as it is."""
        declared, _, parameters = (record.headers.get("content-type") or "text/plain").partition(";")
        if declared.strip().lower() != "text/plain":
            return f"not text: {declared[:80]}"
        block = _kept(record)
        reason, notes = self._check(record, "", self._digests(record, block, lambda: [block]))
        if reason:
            return reason
        text = decode_text(block, parameters.rpartition("charset=")[2].strip(" \"'"))
        url = (record.headers.get("warc-target-uri") or "").strip("<> ")
        date = record.headers.get("warc-date") or ""
        return Page(
            record.offset, valid(url), valid(date), content_type="text/plain", text=valid(text), more_notes=notes
        )

    def continuation(self, record: Record) -> str:
        """A later part of a long record."""
        return "continuation of another record"

    def _page(
        self,
        record: Record,
        url: str,
        body: DecodedBody,
        declared: str,
        charset: str,
        content_type: str,
        response: Response | None,
    ) -> Page | str:
        payload = body.payload
        problem = _not_html(payload, declared)
        if problem:
            return problem
        block = record.block or b""
        problem = self._digests(record, block, lambda: _payload_forms(block, payload, response))
        reason, notes = self._check(record, body.cut, problem)
        if reason:
            return reason
        found = decide_charset(payload, charset)
        return Page(
            offset=record.offset,
            url=valid(url),
            date=valid(record.headers.get("warc-date") or ""),
            payload=payload,
            charset=found.codec,
            content_type=valid(content_type),
            more_notes=(*notes, found.note),
        )

    def _check(self, record: Record, cut: str, digest: str) -> tuple[str, tuple[str, ...]]:
        """Return why the config drops a page, "" if it does not, and what is noted of a page that is kept."""
        said = (record.headers.get("warc-truncated") or "").strip()
        cuts = tuple(filter(None, (f"WARC-Truncated: {said[:40]}" if said else "", cut)))
        found = [(self.config.digests, (digest,) if digest else ()), (self.config.truncated, cuts)]
        for policy, problems in found:
            if policy == "drop" and problems:
                return problems[0], ()
        return "", tuple(valid(problem) for policy, problems in found if policy == "count" for problem in problems)

    def _digests(self, record: Record, block: bytes, forms: Callable[[], Iterable[bytes | memoryview]]) -> str:
        """What differs from the digests in the header of a record, "" when nothing does."""
        if self.config.digests == "ignore":
            return ""
        get = record.headers.get
        said = get("warc-payload-digest")
        return block_problem(get("warc-block-digest"), block) or (payload_problem(said, forms()) if said else "")


_MAKERS: dict[str, Callable[[PageTaker, Record], Any]] = {
    "response": PageTaker.response,
    "resource": PageTaker.resource,
    "conversion": PageTaker.conversion,
    "continuation": PageTaker.continuation,
}


def _kept(record: Record) -> bytes:
    if record.block is None:
        raise TooLongError
    return record.block


def _payload_forms(block: bytes, payload: bytes, response: Response | None) -> Iterator[bytes | memoryview]:
    """What writers take for the payload, the most usual first."""
    if response is None:
        yield block
        return
    yield response.body
    yield without_chunks(response)
    yield payload


def _not_html(payload: bytes, declared: str) -> str:
    """Why a body is no HTML whatever its header says, "" if it may be."""
    if not payload or payload.isspace():
        return "empty page"
    found = detect_mime(payload[:1024])
    if not found.startswith(_TEXT_LIKE) and "xml" not in found and "html" not in found:
        return f"not HTML: {found} in spite of its header" if declared else f"not HTML: {found}"
    if not declared and b"<" not in payload[:1024]:
        return "not HTML: no content type and no markup"
    return ""
