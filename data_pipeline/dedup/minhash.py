"""MinHash signatures and bucket keys of texts (Broder 1997; FineWeb's 14 buckets of 8 hashes).

One 64-bit key per document and bucket; equal keys link two documents. With `hash: sha1` the
signatures are datatrove's, bit for bit. The default combines word hashes, for all documents of a
batch at once.

The minimum of a permutation is the smallest (h a + b mod 2^64) mod (2^61 - 1) over the shingles h
of a document, as datatrove defines it: the wrap at 2^64 is part of the definition. The fast path
writes x = h a + b mod 2^64 as q 2^61 + r. The value is r + q, less the prime if it is that large.
So the minimum is at the smallest r, unless a second r is within 7 of it or an r is within 8 of
2^61. Because 8 x mod 2^64 is 8 r, one multiplication, one addition and one search find it for a
block of shingles that fits the cache. The two rare cases are detected and computed by the formula.
"""

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from llmsys.config.deduplication import MinHashDedupConfig
from llmsys.data_pipeline.dedup.simplified_words import SimplifiedWords, SimplifiedWordSplitter

# S shingles, K permutations
Keys = np.ndarray[Any, np.dtype[np.uint64]]

PRIME = np.uint64((1 << 61) - 1)
LARGEST = np.uint64(0xFFFFFFFFFFFFFFFF)
_EIGHT = np.uint64(8)
_FOLD = np.uint64(61)
_NEAR = np.uint64(64)  # eight times 8
SHINGLES_AT_ONCE = 1024  # a table of 1024 x 112 numbers takes 900 kB


def reduce_mod_mersenne61(x: Keys) -> Keys:
    """Compute x mod (2^61 - 1) exactly and without division: 2^61 is 1 modulo the prime.

    Args:
        x: uint64 of any shape.

    Returns:
        The remainders, in the same shape.
    """
    folded = (x & PRIME) + (x >> _FOLD)
    # the difference wraps to a huge number when folded < PRIME
    reduced: Keys = np.minimum(folded, folded - PRIME)
    return reduced


class HashPermutations:
    """The hash permutations of one configuration, and their work buffer."""

    def __init__(self, a_K: Keys, b_K: Keys) -> None:
        """Take (K,) uint64 multipliers and addends."""
        self.a_K = a_K
        self.b_K = b_K
        self._a_K1 = (a_K * _EIGHT)[:, None]
        # shifted: an r within 8 of 2^61 becomes the smallest
        self._b_K1 = (b_K * _EIGHT + _NEAR)[:, None]
        self._rows = np.arange(len(a_K))
        self._buffer = np.empty(len(a_K) * SHINGLES_AT_ONCE, np.uint64)

    @classmethod
    def from_seed(cls, count: int, seed: int) -> "HashPermutations":
        """Draw a in [1, p), then b in [0, p), from numpy's legacy generator, as datatrove does."""
        generator = np.random.RandomState(seed)
        a_K = generator.randint(1, PRIME, dtype=np.uint64, size=count)
        return cls(a_K, generator.randint(0, PRIME, dtype=np.uint64, size=count))

    def compute_minima(self, shingles: Sequence[Keys]) -> Keys:
        """Return the (D, K) minima over the distinct shingles of each document; all ones where
        there is none.
        """
        blocks = [
            (number, shingles_S[start : start + SHINGLES_AT_ONCE])
            for number, shingles_S in enumerate(shingles)
            for start in range(0, len(shingles_S), SHINGLES_AT_ONCE)
        ]
        first_BK, second_BK, chosen_BK = np.empty((3, len(blocks), len(self.a_K)), np.uint64)
        with np.errstate():  # restores the buffer size
            # with a larger buffer numpy copies broadcast rows: three times as slow
            np.setbufsize(16)
            for row, (_, shingles_S) in enumerate(blocks):
                self._find_two_smallest(shingles_S, first_BK[row], second_BK[row], chosen_BK[row])
        minima_BK = reduce_mod_mersenne61(chosen_BK * self.a_K + self.b_K)
        for row, rare in np.argwhere((first_BK < _NEAR) | (second_BK - first_BK < _NEAR)).tolist():
            minima_BK[row, rare] = reduce_mod_mersenne61(
                blocks[row][1] * self.a_K[rare] + self.b_K[rare]
            ).min()
        minima_DK = np.full((len(shingles), len(self.a_K)), LARGEST, np.uint64)
        # The blocks of a long document share a row.
        np.minimum.at(minima_DK, [number for number, _ in blocks], minima_BK)
        return minima_DK

    def _find_two_smallest(
        self, shingles_S: Keys, first_K: Keys, second_K: Keys, chosen_K: Keys
    ) -> None:
        """Find the two smallest r, times eight and shifted, and the shingle of the first."""
        table_KS = self._buffer[: len(self._rows) * len(shingles_S)].reshape(
            len(self._rows), len(shingles_S)
        )
        np.multiply(self._a_K1, shingles_S, out=table_KS)
        np.add(table_KS, self._b_K1, out=table_KS)
        index_K = table_KS.argmin(axis=1)
        chosen_K[:] = shingles_S[index_K]
        first_K[:] = table_KS[self._rows, index_K]
        table_KS[self._rows, index_K] = LARGEST
        second_K[:] = table_KS[self._rows, table_KS.argmin(axis=1)]


