"""Texts in, hashed features out: words, runs of words, and runs of characters within a word.

Words are simplified (lower case, numbers as 0, no punctuation, no accents); in scripts without spaces each character is
one. Runs of characters are those of `<word>`, marks included (Bojanowski et al. 2017). A feature is a number below
2^bits, where different ones may meet.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from data_pipeline.decontaminate.words import Hashes, SimpleWords, ngram_hashes
from data_pipeline.dedup.simplify import simplify
from data_pipeline.rules.growing import GrowingArray
from data_pipeline.rules.ragged import Integers, places_of


class FeatureConfig(NamedTuple):
    """What features a model has; written into its file.

    Attributes:
        bits: features are numbers below 2^bits.
        word_ngrams: longest run of words.
        char_ngrams: shortest and longest run of characters; (0, 0): none.
    """

    bits: int = 18
    word_ngrams: int = 2
    char_ngrams: tuple[int, int] = (0, 0)


class Features(NamedTuple):
    """The features of D documents: F numbers, and the document of each; in no order that means anything."""

    numbers: Integers
    documents: Integers


class HashedFeatures:
    """Finds features. Keep one per process: it remembers the runs of characters of the words it has seen."""

    def __init__(self, config: FeatureConfig) -> None:
        self._config = config
        self._words = SimpleWords(ignores_disguise=False)  # models were trained on these words
        self._characters = _CharacterRuns(config.char_ngrams) if any(config.char_ngrams) else None

    def find(self, texts: Sequence[str]) -> Features:
        """The features of each text."""
        words = self._words.split(texts)
        document = np.repeat(np.arange(len(texts)), np.diff(words.offsets))
        ends = words.offsets[1:][document]
        numbers, documents = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
        for n, hashes in ngram_hashes(words.hashes, self._config.word_ngrams):
            inside = np.arange(len(hashes)) + n <= ends[: len(hashes)]
            numbers.append(hashes[inside])
            documents.append(document[: len(hashes)][inside])
        if self._characters:
            hashes, owners = self._characters.find(texts)
            numbers.append(hashes)
            documents.append(owners)
        shift = np.uint64(64 - self._config.bits)
        return Features((np.concatenate(numbers) >> shift).view(np.int64), np.concatenate(documents))


class _CharacterRuns:
    """Hashes of the character runs of words, by chunk; bounded like the memory of words."""

    def __init__(self, lengths: tuple[int, int], memo_chunks: int = 200_000, memo_runs: int = 8_000_000) -> None:
        self._lengths, self._limits = lengths, (memo_chunks, memo_runs)
        self._forget()

    def find(self, texts: Sequence[str]) -> tuple[Hashes, Integers]:
        """The hashes of all runs, and the document of each."""
        if len(self._memo) > self._limits[0] or len(self._runs) > self._limits[1]:
            self._forget()
        chunks = [text.split() for text in texts]
        ids = np.array([self._id(chunk) for one in chunks for chunk in one], np.int64)
        counts = self._counts.view[ids]
        runs = self._runs.view[places_of(self._starts.view[ids], counts)]
        document = np.repeat(np.arange(len(texts)), [len(one) for one in chunks])
        return runs, np.repeat(document, counts)

    def _id(self, chunk: str) -> int:
        found = self._memo.get(chunk)
        if found is None:
            found = self._memo[chunk] = len(self._memo)
            hashes = [xxhash.xxh3_64_intdigest(run.encode("utf-8", "surrogatepass")) for run in self._all(chunk)]
            self._starts.extend([len(self._runs)])
            self._counts.extend([len(hashes)])
            self._runs.extend(np.array(hashes, np.uint64))
        return found

    def _all(self, chunk: str) -> Iterator[str]:
        shortest, longest = self._lengths
        for word in simplify(chunk).split():
            marked = f"<{word}>"
            for n in range(shortest, longest + 1):
                yield from (marked[start : start + n] for start in range(len(marked) - n + 1))

    def _forget(self) -> None:
        self._memo: dict[str, int] = {}
        self._starts, self._counts = GrowingArray(np.int64), GrowingArray(np.int64)
        self._runs = GrowingArray(np.uint64)
