"""Hash texts into features: words, runs of words, and runs of characters within a word.

Words are simplified (lower case, numbers as 0, no punctuation, no accents); in scripts without
spaces each character is one. Runs of characters are those of `<word>`, marks included (Bojanowski
et al. 2017). A feature is a number below 2^bits; different ones may collide.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from llmsys.data_pipeline.text.ragged_arrays import GrowableArray, Integers, compute_positions
from llmsys.data_pipeline.text.simplify_text import simplify_text
from llmsys.data_pipeline.text.word_hashes import Hashes, WordHasher, iter_ngram_hashes


class FeatureConfig(NamedTuple):
    """The features of a model; written into its file.

    Attributes:
        bits: features are numbers below 2^bits.
        word_ngrams: longest run of words.
        char_ngrams: shortest and longest run of characters; (0, 0) for none.
    """

    bits: int = 18
    word_ngrams: int = 2
    char_ngrams: tuple[int, int] = (0, 0)


class HashedFeatureBatch(NamedTuple):
    """The features of D documents: F numbers and the document of each, in no particular order."""

    numbers: Integers
    documents: Integers


class FeatureHasher:
    """Extractor of features. Keep one per process: it caches the character runs of words."""

    def __init__(self, config: FeatureConfig) -> None:
        self._config = config
        self._words = WordHasher(ignores_disguise=False)  # models were trained on these words
        self._characters = (
            _CharacterNgramHasher(config.char_ngrams) if any(config.char_ngrams) else None
        )

    def extract_features(self, texts: Sequence[str]) -> HashedFeatureBatch:
        """Return the features of each text."""
        words = self._words.hash_words(texts)
        document = np.repeat(np.arange(len(texts)), np.diff(words.offsets))
        ends = words.offsets[1:][document]
        numbers = [np.zeros(0, np.uint64)]
        documents = [np.zeros(0, np.int64)]
        for n, hashes in iter_ngram_hashes(words.hashes, self._config.word_ngrams):
            # No n-gram goes over the end of its document.
            inside = np.arange(len(hashes)) + n <= ends[: len(hashes)]
            numbers.append(hashes[inside])
            documents.append(document[: len(hashes)][inside])
        if self._characters:
            hashes, owners = self._characters.hash_character_ngrams(texts)
            numbers.append(hashes)
            documents.append(owners)
        shift = np.uint64(64 - self._config.bits)
        return HashedFeatureBatch(
            (np.concatenate(numbers) >> shift).view(np.int64), np.concatenate(documents)
        )


class _CharacterNgramHasher:
    """Hashes of the character runs of words, cached per chunk up to a bound."""

    def __init__(
        self, lengths: tuple[int, int], memo_chunks: int = 200_000, memo_runs: int = 8_000_000
    ) -> None:
        self._lengths = lengths
        self._limits = (memo_chunks, memo_runs)
        self._reset_cache()

    def hash_character_ngrams(self, texts: Sequence[str]) -> tuple[Hashes, Integers]:
        """Return the hashes of all runs, and the document of each."""
        if len(self._memo) > self._limits[0] or len(self._runs) > self._limits[1]:
            self._reset_cache()
        chunks = [text.split() for text in texts]
        ids = np.array([self._look_up_chunk(chunk) for own in chunks for chunk in own], np.int64)
        counts = self._counts.view[ids]
        runs = self._runs.view[compute_positions(self._starts.view[ids], counts)]
        document = np.repeat(np.arange(len(texts)), [len(own) for own in chunks])
        return runs, np.repeat(document, counts)

    def _look_up_chunk(self, chunk: str) -> int:
        found = self._memo.get(chunk)
        if found is None:
            found = self._memo[chunk] = len(self._memo)
            hashes = [
                xxhash.xxh3_64_intdigest(run.encode("utf-8", "surrogatepass"))
                for run in self._iter_ngrams(chunk)
            ]
            self._starts.extend([len(self._runs)])
            self._counts.extend([len(hashes)])
            self._runs.extend(np.array(hashes, np.uint64))
        return found

    def _iter_ngrams(self, chunk: str) -> Iterator[str]:
        shortest, longest = self._lengths
        for word in simplify_text(chunk).split():
            marked = f"<{word}>"
            for n in range(shortest, longest + 1):
                yield from (marked[start : start + n] for start in range(len(marked) - n + 1))

    def _reset_cache(self) -> None:
        self._memo: dict[str, int] = {}
        self._starts = GrowableArray(np.int64)
        self._counts = GrowableArray(np.int64)
        self._runs = GrowableArray(np.uint64)
