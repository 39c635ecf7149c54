"""HTML pages in, plain text out: one paragraph or list item per line, blank lines between blocks.

Reads pages with their charset, gives text that is valid UTF-8, in Unicode's NFC, without control characters other than
tab and newline; and for a page that asks for more work than the config allows, the limit that it is beyond. Limits are
counted, never timed, so that a busy machine decides nothing.
"""

import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import pyarrow as pa

from data_pipeline.extract.page_limits import LimitViolation, Nesting, find_limit_violation
from llmsys.config.extraction import (
    ArticleExtractorConfig,
    ExtractConfig,
    ResiliparseExtractorConfig,
    TrafilaturaExtractorConfig,
)

_BLANK_LINES = re.compile(r"\n{3,}")
# Controls are noise in text; carriage returns and the like have become newlines before.
_NOISE = dict.fromkeys([*range(0, 9), 11, 12, *range(14, 32), *range(127, 160), 0xFEFF, 0xFFFE, 0xFFFF])
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufeff\ufffe\uffff]")

Extractor = Callable[[bytes], str]  # HTML as valid UTF-8, without NUL


class ExtractionResult(NamedTuple):
    """What became of a batch of pages: texts, null where there is none, and the limits that pages are beyond."""

    texts: pa.LargeStringArray
    limit_hits: list[LimitViolation | None]


def extract_text(pages: pa.RecordBatch, config: ExtractConfig) -> pa.LargeStringArray:
    """Text of each page as large_string; null where there is none."""
    return extract_pages(pages, config).texts


def extract_pages(pages: pa.RecordBatch, config: ExtractConfig) -> ExtractionResult:
    """Extract a batch with the columns `payload` and `charset` of `readers.page.PAGE_SCHEMA`.

    ConfigError when the extractor is not installed.
    """
    extract = build_extractor(config)
    payloads = pages.column("payload")
    texts: list[str | None] = []
    beyond: list[LimitViolation | None] = []
    for row, charset in enumerate(pages.column("charset").to_pylist()):
        html = _convert_to_utf8(payloads[row : row + 1], charset, config.max_page_bytes)
        over = html if isinstance(html, LimitViolation) else _find_page_violation(html, config)
        beyond.append(over)
        texts.append(None if over or isinstance(html, LimitViolation) else clean_text(extract(html)) or None)
    return ExtractionResult(pa.array(texts, pa.large_string()), beyond)


@lru_cache(maxsize=8)
def build_extractor(config: ExtractConfig) -> Extractor:
    """What makes text of a page; libraries are loaded here, since few processes extract."""
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


def _convert_to_utf8(page: pa.LargeBinaryArray, charset: str, max_bytes: int) -> bytes | LimitViolation:
    """The only page of an array in UTF-8 without NUL, which no text holds."""
    payload: bytes = page[0].as_py()
    if len(payload) > max_bytes:
        return LimitViolation("bytes", len(payload), max_bytes)
    payload_is_utf8 = charset == "utf-8" and (payload.isascii() or _is_utf8(page))
    html = payload if payload_is_utf8 else payload.decode(charset, "replace").encode("utf-8", "replace")
    return html.replace(b"\0", b"")


def _is_utf8(page: pa.LargeBinaryArray) -> bool:
    """What decoding would say, several times as fast."""
    try:
        page.cast(pa.large_string())
    except pa.ArrowInvalid:
        return False
    return True


def _find_page_violation(html: bytes, config: ExtractConfig) -> LimitViolation | None:
    """The limit that a page is beyond; resiliparse's parser takes no longer for elements that are nested deeper."""
    nesting: Nesting = "linear" if isinstance(config, ResiliparseExtractorConfig) else "square"
    return find_limit_violation(html, nesting=nesting, max_nodes=config.max_nodes, max_attributes=config.max_attributes)


def clean_text(text: str) -> str:
    """The text as the rest of the pipeline wants it: valid, normalised, without stray space."""
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate becomes a question mark
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if _CONTROL.search(text):
        text = text.translate(_NOISE)
    text = "\n".join(line.rstrip() for line in text.split("\n")).strip()
    if "\n\n\n" in text:
        text = _BLANK_LINES.sub("\n\n", text)
    return text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)
