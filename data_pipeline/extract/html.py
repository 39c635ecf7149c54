"""HTML pages in, plain text out: one paragraph or list item per line, blank lines between blocks.

Reads pages with their charset, gives text that is valid UTF-8, in Unicode's NFC, without control characters other than
tab and newline. Work is bounded by the length and depth of a page, never by a clock, so that a busy machine decides
nothing.
"""

import re
import unicodedata

import numpy as np
import pyarrow as pa
from resiliparse.extract.html2text import extract_plain_text

from llmsys.config.text import ExtractConfig

_BLANK_LINES = re.compile(r"\n{3,}")
_SPACE_AT_END = re.compile(r"[^\S\n]+$", re.MULTILINE)
# Controls are noise in text; carriage returns and the like have become newlines before.
_NOISE = dict.fromkeys([*range(0, 9), 11, 12, *range(14, 32), *range(127, 160), 0xFEFF, 0xFFFE, 0xFFFF])
_TAG = re.compile(rb"<(/?)([a-zA-Z][a-zA-Z0-9]*)")
# Elements that never nest in themselves: void ones, and those that the next of their kind closes.
_FLAT = frozenset(
    b"area base br col embed hr img input link meta source track wbr p li dt dd tr td th option thead tbody "
    b"tfoot colgroup optgroup rp rt html head body".split()
)


def extract_text(pages: pa.RecordBatch, config: ExtractConfig) -> pa.Array:
    """Text of each page as large_string; null where there is none.

    Args:
        pages: a batch with the columns `payload` and `charset` of `readers.page.PAGE_SCHEMA`.
        config: what to leave out, and the limits. A page deeper than `max_depth` is extracted without looking
            for its main content, which would take time in the square of the depth.
    """
    charsets = pages.column("charset").to_pylist()
    payloads = pages.column("payload")
    texts = [_text(payloads[row].as_py(), charset, config) for row, charset in enumerate(charsets)]
    return pa.array(texts, pa.large_string())


def _text(payload: bytes, charset: str, config: ExtractConfig) -> str | None:
    if len(payload) > config.max_page_bytes:
        return None
    html = payload.decode(charset, "replace").replace("\0", "")
    main_content = config.main_content and nesting_depth(html.encode("utf-8", "replace")) <= config.max_depth
    text = extract_plain_text(html, main_content=main_content, alt_texts=False, comments=False)
    return clean(text) or None


def clean(text: str) -> str:
    """The text as the rest of the pipeline wants it: valid, normalised, without stray space."""
    text = text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate becomes a question mark
    text = text.replace("\r\n", "\n").replace("\r", "\n").translate(_NOISE)
    text = _BLANK_LINES.sub("\n\n", _SPACE_AT_END.sub("", text)).strip()
    return text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)


def nesting_depth(html: bytes) -> int:
    """An upper estimate of how deep the elements of a page are nested, without parsing it."""
    if _opened(html) <= 64:
        return 64
    depth = deepest = 0
    for slash, name in _TAG.findall(html):
        if name.lower() in _FLAT:
            continue
        depth += -1 if slash else 1
        deepest = max(deepest, depth)
        depth = max(depth, 0)
    return deepest


def _opened(html: bytes) -> int:
    """The most tags that are open at a time when every tag counts, which is never fewer than there are."""
    data = np.frombuffer(html + b" ", np.uint8)
    tags = np.flatnonzero(data[:-1] == ord("<"))
    if len(tags) == 0:
        return 0
    following = data[tags + 1]
    steps = np.where(following == ord("/"), -1, (following >= ord("A")).astype(np.int64))
    depth = np.cumsum(steps)
    return int((depth - np.minimum.accumulate(np.minimum(depth, 0))).max())
