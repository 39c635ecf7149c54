"""Rolling hashes of spans of characters: of arbitrary spans, or of all windows of one length.

The 64-bit hash of c1…cn is the sum of (code point + 1) · base^(n-i) modulo 2^64 (Karp and Rabin 1987).
"""

from functools import lru_cache
from typing import Any

import numpy as np

from data_pipeline.text.simplify_text import Codes
from data_pipeline.text.vocabulary import HASH_BASE

Hashes = np.ndarray[Any, np.dtype[np.uint64]]

INVERSE_BASE = np.uint64(pow(int(HASH_BASE), -1, 1 << 64))


class RollingHasher:
    """Hashes spans in constant time each, from prefix sums of (c + 1) · base^-i."""

    def __init__(self, codes: Codes) -> None:
        count = len(codes)
        self._sums = np.zeros(count + 1, np.uint64)
        terms = codes + np.uint64(1)
        terms *= _get_powers(int(INVERSE_BASE), count)
        np.cumsum(terms, out=self._sums[1:])
        self._powers = _get_powers(int(HASH_BASE), count)

    def hash_spans(self, starts: Any, ends: Any) -> Hashes:
        """Return the hashes of the spans [start, end). None may be empty."""
        hashes: Hashes = (self._sums[ends] - self._sums[starts]) * self._powers[ends - 1]
        return hashes

    def hash_windows(self, length: int) -> Hashes:
        """Return the hash of every window of `length` characters, by its start. `length` is at least 1."""
        hashes: Hashes = (self._sums[length:] - self._sums[:-length]) * self._powers[length - 1 :]
        return hashes


def _get_powers(base: int, count: int) -> Hashes:
    """Return base^0, base^1, … modulo 2^64."""
    # Sizes in powers of two: few tables serve all texts.
    return _compute_powers(base, max(1 << 17, 1 << count.bit_length()))[:count]


@lru_cache(maxsize=4)
def _compute_powers(base: int, count: int) -> Hashes:
    powers = np.full(count, base, np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)
