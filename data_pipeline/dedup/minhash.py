"""MinHash signatures and bucket keys of texts (Broder 1997; FineWeb's 14 buckets of 8 hashes).

Reads texts, gives one 64-bit key per document and bucket; equal keys link two documents. With `hash: sha1` the
signatures have datatrove's bits; the default combines the hashes of words, for all documents of a batch at once.
"""

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline.dedup.permute import Keys, HashPermutations
from data_pipeline.dedup.words import SimplifiedWords, SimplifiedWordSplitter
from llmsys.config.deduplicate import MinHashDedupConfig

Mask = np.ndarray[Any, np.dtype[np.bool_]]

# D documents, W words of all of them, S shingles of one document, K = buckets * hashes_per_bucket permutations
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd
_HALF = np.uint64(32)
_TEXTS_AT_ONCE = 4096  # bounds the tables of short texts: 4096 x 112 numbers take 3.7 MB


class MinHasher:
    """Turns texts into signatures; holds the permutations of one configuration, and spaCy's answers about odd parts."""

    def __init__(self, config: MinHashDedupConfig) -> None:
        self.config = config
        self.splitter = SimplifiedWordSplitter(spelling=config.hash == "sha1")
        self.permutations = HashPermutations.from_seed(config.buckets * config.hashes_per_bucket, config.seed)

    def compute_signatures(self, texts: Sequence[str] | pa.Array) -> tuple[Keys, Mask]:
        """Return the (D, K) minima over the shingles of each text, and a (D,) mask of the texts that have a shingle."""
        words = self.splitter.split_words(texts)
        shingle = _hash_sha1_shingles if self.config.hash == "sha1" else _hash_combined_shingles
        shingles = shingle(words, self.config.ngram_words)
        return self.permutations.compute_minima(shingles), np.array(list(map(len, shingles)), np.int64) > 0

    def compute_bucket_keys(self, texts: Sequence[str] | pa.Array) -> tuple[Keys, Mask]:
        """Return (D, buckets) keys and a (D,) mask of the texts that have them."""
        keys = [np.zeros((0, self.config.buckets), np.uint64)]
        present = [np.zeros(0, np.bool_)]
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            table_DK, present_D = self.compute_signatures(texts[start : start + _TEXTS_AT_ONCE])
            table = table_DK.reshape(len(table_DK), self.config.buckets, self.config.hashes_per_bucket)
            keys.append(combine_hashes(np.moveaxis(table, 2, 0)))
            present.append(present_D)
        return np.concatenate(keys), np.concatenate(present)


def combine_hashes(parts: Keys | Sequence[Keys]) -> Keys:
    """Combine equally shaped 64-bit hashes, in order, into one of the same shape."""
    combined = np.zeros_like(parts[0])
    for part in parts:
        combined = (combined ^ (combined >> _HALF)) * _MULTIPLIER + part
    combined ^= combined >> _HALF
    combined *= _MULTIPLIER
    return combined ^ (combined >> _HALF)


def _hash_combined_shingles(words: SimplifiedWords, n: int) -> list[Keys]:
    """Return per document the distinct hashes of all runs of n words, each combined from the hashes of its words."""
    hashes_W = words.hashes_W
    last = max(0, len(hashes_W) - n + 1)
    runs = combine_hashes([hashes_W[start : start + last] for start in range(n)])
    # A document of w words begins w - n + 1 runs; the runs that would reach into its neighbour are never taken.
    begins, ends = words.offsets[:-1].tolist(), (words.offsets[1:] - n + 1).tolist()
    return [_sort_distinct(runs[begin : max(begin, end)]) for begin, end in zip(begins, ends, strict=True)]


def _sort_distinct(values: Keys) -> Keys:
    """Return the distinct values in order."""
    ordered = np.sort(values)
    fresh = np.empty(len(ordered), np.bool_)
    fresh[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=fresh[1:])
    return ordered[fresh]


def _hash_sha1_shingles(words: SimplifiedWords, n: int) -> list[Keys]:
    """Return per document the first 8 bytes, little-endian, of the SHA-1 of its runs of n words joined by spaces."""
    spelled, edges = words.spellings, np.concatenate([[0], words.ends_W])
    shingles = []
    for begin, end in pairwise(words.offsets.tolist()):
        starts, stops = edges[begin : max(begin, end - n + 1)].tolist(), (edges[begin + n : end + 1] - 1).tolist()
        runs = {spelled[start:stop] for start, stop in zip(starts, stops, strict=True)}
        digests = b"".join([hashlib.sha1(run).digest()[:8] for run in runs])
        shingles.append(np.frombuffer(digests, "<u8").astype(np.uint64))
    return shingles
