"""Whether a record is what its WARC header says: block and payload digests (ISO 28500, 5.8 and 5.9).

Reads the bytes of a record, gives "" or what differs. A digest of an algorithm or a form that nobody knows proves
nothing and passes. Writers disagree about what the payload of a coded HTTP body is, so that its digest may be that of
the body as stored, without its transfer coding, or without both codings.

Records of WARC and ARC files in, pages out: HTML of HTTP responses and resources, and the texts of WET files.

Reads one record at a time, gives it as a page with its charset and without its codings, or the reason why it is none.
A record whose digest is another than its header says was changed after it was written: what becomes of it is a setting.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from resiliparse.parse.encoding import detect_mime

from data_pipeline.readers.charset import decide_charset, decode_text
from data_pipeline.readers.http_response import (
    BodyTooLargeError,
    DecodedBody,
    HttpResponse,
    decode_body,
    decode_chunked,
    parse_response,
)
from data_pipeline.readers.page_batch import NonPageRecord, Page, SkippedRecord, remove_invalid_characters
from data_pipeline.readers.record_parser import ParsedRecord
from llmsys.config.read import ReadConfig

_KNOWN = {"sha1": "sha1", "sha-1": "sha1", "md5": "md5", "sha256": "sha256", "sha-256": "sha256", "sha512": "sha512"}
_SIZES = {"sha1": 20, "md5": 16, "sha256": 32, "sha512": 64}  # bytes
_BASE32 = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", "0123456789abcdefghijklmnopqrstuv", "0189")


def find_block_mismatch(said: str | None, block: bytes) -> str:
    """What is wrong with the block of a record."""
    return _find_digest_mismatch("WARC-Block-Digest", said, [block])


def find_payload_mismatch(said: str | None, forms: Iterable[bytes | memoryview]) -> str:
    """What is wrong with the payload of a record, which may have been digested in any of some forms."""
    return _find_digest_mismatch("WARC-Payload-Digest", said, forms)


def _find_digest_mismatch(name: str, said: str | None, forms: Iterable[bytes | memoryview]) -> str:
    algorithm, wanted = _parse_digest(said or "")
    if not wanted or any(hashlib.new(algorithm, form, usedforsecurity=False).digest() == wanted for form in forms):
        return ""
    return f"{name} differs"


def _parse_digest(said: str) -> tuple[str, bytes]:
    """The algorithm and the digest of `sha1:BASE32` or `sha1:hex`, nothing when it is neither."""
    label, _, value = said.strip().partition(":")
    algorithm = _KNOWN.get(label.strip().lower(), "")
    if not algorithm:
        return "", b""
    size, value = _SIZES[algorithm], value.strip()
    try:
        if len(value) == size * 2:
            return algorithm, bytes.fromhex(value)
        digits = value.rstrip("=").upper()
        number = int(digits.translate(_BASE32), 32)  # many times faster than base64.b32decode
        return algorithm, (number >> (len(digits) * 5 - size * 8)).to_bytes(size, "big")
    except (OverflowError, ValueError):
        return "", b""


_HTML = ("text/html", "application/xhtml+xml")
_TEXT_LIKE = ("text/", "application/octet-stream", "application/json", "application/javascript")
_OK = range(200, 300)
_HEADER_ROOM = 1 << 16  # an HTTP header counts for nothing in the length of a page


class PageExtractor:
    """Makes pages of the records of one file."""

    def __init__(self, file: str, max_page_bytes: int, config: ReadConfig) -> None:
        self.file, self.limit, self.config = file, max_page_bytes, config
        self.keep_bytes = max_page_bytes + _HEADER_ROOM

    def extract_page(self, record: ParsedRecord) -> Page | SkippedRecord | NonPageRecord:
        """One record as a page, or why it is none."""
        try:
            made = _MAKERS[record.kind](self, record)
        except BodyTooLargeError:
            made = f"longer than {self.limit} bytes"
        if isinstance(made, str):
            return SkippedRecord(self.file, record.offset, made)
        return made or NonPageRecord(record.offset)

    def extract_response(self, record: ParsedRecord) -> Page | str:
        """The HTML of an HTTP response."""
        get = record.headers.get
        url = (get("warc-target-uri") or "").strip("<> ")
        if not url:
            return "no WARC-Target-URI"
        if not (get("content-type") or "").lower().startswith("application/http"):
            return "no HTTP response"
        block = _require_block(record)
        response = parse_response(block)
        if response is None:
            return "no HTTP response" if "msgtype" not in (get("content-type") or "") else "unreadable HTTP header"
        if response.status not in _OK:
            return f"HTTP status {response.status}"
        declared = (get("warc-identified-payload-type") or response.content_type).lower()
        if declared and declared not in _HTML:
            return f"not HTML: {declared[:80]}"
        if len(response.body) > self.limit:
            raise BodyTooLargeError
        body = decode_body(response, self.limit)
        if not body.is_text:
            return f"damaged {response.headers.get('content-encoding', '')[:20]} coding"
        return self._build_page(record, url, body, declared, response.charset, response.content_type, response)

    def extract_resource(self, record: ParsedRecord) -> Page | str | None:
        """A page that was stored without the answer of a server; what declares no HTML is no page."""
        declared, _, parameters = (record.headers.get("content-type") or "").partition(";")
        url = (record.headers.get("warc-target-uri") or "").strip("<> ")
        if declared.strip().lower() not in _HTML or not url:
            return None
        body = DecodedBody(_require_block(record))
        charset = parameters.rpartition("charset=")[2].strip(" \"'")
        return self._build_page(record, url, body, declared.strip().lower(), charset, declared.strip().lower(), None)

    def extract_conversion(self, record: ParsedRecord) -> Page | str | None:
        """The text of a WET file, which is a document as it is."""
        declared, _, parameters = (record.headers.get("content-type") or "text/plain").partition(";")
        if declared.strip().lower() != "text/plain":
            return f"not text: {declared[:80]}"
        block = _require_block(record)
        reason, notes = self._check(record, "", self._find_record_mismatch(record, block, lambda: [block]))
        if reason:
            return reason
        text = decode_text(block, parameters.rpartition("charset=")[2].strip(" \"'"))
        url = (record.headers.get("warc-target-uri") or "").strip("<> ")
        date = record.headers.get("warc-date") or ""
        return Page(
            record.offset,
            remove_invalid_characters(url),
            remove_invalid_characters(date),
            content_type="text/plain",
            text=remove_invalid_characters(text),
            more_notes=notes,
        )

    def describe_continuation(self, record: ParsedRecord) -> str:
        """A later part of a long record."""
        return "continuation of another record"

    def _build_page(
        self,
        record: ParsedRecord,
        url: str,
        body: DecodedBody,
        declared: str,
        charset: str,
        content_type: str,
        response: HttpResponse | None,
    ) -> Page | str:
        payload = body.payload
        problem = _find_non_html_reason(payload, declared)
        if problem:
            return problem
        block = record.block or b""
        problem = self._find_record_mismatch(record, block, lambda: _iter_payload_forms(block, payload, response))
        reason, notes = self._check(record, body.cut, problem)
        if reason:
            return reason
        found = decide_charset(payload, charset)
        return Page(
            offset=record.offset,
            url=remove_invalid_characters(url),
            date=remove_invalid_characters(record.headers.get("warc-date") or ""),
            payload=payload,
            charset=found.codec,
            content_type=remove_invalid_characters(content_type),
            more_notes=(*notes, found.note),
        )

    def _check(self, record: ParsedRecord, cut: str, digest: str) -> tuple[str, tuple[str, ...]]:
        """Return why the config drops a page, "" if it does not, and what is noted of a page that is kept."""
        said = (record.headers.get("warc-truncated") or "").strip()
        cuts = tuple(filter(None, (f"WARC-Truncated: {said[:40]}" if said else "", cut)))
        found = [(self.config.on_digest_mismatch, (digest,) if digest else ()), (self.config.on_truncation, cuts)]
        for policy, problems in found:
            if policy == "drop" and problems:
                return problems[0], ()
        return "", tuple(
            remove_invalid_characters(problem)
            for policy, problems in found
            if policy == "count"
            for problem in problems
        )

    def _find_record_mismatch(
        self, record: ParsedRecord, block: bytes, forms: Callable[[], Iterable[bytes | memoryview]]
    ) -> str:
        """What differs from the digests in the header of a record, "" when nothing does."""
        if self.config.on_digest_mismatch == "ignore":
            return ""
        get = record.headers.get
        said = get("warc-payload-digest")
        return find_block_mismatch(get("warc-block-digest"), block) or (
            find_payload_mismatch(said, forms()) if said else ""
        )


_MAKERS: dict[str, Callable[[PageExtractor, ParsedRecord], Any]] = {
    "response": PageExtractor.extract_response,
    "resource": PageExtractor.extract_resource,
    "conversion": PageExtractor.extract_conversion,
    "continuation": PageExtractor.describe_continuation,
}


def _require_block(record: ParsedRecord) -> bytes:
    if record.block is None:
        raise BodyTooLargeError
    return record.block


def _iter_payload_forms(block: bytes, payload: bytes, response: HttpResponse | None) -> Iterator[bytes | memoryview]:
    """What writers take for the payload, the most usual first."""
    if response is None:
        yield block
        return
    yield response.body
    yield decode_chunked(response)
    yield payload


def _find_non_html_reason(payload: bytes, declared: str) -> str:
    """Why a body is no HTML whatever its header says, "" if it may be."""
    if not payload or payload.isspace():
        return "empty page"
    found = detect_mime(payload[:1024])
    if not found.startswith(_TEXT_LIKE) and "xml" not in found and "html" not in found:
        return f"not HTML: {found} in spite of its header" if declared else f"not HTML: {found}"
    if not declared and b"<" not in payload[:1024]:
        return "not HTML: no content type and no markup"
    return ""
