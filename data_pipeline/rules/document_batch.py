"""A batch of documents with what several rules need of them, computed when first asked for and then shared."""

from collections.abc import Sequence
from functools import cached_property
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.text.byte_spans import join_without_whitespace
from data_pipeline.text.word_columns import Integers, WordColumns
from data_pipeline.text.word_splitter import WordSplitter
from data_pipeline.text.word_tokenizers import UnicodeTokenizer, WhitespaceTokenizer


class WordSplitters:
    """Where words come from. Keep one per process: each kind of words that is asked for has a memory of its own.

    Args:
        language: splits the words of `TextBatch.words`; datatrove's English by default.
    """

    def __init__(self, language: WordSplitter | None = None) -> None:
        self.language = language or WordSplitter()

    @cached_property
    def whitespace(self) -> WordSplitter:
        """Words between white space."""
        return WordSplitter(WhitespaceTokenizer())

    @cached_property
    def unicode(self) -> WordSplitter:
        """Segments of UAX 29."""
        return WordSplitter(UnicodeTokenizer())


class DocumentBatch:
    """Texts and their shared columns. D documents.

    Args:
        texts: the documents.
        splitters: where their words come from.
        word_counts: words of each document, where somebody has counted them.
    """

    def __init__(self, texts: Sequence[str], splitters: WordSplitters, word_counts: Integers | None = None) -> None:
        self.texts = texts
        self.splitters = splitters
        if word_counts is not None:
            self.word_counts = word_counts

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def character_counts(self) -> Integers:
        """Characters (code points) per document."""
        return self.to_counts(map(len, self.texts))

    @cached_property
    def words(self) -> WordColumns:
        """The words of all documents, in the sense of their language."""
        return self.splitters.language.split_words(self.texts)

    @cached_property
    def word_counts(self) -> Integers:
        """Words of each document, in the sense of its language."""
        return self.words.counts

    @cached_property
    def whitespace_words(self) -> WordColumns:
        """What stands between white space."""
        return self.splitters.whitespace.split_words(self.texts)

    @cached_property
    def unicode_words(self) -> WordColumns:
        """Unicode's word segments that start with a letter or a digit."""
        return self.splitters.unicode.split_words(self.texts)

    @cached_property
    def bytes_without_space(self) -> bytes:
        """All texts one after another in UTF-8, without any character that Python takes for white space."""
        return join_without_whitespace(self.texts)

    def count_occurrences(self, *parts: str) -> Integers:
        """How often the parts occur in each document, together."""
        return self.to_counts(sum(map(text.count, parts)) for text in self.texts)

    def to_counts(self, numbers: Any) -> Integers:
        """One integer per document, from an iterable of as many."""
        return np.fromiter(numbers, np.int64, len(self.texts))

    def select_documents(self, keep: npt.NDArray[np.bool_]) -> "DocumentBatch":
        """The documents that stay, with the columns that are already there."""
        if keep.all():
            return self
        counted = self.__dict__.get("word_counts")
        counted = counted if counted is None else counted[keep]
        batch = DocumentBatch(list(compress(self.texts, keep.tolist())), self.splitters, counted)
        for name in _WORDS:
            if name in self.__dict__:
                batch.__dict__[name] = self.__dict__[name].select_documents(keep)
        return batch


_WORDS = ("words", "whitespace_words", "unicode_words")


def compute_share(part: npt.NDArray[Any], whole: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """part / whole per document, 0 where the whole is 0."""
    quotient = np.zeros(len(part), np.float64)
    np.divide(part, whole, out=quotient, where=whole > 0)
    return quotient
