"""Extract plain text from HTML pages: one paragraph or list item per line, blank lines between blocks.

Invariants:
- Text is valid UTF-8 in Unicode's NFC, without control characters other than tab and newline.
- A page that would take more work than the config allows is reported with the limit it exceeds. Limits are counted,
  not timed, so that the load of the machine changes nothing.
"""

import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, assert_never

import pyarrow as pa

from data_pipeline.extract.page_limits import LimitViolation, Nesting, find_limit_violation
from llmsys.config.extraction import (
    ArticleExtractorConfig,
    ExtractConfig,
    ResiliparseExtractorConfig,
    TrafilaturaExtractorConfig,
)

_BLANK_LINES = re.compile(r"\n{3,}")
# Controls are noise in text; carriage returns were converted to newlines before.
_NOISE = dict.fromkeys([*range(0, 9), 11, 12, *range(14, 32), *range(127, 160), 0xFEFF, 0xFFFE, 0xFFFF])
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufeff\ufffe\uffff]")

Extractor = Callable[[bytes], str]  # HTML as valid UTF-8, without NUL


class ExtractionResult(NamedTuple):
    """Texts of a batch of pages, null without text, and the limit that each page exceeds, if any."""

    texts: pa.LargeStringArray
    limit_hits: list[LimitViolation | None]


def extract_text(pages: pa.RecordBatch, config: ExtractConfig) -> pa.LargeStringArray:
    """Return the text of each page as large_string; null where there is none."""
    return extract_pages(pages, config).texts


def extract_pages(pages: pa.RecordBatch, config: ExtractConfig) -> ExtractionResult:
    """Extract the text of a batch of pages.

    Args:
        pages: record batch with the columns `payload` and `charset` of `readers.page_batch.PAGE_SCHEMA`.
        config: extractor and limits.

    Returns:
        One text and one limit violation per page.

    Raises:
        ConfigError: if the extractor is not installed.
    """
    extract = build_extractor(config)
    payloads = pages.column("payload")
    texts: list[str | None] = []
    violations: list[LimitViolation | None] = []
    for row, charset in enumerate(pages.column("charset").to_pylist()):
        html = _convert_to_utf8(payloads[row : row + 1], charset, config.max_page_bytes)
        violation = html if isinstance(html, LimitViolation) else _find_page_violation(html, config)
        violations.append(violation)
        texts.append(None if violation or isinstance(html, LimitViolation) else clean_text(extract(html)) or None)
    return ExtractionResult(pa.array(texts, pa.large_string()), violations)


@lru_cache(maxsize=8)
def build_extractor(config: ExtractConfig) -> Extractor:
    """Build the extractor of a config; its library is imported here, since few processes extract."""
    match config:
        case ArticleExtractorConfig():
            from data_pipeline.extract.main_content import extract_article

            return extract_article
        case ResiliparseExtractorConfig():
            from data_pipeline.extract.resiliparse import build_resiliparse_extractor

            return build_resiliparse_extractor(config)
        case TrafilaturaExtractorConfig():
            from data_pipeline.extract.trafilatura import build_trafilatura_extractor

            return build_trafilatura_extractor(config)
        case unreachable:
            assert_never(unreachable)


def _convert_to_utf8(page: pa.LargeBinaryArray, charset: str, max_bytes: int) -> bytes | LimitViolation:
    """Return the only page of an array in UTF-8 without NULs, which the parsers do not accept."""
    payload: bytes = page[0].as_py()
    if len(payload) > max_bytes:
        return LimitViolation("bytes", len(payload), max_bytes)
    payload_is_utf8 = charset == "utf-8" and (payload.isascii() or _is_utf8(page))
    html = payload if payload_is_utf8 else payload.decode(charset, "replace").encode("utf-8", "replace")
    return html.replace(b"\0", b"")


def _is_utf8(page: pa.LargeBinaryArray) -> bool:
    """Return whether the page is valid UTF-8; Arrow's check is several times as fast as decoding."""
    try:
        page.cast(pa.large_string())
    except pa.ArrowInvalid:
        return False
    return True


def _find_page_violation(html: bytes, config: ExtractConfig) -> LimitViolation | None:
    """Return the limit that a page exceeds; the time of resiliparse's parser does not grow with nesting."""
    nesting: Nesting = "linear" if isinstance(config, ResiliparseExtractorConfig) else "square"
    return find_limit_violation(html, nesting=nesting, max_nodes=config.max_nodes, max_attributes=config.max_attributes)


def clean_text(text: str) -> str:
    """Return the text normalized for the rest of the pipeline: valid, NFC, without stray white space."""
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate becomes a question mark
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if _CONTROL.search(text):
        text = text.translate(_NOISE)
    text = "\n".join(line.rstrip() for line in text.split("\n")).strip()
    if "\n\n\n" in text:
        text = _BLANK_LINES.sub("\n\n", text)
    return text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)
