"""Count repeated n-grams by the compiled core, as `datatrove_repetition` does in numpy.

Invariants:
- Numbers are those of the Python functions, but for the characters of a document without any
  n-gram, whose count is 0.
"""

import numpy as np

from llmsys.data_pipeline.core.native import NativeCore
from llmsys.data_pipeline.text.compiled_words import Counts, get_address
from llmsys.data_pipeline.text.word_columns import WordColumns

TOP = (2, 3, 4)  # n of the most frequent n-grams
REPEATED = (5, 6, 7, 8, 9, 10)  # n of repeated ones


def count_top_ngrams(core: NativeCore, words: WordColumns) -> tuple[Counts, Counts]:
    """Count the most frequent n-grams of each document, for each n of `TOP`.

    Args:
        core: The compiled core.
        words: Words of D documents.

    Returns:
        Occurrences of the most frequent n-gram, the first of several, and its characters without
        spaces; both int64 of shape (3, D).
    """
    counts = np.zeros((len(TOP), len(words.counts)), np.int64)
    characters = np.zeros_like(counts)
    done = core.functions.llmsys_count_top_ngrams(
        get_address(words.ids_W),
        get_address(words.offsets),
        len(words.counts),
        get_address(words.vocabulary.lengths),
        get_address(counts),
        get_address(characters),
    )
    _check_memory(done)
    return counts, characters


def count_repeated_ngrams(core: NativeCore, words: WordColumns) -> Counts:
    """Count the characters in repeated n-grams of each document, for each n of `REPEATED`.

    Args:
        core: The compiled core.
        words: Words of D documents.

    Returns:
        int64 of shape (6, D).
    """
    characters = np.zeros((len(REPEATED), len(words.counts)), np.int64)
    vocabulary = words.vocabulary
    done = core.functions.llmsys_count_repeated_ngrams(
        get_address(words.ids_W),
        get_address(words.offsets),
        len(words.counts),
        get_address(vocabulary.lengths),
        get_address(vocabulary.powers),
        get_address(vocabulary.hashes),
        get_address(characters),
    )
    _check_memory(done)
    return characters


def _check_memory(done: int) -> None:
    if done < 0:
        raise MemoryError("n-grams need more memory than there is")
