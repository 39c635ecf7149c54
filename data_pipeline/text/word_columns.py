"""Words and lines of a batch of documents as columns, on which rules work without touching a string."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.text.ragged_arrays import compute_offsets
from data_pipeline.text.vocabulary import Vocabulary

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class WordColumns:
    """The words of some documents, one after another. W words, D documents.

    Attributes:
        ids_W: word ids.
        offsets: int64, D + 1 values: where each document starts in `ids_W`, and where the last one ends.
        vocabulary: what the ids mean.
    """

    ids_W: npt.NDArray[np.int32]
    offsets: Integers
    vocabulary: Vocabulary

    @cached_property
    def counts(self) -> Integers:
        """Words per document."""
        return np.diff(self.offsets)

    @cached_property
    def document_of_word(self) -> npt.NDArray[np.int32]:
        """Number of the document of each word."""
        return np.repeat(np.arange(len(self.counts), dtype=np.int32), self.counts)

    @cached_property
    def word_lengths(self) -> npt.NDArray[np.int32]:
        """Characters of each word."""
        return self.vocabulary.lengths[self.ids_W]

    @cached_property
    def word_flags(self) -> npt.NDArray[np.uint8]:
        """Flags of each word, see `vocabulary`."""
        return self.vocabulary.flags[self.ids_W]

    def count_per_document(self, chosen_W: npt.NDArray[np.bool_]) -> Integers:
        """How many words are chosen per document."""
        return self.sum_per_document(chosen_W)

    def sum_per_document(self, numbers_W: npt.NDArray[Any]) -> Integers:
        """The sum of a small number of each word per document."""
        return np.diff(compute_offsets(numbers_W)[self.offsets])

    def select_documents(self, keep: npt.NDArray[np.bool_]) -> "WordColumns":
        """The words of the documents that stay."""
        counts = self.counts
        return WordColumns(self.ids_W[np.repeat(keep, counts)], compute_offsets(counts[keep]), self.vocabulary)


@dataclass(frozen=True)
class LineColumns:
    """What rules ask of the lines of some documents. L lines, D documents.

    Attributes:
        chunks_L: chunks of each line.
        words_L: words of each line.
        sentences_L: sentences of each line, counted from its beginning.
        offsets: int64, D + 1 values: where the lines of each document start, and where the last ones end.
    """

    chunks_L: Integers
    words_L: Integers
    sentences_L: Integers
    offsets: Integers

    def group_by_document(self, column_L: Integers) -> list[list[int]]:
        """The numbers of the lines of each document."""
        numbers = column_L.tolist()
        return [numbers[start:end] for start, end in pairwise(self.offsets.tolist())]
