"""Extract plain text with resiliparse, of the main content or of everything.

A page nested deeper than the config allows, or with many deep elements, is extracted without searching for its main
content, which takes time quadratic in the depth.
"""

import re
from collections.abc import Callable

import numpy as np
from resiliparse.extract.html2text import extract_plain_text

from llmsys.config.extraction import ResiliparseExtractorConfig

_STEPS = 20_000_000  # tags times depth, above which the search for the main content takes many seconds
_TAG = re.compile(rb"<(/?)([a-zA-Z][a-zA-Z0-9]*)")
# Elements that never nest in themselves: void ones, and those that the next of their kind closes.
_FLAT = frozenset(
    b"area base br col embed hr img input link meta source track wbr p li dt dd tr td th option thead tbody "
    b"tfoot colgroup optgroup rp rt html head body".split()
)


def build_resiliparse_extractor(config: ResiliparseExtractorConfig) -> Callable[[bytes], str]:
    """Build the extractor with these settings."""

    def extract_text(html: bytes) -> str:
        depth = estimate_nesting_depth(html) if config.main_content else 0
        main_content = config.main_content and depth <= config.max_depth and depth * html.count(b"<") <= _STEPS
        return extract_plain_text(html.decode(), main_content=main_content, alt_texts=False, comments=False)

    return extract_text


def estimate_nesting_depth(html: bytes) -> int:
    """Estimate the nesting depth of a page without parsing it; at least 64."""
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
    steps = np.where(following == ord("/"), -1, (following >= ord("A")).astype(np.int64))
    depth = np.cumsum(steps)
    return int((depth - np.minimum.accumulate(np.minimum(depth, 0))).max())
