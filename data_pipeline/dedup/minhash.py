"""MinHash signatures and the pairs of documents that share a bucket (Broder 1997; FineWeb's 14 buckets of 8 hashes).

Reads texts, gives one 64-bit key per document and bucket; equal keys link two documents. With `hash: sha1` the
signatures have datatrove's bits; the default combines the hashes of words that the vocabulary already knows, for all
documents of a batch at once.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from data_pipeline.dedup.exact import Indices
from data_pipeline.dedup.simplify import simplify
from data_pipeline.rules.words import WordColumns, WordSplitter
from llmsys.config.data import MinhashDuplicates

# D documents, W words of all of them, S shingles of one document, K = buckets * hashes_per_bucket permutations
Keys = np.ndarray[Any, np.dtype[np.uint64]]

PRIME = np.uint64((1 << 61) - 1)
LARGEST = np.uint64(0xFFFFFFFFFFFFFFFF)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd
_HALF = np.uint64(32)
SHINGLES_AT_ONCE = 512  # bounds the (S, K) work table at half a megabyte


class Signer:
    """Turns texts into signatures; holds the permutations of one configuration and the words seen so far."""

    def __init__(self, config: MinhashDuplicates, splitter: WordSplitter) -> None:
        """Draw the permutations (a * x + b) mod (2^61 - 1), a before b, from numpy's legacy generator as datatrove."""
        self.config = config
        self.splitter = splitter
        count = config.buckets * config.hashes_per_bucket
        generator = np.random.RandomState(config.seed)
        self.a_K = generator.randint(1, PRIME, dtype=np.uint64, size=count)
        self.b_K = generator.randint(0, PRIME, dtype=np.uint64, size=count)

    def signatures(self, texts: Sequence[str]) -> list[Keys | None]:
        """Return the (K,) minima over the shingles of each text; None where there are fewer words than one shingle."""
        words = self.splitter.split([simplify(text) for text in texts])
        shingle = _sha1_shingles if self.config.hash == "sha1" else _combined_shingles
        shingles = shingle(words, self.config.ngram_words)
        return [self._minima(shingles_S) if len(shingles_S) else None for shingles_S in shingles]

    def _minima(self, shingles_S: Keys) -> Keys:
        minima_K = np.full(len(self.a_K), LARGEST, np.uint64)
        for start in range(0, len(shingles_S), SHINGLES_AT_ONCE):
            block_SK = shingles_S[start : start + SHINGLES_AT_ONCE, None] * self.a_K + self.b_K
            np.minimum(minima_K, _modulo_prime(block_SK).min(axis=0), out=minima_K)
        return minima_K

    def bucket_keys(self, texts: Sequence[str]) -> tuple[Keys, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Return (D, buckets) keys and a (D,) mask of the documents that have them."""
        signatures = self.signatures(texts)
        present_D = np.array([signature is not None for signature in signatures], np.bool_)
        empty_K = np.zeros(len(self.a_K), np.uint64)
        table_DK = np.array([empty_K if row is None else row for row in signatures], np.uint64)
        table = table_DK.reshape(len(signatures), self.config.buckets, self.config.hashes_per_bucket)
        return combine(np.moveaxis(table, 2, 0)), present_D


def _modulo_prime(x: Keys) -> Keys:
    """Return x mod (2^61 - 1) exactly, without dividing: 2^61 is 1 modulo the prime."""
    folded = (x & PRIME) + (x >> np.uint64(61))
    reduced: Keys = np.minimum(folded, folded - PRIME)  # the difference wraps to a huge number when folded < PRIME
    return reduced


def combine(parts: Keys | Sequence[Keys]) -> Keys:
    """Combine equally shaped 64-bit hashes, in order, into one of the same shape."""
    combined = np.zeros_like(parts[0])
    for part in parts:
        combined = (combined ^ (combined >> _HALF)) * _MULTIPLIER + part
    combined ^= combined >> _HALF
    combined *= _MULTIPLIER
    return combined ^ (combined >> _HALF)


def _combined_shingles(words: WordColumns, n: int) -> list[Keys]:
    """Return per document the distinct hashes of all runs of n words, each combined from the hashes of its words."""
    hashes_W = words.vocabulary.hashes[words.ids_W]
    last = max(0, len(hashes_W) - n + 1)
    runs = combine([hashes_W[start : start + last] for start in range(n)])
    # A document of w words begins w - n + 1 runs; the runs that would reach into its neighbour are never taken.
    begins, ends = words.offsets[:-1], words.offsets[1:] - n + 1
    return [np.unique(runs[begin : max(begin, end)]) for begin, end in zip(begins, ends, strict=True)]


def _sha1_shingles(words: WordColumns, n: int) -> list[Keys]:
    """Return per document the first 8 bytes, little-endian, of the SHA-1 of its runs of n words joined by spaces."""
    spelling = list(words.vocabulary.index)
    shingles = []
    for begin, end in zip(words.offsets[:-1], words.offsets[1:], strict=True):
        spelled = [spelling[word] for word in words.ids_W[begin:end].tolist()]
        runs = {" ".join(run) for run in zip(*(spelled[start:] for start in range(n)), strict=False)}
        digests = b"".join(hashlib.sha1(run.encode()).digest()[:8] for run in runs)
        shingles.append(np.frombuffer(digests, "<u8").astype(np.uint64))
    return shingles


def same_bucket(keys: Keys, documents: Indices) -> Indices:
    """Return pairs (P, 2) of the given documents whose keys (D,) in one bucket are equal; neighbours of a sort."""
    order = np.argsort(keys, kind="stable")
    in_order = keys[order]
    equal = in_order[1:] == in_order[:-1]
    return np.stack([documents[order[:-1][equal]], documents[order[1:][equal]]], axis=1)
