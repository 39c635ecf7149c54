"""Extract pages from WARC and ARC records: HTML of HTTP responses and resources, and the texts of
WET files.

Reads one record at a time; returns a page with its charset and without its codings, or the reason
why it is none.

Invariants:
- Block and payload digests are verified (ISO 28500, 5.8 and 5.9); the configuration decides about
  mismatches.
- A digest in an unknown algorithm or encoding passes.
- Writers disagree on the payload of a coded HTTP body. Its digest may be that of the body as
  stored, without its transfer coding, or without both codings.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from resiliparse.parse.encoding import detect_mime

from llmsys.config.cleaning import NoPdfReader, PdfiumConfig, ReadConfig
from llmsys.data_pipeline.readers.charset import decide_charset, decode_text
from llmsys.data_pipeline.readers.http_response import (
    BodyTooLargeError,
    DecodedBody,
    HttpResponse,
    decode_body,
    decode_chunked,
    parse_response,
)
from llmsys.data_pipeline.readers.page_batch import (
    NonPageRecord,
    Page,
    SkippedRecord,
    remove_invalid_characters,
)
from llmsys.data_pipeline.readers.record_parser import ParsedRecord

_KNOWN = {
    "sha1": "sha1",
    "sha-1": "sha1",
    "md5": "md5",
    "sha256": "sha256",
    "sha-256": "sha256",
    "sha512": "sha512",
}
_SIZES = {"sha1": 20, "md5": 16, "sha256": 32, "sha512": 64}  # bytes
# The digits of RFC 4648 to those of int(digits, 32).
_BASE32 = str.maketrans(
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", "0123456789abcdefghijklmnopqrstuv", "0189"
)


def find_block_mismatch(declared: str | None, block: bytes) -> str:
    """Return the problem with the block digest of a record, "" for none."""
    return _find_digest_mismatch("WARC-Block-Digest", declared, [block])


def find_payload_mismatch(declared: str | None, forms: Iterable[bytes | memoryview]) -> str:
    """Return the problem with the payload digest of a record, "" if it is that of any of
    `forms`.
    """
    return _find_digest_mismatch("WARC-Payload-Digest", declared, forms)


def _find_digest_mismatch(
    name: str, declared: str | None, forms: Iterable[bytes | memoryview]
) -> str:
    algorithm, wanted = _parse_digest(declared or "")
    if not wanted or any(
        hashlib.new(algorithm, form, usedforsecurity=False).digest() == wanted for form in forms
    ):
        return ""
    return f"{name} differs"


def _parse_digest(declared: str) -> tuple[str, bytes]:
    """Return algorithm and digest of `sha1:BASE32` or `sha1:hex`; empty values for any other
    form.
    """
    label, _, value = declared.strip().partition(":")
    algorithm = _KNOWN.get(label.strip().lower(), "")
    if not algorithm:
        return "", b""
    size = _SIZES[algorithm]
    value = value.strip()
    try:
        if len(value) == size * 2:
            return algorithm, bytes.fromhex(value)
        digits = value.rstrip("=").upper()
        number = int(digits.translate(_BASE32), 32)  # many times faster than base64.b32decode
        # Five bits per digit: those over the size are padding.
        return algorithm, (number >> (len(digits) * 5 - size * 8)).to_bytes(size, "big")
    except (OverflowError, ValueError):
        return "", b""


_HTML = ("text/html", "application/xhtml+xml")
_PDF = "application/pdf"
_TEXT_LIKE = ("text/", "application/octet-stream", "application/json", "application/javascript")
_OK = range(200, 300)
_MAX_HEADER_BYTES = 1 << 16  # an HTTP header does not count in the length of a page


class PageExtractor:
    """Builder of pages from the records of one file."""

    def __init__(self, file: str, max_page_bytes: int, config: ReadConfig) -> None:
        self.file = file
        self.limit = max_page_bytes
        self.config = config
        self.keep_bytes = max_page_bytes + _MAX_HEADER_BYTES
        self.types = _HTML if isinstance(config.pdf, NoPdfReader) else (*_HTML, _PDF)

    def extract_page(self, record: ParsedRecord) -> Page | SkippedRecord | NonPageRecord:
        """Return a record as a page, or the reason why it is none."""
        try:
            page = _EXTRACTORS[record.kind](self, record)
        except BodyTooLargeError:
            page = f"longer than {self.limit} bytes"
        if isinstance(page, str):
            return SkippedRecord(self.file, record.offset, page)
        return page or NonPageRecord(record.offset)

    def extract_response(self, record: ParsedRecord) -> Page | str:
        """Return the page in an HTTP response, or the reason why there is none."""
        get = record.headers.get
        url = (get("warc-target-uri") or "").strip("<> ")
        if not url:
            return "no WARC-Target-URI"
        if not (get("content-type") or "").lower().startswith("application/http"):
            return "no HTTP response"
        block = _require_block(record)
        response = parse_response(block)
        if response is None:
            return (
                "no HTTP response"
                if "msgtype" not in (get("content-type") or "")
                else "unreadable HTTP header"
            )
        if response.status not in _OK:
            return f"HTTP status {response.status}"
        declared = (get("warc-identified-payload-type") or response.content_type).lower()
        if declared and declared not in self.types:
            return f"not HTML: {declared[:80]}"
        if len(response.body) > self.limit:
            raise BodyTooLargeError
        body = decode_body(response, self.limit)
        if not body.is_text:
            return f"damaged {response.headers.get('content-encoding', '')[:20]} coding"
        return self._build_page(
            record, url, body, declared, response.charset, response.content_type, response
        )

    def extract_resource(self, record: ParsedRecord) -> Page | str | None:
        """Return a page that was stored without an HTTP response; None if it is declared as
        another type.
        """
        declared, _, parameters = (record.headers.get("content-type") or "").partition(";")
        url = (record.headers.get("warc-target-uri") or "").strip("<> ")
        if declared.strip().lower() not in self.types or not url:
            return None
        body = DecodedBody(_require_block(record))
        charset = parameters.rpartition("charset=")[2].strip(" \"'")
        return self._build_page(
            record, url, body, declared.strip().lower(), charset, declared.strip().lower(), None
        )

    def extract_conversion(self, record: ParsedRecord) -> Page | str | None:
        """Return the text of a WET record, which needs no extraction."""
        declared, _, parameters = (record.headers.get("content-type") or "text/plain").partition(
            ";"
        )
        if declared.strip().lower() != "text/plain":
            return f"not text: {declared[:80]}"
        block = _require_block(record)
        reason, notes = self._check(
            record, "", self._find_record_mismatch(record, block, lambda: [block])
        )
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
        """Return the reason why a later segment of a long record is no page."""
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
        problem = "" if declared == _PDF else _find_non_html_reason(payload, declared)
        if problem:
            return problem
        block = record.block or b""
        problem = self._find_record_mismatch(
            record, block, lambda: _iter_payload_forms(block, payload, response)
        )
        reason, notes = self._check(record, body.cut, problem)
        if reason:
            return reason
        page = Page(
            offset=record.offset,
            url=remove_invalid_characters(url),
            date=remove_invalid_characters(record.headers.get("warc-date") or ""),
            content_type=remove_invalid_characters(content_type),
            more_notes=notes,
        )
        if declared == _PDF and isinstance(self.config.pdf, PdfiumConfig):
            from llmsys.data_pipeline.readers.pdf_text import add_pdf_text

            return add_pdf_text(page, payload, self.limit, self.config.pdf)
        found = decide_charset(payload, charset)
        return replace(page, payload=payload, charset=found.codec, more_notes=(*notes, found.note))

    def _check(self, record: ParsedRecord, cut: str, digest: str) -> tuple[str, tuple[str, ...]]:
        """Return the reason why the config drops a page, "" if it does not, and the notes of a
        page that is kept.
        """
        truncated = (record.headers.get("warc-truncated") or "").strip()
        cuts = tuple(filter(None, (f"WARC-Truncated: {truncated[:40]}" if truncated else "", cut)))
        found = [
            (self.config.on_digest_mismatch, (digest,) if digest else ()),
            (self.config.on_truncation, cuts),
        ]
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
        """Return the mismatch with the digests in the header of a record, "" for none."""
        if self.config.on_digest_mismatch == "ignore":
            return ""
        get = record.headers.get
        declared = get("warc-payload-digest")
        return find_block_mismatch(get("warc-block-digest"), block) or (
            find_payload_mismatch(declared, forms()) if declared else ""
        )


_EXTRACTORS: dict[str, Callable[[PageExtractor, ParsedRecord], Any]] = {
    "response": PageExtractor.extract_response,
    "resource": PageExtractor.extract_resource,
    "conversion": PageExtractor.extract_conversion,
    "continuation": PageExtractor.describe_continuation,
}


def _require_block(record: ParsedRecord) -> bytes:
    if record.block is None:
        raise BodyTooLargeError
    return record.block


def _iter_payload_forms(
    block: bytes, payload: bytes, response: HttpResponse | None
) -> Iterator[bytes | memoryview]:
    """Yield the byte strings that writers digest as the payload, the most usual first."""
    if response is None:
        yield block
        return
    yield response.body
    yield decode_chunked(response)
    yield payload


def _find_non_html_reason(payload: bytes, declared: str) -> str:
    """Return the reason why a body is not HTML, whatever its header declares; "" if it may be."""
    if not payload or payload.isspace():
        return "empty page"
    found = detect_mime(payload[:1024])
    if not found.startswith(_TEXT_LIKE) and "xml" not in found and "html" not in found:
        return f"not HTML: {found} in spite of its header" if declared else f"not HTML: {found}"
    if not declared and b"<" not in payload[:1024]:
        return "not HTML: no content type and no markup"
    return ""
