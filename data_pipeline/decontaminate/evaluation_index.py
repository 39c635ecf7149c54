"""Search documents for evaluation items by exact n-grams and, if configured, by fuzzy matches.

Reads the files that `write_ngram_index` writes. Numbers of exact n-grams come first, those of parts
that are found by fuzzy matches follow.
"""

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmsys.data_pipeline.decontaminate.fuzzy_index import FuzzyIndex
from llmsys.data_pipeline.decontaminate.ngram_index import NgramIndex
from llmsys.data_pipeline.text.ragged_arrays import Integers
from llmsys.data_pipeline.text.word_hashes import HashedWords


class ItemMatches(NamedTuple):
    """Matches in words, each array (M,): the first word, the number of words, the number of what
    matches, and the share of the item's words; 0 for an exact n-gram.
    """

    first: Integers
    length: Integers
    number: Integers
    share: np.ndarray[tuple[int], np.dtype[np.float64]]


class EvaluationIndex:
    """Everything by which evaluation items are found."""

    def __init__(self, grams: Path, fuzzy: Path | None) -> None:
        """Load the files.

        Args:
            grams: File of n-grams.
            fuzzy: File of short n-grams for fuzzy matches; None without them.
        """
        self.ngrams = NgramIndex(grams)
        self._fuzzy = FuzzyIndex(fuzzy) if fuzzy else None

    def find_ngrams(self, words: HashedWords) -> ItemMatches:
        """Find exact n-grams.

        Args:
            words: Hashed words of some texts.

        Returns:
            The matches by position, longer n-grams first.
        """
        first, number = self.ngrams.find_matches(words)
        return ItemMatches(first, self.get_words(number), number, np.zeros(len(first)))

    def find_passages(self, words: HashedWords) -> ItemMatches | None:
        """Find passages that contain most words of an item.

        Args:
            words: Hashed words of some texts.

        Returns:
            The matches; None without fuzzy matches.
        """
        if self._fuzzy is None:
            return None
        found = self._fuzzy.find_passages(words)
        number = len(self.ngrams.words) + found.part
        return ItemMatches(found.first, found.last - found.first, number, found.share)

    def get_words(self, numbers: Integers) -> Integers:
        """Return the number of words of n-grams and of parts of items."""
        words = [self.ngrams.words.astype(np.int64)]
        if self._fuzzy is not None:
            words.append(self._fuzzy.words)
        chosen: Integers = np.concatenate(words)[numbers]
        return chosen

    def get_items(self, numbers: Integers) -> tuple[Integers, Integers, Integers]:
        """Return the items of matches as three arrays: index into `numbers`, item, index into
        `PARTS`.
        """
        is_exact = numbers < len(self.ngrams.words)
        exact = np.flatnonzero(is_exact)
        which, items, parts = self.ngrams.get_items(numbers[exact])
        if self._fuzzy is None:
            return which, items, parts
        others = np.flatnonzero(~is_exact)
        found = self._fuzzy.get_items(numbers[others] - len(self.ngrams.words))
        which = np.concatenate([exact[which], others[found[0]]])
        order = np.argsort(which, kind="stable")
        return (
            which[order],
            np.concatenate([items, found[1]])[order],
            np.concatenate([parts, found[2]])[order],
        )


@lru_cache(maxsize=1)
def load_evaluation_index(grams: Path, fuzzy: Path | None, digest: str) -> EvaluationIndex:
    """Load the index, once per process.

    Args:
        grams: File of n-grams.
        fuzzy: File of short n-grams for fuzzy matches; None without them.
        digest: Digest of both, so that changed files are loaded again.

    Returns:
        The index.
    """
    return EvaluationIndex(grams, fuzzy)
