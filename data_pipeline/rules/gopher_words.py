"""What the dialects of Gopher's quality rule ask of words beyond their counts."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from data_pipeline.rules.verdict import Floats
from data_pipeline.rules.word_columns import WordColumns

Mask = npt.NDArray[np.bool_]

# fastText reads words between these; other white space of Unicode is part of a word to it.
_ASCII_SPACES = str.maketrans(dict.fromkeys("\n\r\t\v\f\0", " "))


def count_ascii_words(text: str) -> int:
    """How many words fastText's tokenizer finds that begin with a letter or a digit."""
    return sum(word[:1].isalnum() for word in text.translate(_ASCII_SPACES).split(" "))


def compute_median_word_lengths(words: WordColumns) -> Floats:
    """Median word length per document, 0 without words."""
    order = np.lexsort((words.word_lengths, words.document_of_word))
    lengths = np.append(words.word_lengths[order], 0)
    middle = words.offsets[:-1] + np.maximum(words.counts - 1, 0) // 2
    upper = words.offsets[:-1] + words.counts // 2
    found: Floats = (lengths[middle] + lengths[upper]) / 2
    return np.where(words.counts > 0, found, 0.0)


def mask_words_containing(words: WordColumns, parts: tuple[str, ...]) -> Mask:
    """Which words hold one of the parts."""
    return _mask_words(words, lambda word: any(part in word for part in parts))


def mask_words_in(words: WordColumns, wanted: tuple[str, ...], *, ignore_case: bool = False) -> Mask:
    """Which words are among the wanted ones."""
    among = frozenset(wanted)
    return _mask_words(words, lambda word: (word.lower() if ignore_case else word) in among)


def count_distinct_words(words: WordColumns, wanted: tuple[str, ...]) -> Floats:
    """How many of the wanted words occur in each document."""
    numbers = np.zeros(len(words.vocabulary), np.int64)
    for number, word in enumerate(wanted, start=1):
        if word in words.vocabulary.index:
            numbers[words.vocabulary.index[word]] = number
    found_W = numbers[words.ids_W]
    hits = np.flatnonzero(found_W)
    pairs = np.unique(words.document_of_word[hits].astype(np.int64) * (len(wanted) + 1) + found_W[hits])
    return np.bincount(pairs // (len(wanted) + 1), minlength=len(words.counts)).astype(np.float64)


def _mask_words(words: WordColumns, choose: Callable[[str], bool]) -> Mask:
    """Which words are chosen, asking each distinct one once."""
    used = np.bincount(words.ids_W, minlength=len(words.vocabulary)) > 0
    names = words.vocabulary.words
    chosen = np.zeros(len(used), np.bool_)
    chosen[[number for number in np.flatnonzero(used).tolist() if choose(names[number])]] = True
    return chosen[words.ids_W]
