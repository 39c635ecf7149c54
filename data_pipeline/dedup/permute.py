"""The smallest value of each hash permutation over the shingles of a document: (h a + b mod 2^64) mod (2^61 - 1).

Reads 64-bit hashes, gives one minimum per permutation, bit for bit what the formula says (datatrove's, whose wrap at
2^64 is part of the definition). How it saves work: write x = h a + b mod 2^64 = q 2^61 + r. The value is r + q, less
the prime when it is that large. So the smallest value is at the smallest r unless a second r lies within 7 of it or an
r lies within 8 of 2^61; and 8 x mod 2^64 is 8 r, which one multiplication, one addition and one search give for a block
of shingles that fits the cache. The two rare cases are noticed and computed by the formula.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

# S shingles, K permutations
Keys = np.ndarray[Any, np.dtype[np.uint64]]

PRIME = np.uint64((1 << 61) - 1)
LARGEST = np.uint64(0xFFFFFFFFFFFFFFFF)
_EIGHT, _FOLD = np.uint64(8), np.uint64(61)
_NEAR = np.uint64(64)  # eight times 8
SHINGLES_AT_ONCE = 1024  # a table of 1024 x 112 numbers takes 900 kB


def reduce_mod_mersenne61(x: Keys) -> Keys:
    """Return x mod (2^61 - 1) exactly, without dividing: 2^61 is 1 modulo the prime."""
    folded = (x & PRIME) + (x >> _FOLD)
    reduced: Keys = np.minimum(folded, folded - PRIME)  # the difference wraps to a huge number when folded < PRIME
    return reduced


class HashPermutations:
    """The permutations of one configuration, and room to work in."""

    def __init__(self, a_K: Keys, b_K: Keys) -> None:
        """Take multipliers and addends below 2^64."""
        self.a_K, self.b_K = a_K, b_K
        self._a_K1 = (a_K * _EIGHT)[:, None]
        self._b_K1 = (b_K * _EIGHT + _NEAR)[:, None]  # shifted, so that an r within 8 of 2^61 becomes the smallest
        self._rows = np.arange(len(a_K))
        self._room = np.empty(len(a_K) * SHINGLES_AT_ONCE, np.uint64)

    @classmethod
    def from_seed(cls, count: int, seed: int) -> "HashPermutations":
        """Draw a in [1, p), then b in [0, p), from numpy's legacy generator, as datatrove does."""
        generator = np.random.RandomState(seed)
        a_K = generator.randint(1, PRIME, dtype=np.uint64, size=count)
        return cls(a_K, generator.randint(0, PRIME, dtype=np.uint64, size=count))

    def compute_minima(self, shingles: Sequence[Keys]) -> Keys:
        """Return the (D, K) minima over the distinct shingles of each document; all ones where there is no shingle."""
        blocks = [
            (number, shingles_S[start : start + SHINGLES_AT_ONCE])
            for number, shingles_S in enumerate(shingles)
            for start in range(0, len(shingles_S), SHINGLES_AT_ONCE)
        ]
        first_BK, second_BK, chosen_BK = np.empty((3, len(blocks), len(self.a_K)), np.uint64)
        with np.errstate():  # gives the size back
            np.setbufsize(16)  # a larger buffer makes numpy copy what is repeated along rows: three times as slow
            for row, (_, shingles_S) in enumerate(blocks):
                self._find_two_smallest(shingles_S, first_BK[row], second_BK[row], chosen_BK[row])
        minima_BK = reduce_mod_mersenne61(chosen_BK * self.a_K + self.b_K)
        for row, rare in np.argwhere((first_BK < _NEAR) | (second_BK - first_BK < _NEAR)).tolist():
            minima_BK[row, rare] = reduce_mod_mersenne61(blocks[row][1] * self.a_K[rare] + self.b_K[rare]).min()
        minima_DK = np.full((len(shingles), len(self.a_K)), LARGEST, np.uint64)
        np.minimum.at(minima_DK, [number for number, _ in blocks], minima_BK)
        return minima_DK

    def _find_two_smallest(self, shingles_S: Keys, first_K: Keys, second_K: Keys, chosen_K: Keys) -> None:
        """Find the two smallest r, times eight and shifted, and the shingle of the first."""
        table_KS = self._room[: len(self._rows) * len(shingles_S)].reshape(len(self._rows), len(shingles_S))
        np.multiply(self._a_K1, shingles_S, out=table_KS)
        np.add(table_KS, self._b_K1, out=table_KS)
        place_K = table_KS.argmin(axis=1)
        chosen_K[:] = shingles_S[place_K]
        first_K[:] = table_KS[self._rows, place_K]
        table_KS[self._rows, place_K] = LARGEST
        second_K[:] = table_KS[self._rows, table_KS.argmin(axis=1)]
