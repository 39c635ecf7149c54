"""Extract plain text from HTML pages: one paragraph or list item per line, blank lines between
blocks.

The article extractor is `extract.main_content`, or the same in the compiled core
(`core/native.py`), which leaves some pages to it; resiliparse and trafilatura are called here.

resiliparse: a page nested deeper than the config allows, or with many deep elements, is extracted
without searching for its main content, which takes time quadratic in the depth.

trafilatura: readers' comments are left out, as in FineWeb. Its cache of repeated texts, which makes
a text depend on earlier pages, is off.

Invariants:
- Text is valid UTF-8 in Unicode's NFC, without control characters other than tab and newline.
- A page that would take more work than the config allows is reported with the limit it exceeds.
  Limits are counted, not timed, so that the load of the machine changes nothing.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib import metadata
from typing import NamedTuple, assert_never

import numpy as np
import pyarrow as pa
from resiliparse.extract.html2text import extract_plain_text

from llmsys.config.cleaning import (
    ArticleExtractorConfig,
    ExtractConfig,
    PythonExtractorConfig,
    ResiliparseExtractorConfig,
    TrafilaturaExtractorConfig,
)
from llmsys.data_pipeline.core.native import NativeCore, load_core
from llmsys.data_pipeline.extract.page_limits import LimitViolation, Nesting, find_limit_violation
from llmsys.errors import ConfigError

# tags times depth, above which the search for the main content takes many seconds
_STEPS = 20_000_000
_TAG = re.compile(rb"<(/?)([a-zA-Z][a-zA-Z0-9]*)")
# Elements that never nest in themselves: void ones, and those that the next of their kind closes.
_FLAT = frozenset(
    (
        b"area base br col embed hr img input link meta source track wbr p li dt dd tr td th "
        b"option thead tbody tfoot colgroup optgroup rp rt html head body"
    ).split()
)


def build_resiliparse_extractor(config: ResiliparseExtractorConfig) -> Callable[[bytes], str]:
    """Build the extractor of `data.extract.kind=resiliparse`.

    Args:
        config: Its settings.

    Returns:
        A function from HTML to text.
    """

    def extract_text(html: bytes) -> str:
        # The search for the main content takes time quadratic in the depth.
        depth = estimate_nesting_depth(html) if config.main_content else 0
        main_content = (
            config.main_content and depth <= config.max_depth and depth * html.count(b"<") <= _STEPS
        )
        return extract_plain_text(
            html.decode(), main_content=main_content, alt_texts=False, comments=False
        )

    return extract_text


def estimate_nesting_depth(html: bytes) -> int:
    """Estimate the nesting depth of a page without parsing it, which takes quadratic time in deep
    ones.

    Args:
        html: The page.

    Returns:
        An upper estimate, at least 64.
    """
    if _estimate_max_open_tags(html) <= 64:
        return 64
    depth = deepest = 0
    for slash, name in _TAG.findall(html):
        if name.lower() in _FLAT:
            continue
        depth += -1 if slash else 1
        deepest = max(deepest, depth)
        depth = max(depth, 0)
    return deepest


def _estimate_max_open_tags(html: bytes) -> int:
    """Return an upper bound of the tags that are open at a time."""
    data = np.frombuffer(html + b" ", np.uint8)
    tags = np.flatnonzero(data[:-1] == ord("<"))
    if len(tags) == 0:
        return 0
    following = data[tags + 1]
    # `!` and `?`, of comments and declarations, come before `A`.
    steps = np.where(following == ord("/"), -1, (following >= ord("A")).astype(np.int64))
    depth = np.cumsum(steps)
    # End tags without a start tag must not hide the tags that are opened after them.
    return int((depth - np.minimum.accumulate(np.minimum(depth, 0))).max())


def build_trafilatura_extractor(config: TrafilaturaExtractorConfig) -> Callable[[bytes], str]:
    """Build the extractor of `data.extract.kind=trafilatura`.

    Args:
        config: Its settings.

    Returns:
        A function from HTML to text.

    Raises:
        ConfigError: trafilatura is not installed.
    """
    get_trafilatura_version()
    from trafilatura import extract

    precise = config.favor == "precision"
    complete = config.favor == "recall"

    def extract_text(html: bytes) -> str:
        text = extract(
            html.decode(),
            favor_precision=precise,
            favor_recall=complete,
            include_comments=False,
            deduplicate=False,
        )
        return text or ""

    return extract_text


def get_trafilatura_version() -> str:
    """Return the installed version.

    Returns:
        A requirement such as `trafilatura==2.0.0`.

    Raises:
        ConfigError: If trafilatura is not installed.
    """
    try:
        return f"trafilatura=={metadata.version('trafilatura')}"
    except metadata.PackageNotFoundError:
        raise ConfigError(
            "data.extract.kind=trafilatura needs the package trafilatura, which is not installed. "
            "Install it with: pip install 'llmsys[trafilatura]', or set data.extract.kind=article."
        ) from None


_BLANK_LINES = re.compile(r"\n{3,}")
# Controls are noise in text; carriage returns were converted to newlines before.
_NOISE = dict.fromkeys(
    [*range(0, 9), 11, 12, *range(14, 32), *range(127, 160), 0xFEFF, 0xFFFE, 0xFFFF]
)
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufeff\ufffe\uffff]")

Extractor = Callable[[bytes], str]  # HTML as valid UTF-8, without NUL


class ExtractionResult(NamedTuple):
    """Texts of a batch of pages, null without text, the limit that each page exceeds, if any, and
    the same texts as Markdown, if the config asks for it.
    """

    texts: pa.LargeStringArray
    limit_hits: list[LimitViolation | None]
    markdown: pa.LargeStringArray | None = None


def extract_text(pages: pa.RecordBatch, config: ExtractConfig) -> pa.LargeStringArray:
    """Extract the texts of a batch of pages.

    Args:
        pages: Pages with their HTML.
        config: The section `data.extract`.

    Returns:
        The text of each page as large_string; null where there is none.
    """
    return extract_pages(pages, config).texts


def extract_pages(pages: pa.RecordBatch, config: ExtractConfig) -> ExtractionResult:
    """Extract the text of a batch of pages.

    Args:
        pages: record batch with the columns `payload` and `charset` of
            `readers.page_batch.PAGE_SCHEMA`.
        config: extractor and limits.

    Returns:
        One text and one limit violation per page.

    Raises:
        ConfigError: if the extractor is not installed.
    """
    checked = list(_check_pages(pages, config))
    accepted = [page for page in checked if isinstance(page, bytes)]
    violations = [page if isinstance(page, LimitViolation) else None for page in checked]
    if isinstance(config, ArticleExtractorConfig) and config.format == "markdown":
        return _extract_forms(accepted, violations)
    compiled = _extract_with_core(accepted, config)
    extract = build_extractor(config)
    made = iter(
        clean_text(extract(html)) if text is None else text
        for html, text in zip(accepted, compiled or [None] * len(accepted), strict=True)
    )
    texts = [None if violation else next(made) or None for violation in violations]
    return ExtractionResult(pa.array(texts, pa.large_string()), violations)


def _extract_forms(
    accepted: Sequence[bytes], violations: list[LimitViolation | None]
) -> ExtractionResult:
    """Return the texts of pages and their Markdown, which the compiled core does not write."""
    from llmsys.data_pipeline.extract.main_content import extract_article_forms

    made = iter([tuple(map(clean_text, extract_article_forms(html))) for html in accepted])
    forms = [("", "") if violation else next(made) for violation in violations]
    text, markdown = (
        pa.array([form[place] or None for form in forms], pa.large_string()) for place in (0, 1)
    )
    return ExtractionResult(text, violations, markdown)


def iter_accepted_pages(pages: pa.RecordBatch, config: ExtractConfig) -> Iterator[bytes]:
    """Yield the pages of a batch that are within the limits, as extractors get them.

    Args:
        pages: As for `extract_pages`.
        config: Limits.

    Yields:
        HTML in UTF-8, without NUL.
    """
    return (page for page in _check_pages(pages, config) if isinstance(page, bytes))


def _check_pages(pages: pa.RecordBatch, config: ExtractConfig) -> Iterator[bytes | LimitViolation]:
    """Yield each page in UTF-8, or the limit that it exceeds."""
    payloads = pages.column("payload")
    for row, charset in enumerate(pages.column("charset").to_pylist()):
        html = _convert_to_utf8(payloads[row : row + 1], charset, config.max_page_bytes)
        if isinstance(html, LimitViolation):
            yield html
        else:
            yield _find_page_violation(html, config) or html


def _extract_with_core(pages: Sequence[bytes], config: ExtractConfig) -> list[str | None]:
    """Return the texts of pages by the compiled core, None for a page that it leaves to Python;
    an empty list where there is no core, or it does not know the extractor.
    """
    core = load_core() if isinstance(config, ArticleExtractorConfig) else None
    if not isinstance(core, NativeCore):
        return []
    return [
        None if text is None else _normalize_composition(text.decode())
        for text in core.extract_articles(pages)
    ]


@lru_cache(maxsize=8)
def build_extractor(config: ExtractConfig) -> Extractor:
    """Build the extractor of a section. Its library is imported here, since few processes extract.

    Args:
        config: The section `data.extract`.

    Returns:
        The extractor.
    """
    match config:
        case ArticleExtractorConfig():
            from llmsys.data_pipeline.extract.main_content import extract_article

            return extract_article
        case ResiliparseExtractorConfig():
            return build_resiliparse_extractor(config)
        case TrafilaturaExtractorConfig():
            return build_trafilatura_extractor(config)
        case PythonExtractorConfig():
            from llmsys.data_pipeline.extract.python_extractor import build_python_extractor

            return build_python_extractor(config)
        case unreachable:
            assert_never(unreachable)


def _convert_to_utf8(
    page: pa.LargeBinaryArray, charset: str, max_bytes: int
) -> bytes | LimitViolation:
    """Return the only page of an array in UTF-8 without NULs, which the parsers do not accept."""
    payload: bytes = page[0].as_py()
    if len(payload) > max_bytes:
        return LimitViolation("bytes", len(payload), max_bytes)
    payload_is_utf8 = charset == "utf-8" and (payload.isascii() or _is_utf8(page))
    html = (
        payload
        if payload_is_utf8
        else payload.decode(charset, "replace").encode("utf-8", "replace")
    )
    return html.replace(b"\0", b"")


def _is_utf8(page: pa.LargeBinaryArray) -> bool:
    """Return whether the page is valid UTF-8; Arrow's check is several times as fast as
    decoding.
    """
    try:
        page.cast(pa.large_string())
    except pa.ArrowInvalid:
        return False
    return True


def _find_page_violation(html: bytes, config: ExtractConfig) -> LimitViolation | None:
    """Return the limit that a page exceeds; the time of resiliparse's parser does not grow with
    nesting.
    """
    nesting: Nesting = "linear" if isinstance(config, ResiliparseExtractorConfig) else "square"
    return find_limit_violation(
        html, nesting=nesting, max_nodes=config.max_nodes, max_attributes=config.max_attributes
    )


def clean_text(text: str) -> str:
    """Normalize an extracted text for the rest of the pipeline.

    Args:
        text: The text of an extractor.

    Returns:
        Valid Unicode in NFC without stray white space.
    """
    if not text.isascii():
        # a lone surrogate becomes a question mark
        text = text.encode("utf-8", "replace").decode("utf-8")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if _CONTROL.search(text):
        text = text.translate(_NOISE)
    text = "\n".join(line.rstrip() for line in text.split("\n")).strip()
    if "\n\n\n" in text:
        text = _BLANK_LINES.sub("\n\n", text)
    return _normalize_composition(text)


def _normalize_composition(text: str) -> str:
    """Return a text in NFC."""
    return text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)
