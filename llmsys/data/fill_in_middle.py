"""Rearrange documents for fill-in-the-middle: prefix, suffix, and then the middle (Bavarian 2022,
arXiv:2207.14255).

Invariants:
- The choice of documents and the cuts are functions of (data fingerprint, seed, document), the same
  in every epoch.
- A rearranged document has its own tokens and three marks. Its end-of-sequence token stays last.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmsys.config.fill_in_middle import FillInMiddleConfig
from llmsys.data.shuffle import derive_order_key, hash_splitmix64

# T positions of a document, N documents

MARKS = 3
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class MiddleTokens(NamedTuple):
    """Ids of the marks."""

    prefix: int
    middle: int
    suffix: int


class MiddleFiller:
    """The rearrangement of one dataset's documents.

    Args:
        config: Shares of documents.
        tokens: The marks.
        key: Fingerprint and seed.
    """

    def __init__(
        self, config: FillInMiddleConfig, tokens: MiddleTokens, key: tuple[str | int, ...]
    ) -> None:
        self.config = config
        self.tokens = tokens
        self._key = np.uint64(derive_order_key("fill in the middle", *key))

    def select_documents(self, documents_N: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the documents that are rearranged, (N,)."""
        chosen: NDArray[np.bool_] = self._draw(documents_N, 0) < self.config.rate
        return chosen

    def order_parts(self, tokens_T: NDArray[np.integer[Any]], document: int) -> NDArray[np.int64]:
        """Return a chosen document in its new order, (T + MARKS,).

        Args:
            tokens_T: Its tokens, the last of which ends it.
            document: Its number.
        """
        body = tokens_T[:-1].astype(np.int64)
        end = tokens_T[-1:].astype(np.int64)
        draws = [float(self._draw(np.array([document]), draw)[0]) for draw in (1, 2, 3)]
        first, second = sorted(int(draw * (len(body) + 1)) for draw in draws[:2])
        prefix, middle, suffix = np.split(body, [first, second])
        pre, mid, suf = ([token] for token in self.tokens)
        if draws[2] < self.config.spm_rate:
            return np.concatenate([pre, suf, suffix, mid, prefix, middle, end])
        return np.concatenate([pre, prefix, suf, suffix, mid, middle, end])

    def _draw(self, documents_N: NDArray[np.int64], draw: int) -> NDArray[np.float64]:
        """Return uniform numbers in [0, 1), a function of document and draw."""
        with np.errstate(over="ignore"):
            counters = (
                documents_N.astype(np.uint64) * np.uint64(4) + np.uint64(draw)
            ) * _GOLDEN + self._key
        bits = hash_splitmix64(hash_splitmix64(counters)) >> np.uint64(11)
        return bits / 2.0**53
