"""A batch of documents with columns that several rules share, computed on first use."""

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
    """Word splitters of a process. Keep one per process: each splitter has a cache of its own.

    Args:
        language: splits the words of `DocumentBatch.words`; datatrove's English by default.
    """

    def __init__(self, language: WordSplitter | None = None) -> None:
        self.language = language or WordSplitter()

    @cached_property
    def whitespace(self) -> WordSplitter:
        """Splitter at white space."""
        return WordSplitter(WhitespaceTokenizer())

    @cached_property
    def unicode(self) -> WordSplitter:
        """Splitter into the segments of UAX 29."""
        return WordSplitter(UnicodeTokenizer())


class DocumentBatch:
    """Texts and their shared columns. D documents.

    Args:
        texts: the documents.
        splitters: split their words.
        word_counts: (D,) words of each document, if known.
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
        """Characters (code points) per document, (D,)."""
        return self.to_counts(map(len, self.texts))

    @cached_property
    def words(self) -> WordColumns:
        """The words of all documents, as their language splits them."""
        return self.splitters.language.split_words(self.texts)

    @cached_property
    def word_counts(self) -> Integers:
        """Words per document, as its language splits them, (D,)."""
        return self.words.counts

    @cached_property
    def whitespace_words(self) -> WordColumns:
        """The chunks between white space."""
        return self.splitters.whitespace.split_words(self.texts)

    @cached_property
    def unicode_words(self) -> WordColumns:
        """Unicode's word segments that start with a letter or a digit."""
        return self.splitters.unicode.split_words(self.texts)

    @cached_property
    def bytes_without_space(self) -> bytes:
        """All texts concatenated in UTF-8, without the characters that Python considers white space."""
        return join_without_whitespace(self.texts)

    def count_occurrences(self, *parts: str) -> Integers:
        """Count the occurrences of all `parts` together, per document."""
        return self.to_counts(sum(map(text.count, parts)) for text in self.texts)

    def to_counts(self, numbers: Any) -> Integers:
        """Convert an iterable of D numbers to int64."""
        return np.fromiter(numbers, np.int64, len(self.texts))

    def select_documents(self, keep: npt.NDArray[np.bool_]) -> "DocumentBatch":
        """Return the kept documents with the columns computed so far."""
        if keep.all():
            return self
        counted = self.__dict__.get("word_counts")
        counted = counted if counted is None else counted[keep]
        batch = DocumentBatch(list(compress(self.texts, keep.tolist())), self.splitters, counted)
        for name in _WORDS:  # cached_property stores computed columns in __dict__
            if name in self.__dict__:
                batch.__dict__[name] = self.__dict__[name].select_documents(keep)
        return batch


_WORDS = ("words", "whitespace_words", "unicode_words")


def compute_share(part: npt.NDArray[Any], whole: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return part / whole per document, 0 where the whole is 0."""
    quotient = np.zeros(len(part), np.float64)
    np.divide(part, whole, out=quotient, where=whole > 0)
    return quotient
