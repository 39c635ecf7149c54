"""A batch of documents with what several rules need of them, computed when first asked for and then shared."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.rules.words import Integers, WordColumns, WordSplitter


class TextBatch:
    """Texts and their shared columns. D documents."""

    def __init__(self, texts: Sequence[str], splitter: WordSplitter) -> None:
        self.texts = texts
        self.splitter = splitter

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def characters(self) -> Integers:
        """Characters (code points) per document."""
        return self.count(map(len, self.texts))

    @cached_property
    def words(self) -> WordColumns:
        """The words of all documents."""
        return self.splitter.split(self.texts)

    def count(self, numbers: Any) -> Integers:
        """One integer per document, from an iterable of as many."""
        return np.fromiter(numbers, np.int64, len(self.texts))

    def take(self, keep: npt.NDArray[np.bool_]) -> "TextBatch":
        """The documents that stay, with the columns that are already there."""
        if keep.all():
            return self
        batch = TextBatch([text for text, kept in zip(self.texts, keep.tolist(), strict=True) if kept], self.splitter)
        if "words" in self.__dict__:
            batch.__dict__["words"] = self.words.take(keep)
        return batch


def share(part: npt.NDArray[Any], whole: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """part / whole per document, 0 where the whole is 0."""
    quotient = np.zeros(len(part), np.float64)
    np.divide(part, whole, out=quotient, where=whole > 0)
    return quotient