Mask = np.ndarray[Any, np.dtype[np.bool_]]

# D documents, W words of all of them, S shingles of one document, K = buckets * hashes_per_bucket
# permutations
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd
_HALF = np.uint64(32)
_TEXTS_AT_ONCE = 4096  # bounds the tables of short texts: 4096 x 112 numbers take 3.7 MB


class MinHasher:
    """MinHash of one configuration: its permutations, and spaCy's cached splits."""

    def __init__(self, config: MinHashDedupConfig) -> None:
        """Draw the permutations.

        Args:
            config: `buckets` · `hashes_per_bucket` permutations are drawn from its `seed`.
                Signatures of two hashers compare only if these and `hash` are equal.
        """
        self.config = config
        self.splitter = SimplifiedWordSplitter(spelling=config.hash == "sha1")
        self.permutations = HashPermutations.from_seed(
            config.buckets * config.hashes_per_bucket, config.seed
        )

    def compute_signatures(self, texts: Sequence[str] | pa.Array) -> tuple[Keys, Mask]:
        """Return the (D, K) minima over the shingles of each text, and a (D,) mask of the texts
        that have a shingle.
        """
        words = self.splitter.split_words(texts)
        shingle = _hash_sha1_shingles if self.config.hash == "sha1" else _hash_combined_shingles
        shingles = shingle(words, self.config.ngram_words)
        return self.permutations.compute_minima(shingles), np.array(
            list(map(len, shingles)), np.int64
        ) > 0

    def compute_bucket_keys(self, texts: Sequence[str] | pa.Array) -> tuple[Keys, Mask]:
        """Compute the keys by which near duplicates are found: one per bucket of hashes.

        Args:
            texts: The documents, D.

        Returns:
            uint64 (D, buckets), and a (D,) mask of the texts that have keys: too short ones have
            none.
        """
        keys = [np.zeros((0, self.config.buckets), np.uint64)]
        present = [np.zeros(0, np.bool_)]
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            table_DK, present_D = self.compute_signatures(texts[start : start + _TEXTS_AT_ONCE])
            table = table_DK.reshape(
                len(table_DK), self.config.buckets, self.config.hashes_per_bucket
            )
            keys.append(combine_hashes(np.moveaxis(table, 2, 0)))
            present.append(present_D)
        return np.concatenate(keys), np.concatenate(present)


def combine_hashes(parts: Keys | Sequence[Keys]) -> Keys:
    """Combine hashes into one.

    Args:
        parts: 64-bit hashes of equal shapes; their order counts.

    Returns:
        Hashes of the shape of one part.
    """
    combined = np.zeros_like(parts[0])
    for part in parts:
        combined = (combined ^ (combined >> _HALF)) * _MULTIPLIER + part
    combined ^= combined >> _HALF
    combined *= _MULTIPLIER
    return combined ^ (combined >> _HALF)


def _hash_combined_shingles(words: SimplifiedWords, n: int) -> list[Keys]:
    """Return per document the distinct hashes of all runs of n words, each combined from its
    word hashes.
    """
    hashes_W = words.hashes_W
    last = max(0, len(hashes_W) - n + 1)
    runs = combine_hashes([hashes_W[start : start + last] for start in range(n)])
    # A document of w words has w - n + 1 runs; runs that reach into the next document are dropped.
    begins = words.offsets[:-1].tolist()
    ends = (words.offsets[1:] - n + 1).tolist()
    return [
        _sort_distinct(runs[begin : max(begin, end)])
        for begin, end in zip(begins, ends, strict=True)
    ]


def _sort_distinct(values: Keys) -> Keys:
    """Return the distinct values, sorted."""
    ordered = np.sort(values)
    fresh = np.empty(len(ordered), np.bool_)
    fresh[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=fresh[1:])
    return ordered[fresh]


def _hash_sha1_shingles(words: SimplifiedWords, n: int) -> list[Keys]:
    """Return per document the first 8 bytes, little-endian, of the SHA-1 of its runs of n words
    joined by spaces.
    """
    spelled = words.spellings
    edges = np.concatenate([[0], words.ends_W])
    shingles = []
    for begin, end in pairwise(words.offsets.tolist()):
        starts, stops = (
            edges[begin : max(begin, end - n + 1)].tolist(),
            (edges[begin + n : end + 1] - 1).tolist(),
        )
        runs = {spelled[start:stop] for start, stop in zip(starts, stops, strict=True)}
        digests = b"".join([hashlib.sha1(run).digest()[:8] for run in runs])
        shingles.append(np.frombuffer(digests, "<u8").astype(np.uint64))
    return shingles
