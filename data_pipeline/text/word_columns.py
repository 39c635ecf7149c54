"""Words and lines of a batch of documents as columns, so that rules need no strings."""

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
    """Words of some documents, concatenated. W words, D documents.

    Attributes:
        ids_W: Word ids.
        offsets: Start of each document in `ids_W` and end of the last one, int64 of shape (D + 1,).
        vocabulary: Columns by word id.
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
        """Document number of each word."""
        return np.repeat(np.arange(len(self.counts), dtype=np.int32), self.counts)

    @cached_property
    def word_lengths(self) -> npt.NDArray[np.int32]:
        """Characters of each word."""
        return self.vocabulary.lengths[self.ids_W]

    @cached_property
    def word_flags(self) -> npt.NDArray[np.uint8]:
        """Flags of each word, see `vocabulary.py`."""
        return self.vocabulary.flags[self.ids_W]

    def count_per_document(self, chosen_W: npt.NDArray[np.bool_]) -> Integers:
        """Return the number of chosen words per document."""
        return self.sum_per_document(chosen_W)

    def sum_per_document(self, numbers_W: npt.NDArray[Any]) -> Integers:
        """Return the sum per document of a small number per word."""
        return np.diff(compute_offsets(numbers_W)[self.offsets])

    def select_documents(self, keep: npt.NDArray[np.bool_]) -> "WordColumns":
        """Return the words of the documents in the mask."""
        counts = self.counts
        return WordColumns(self.ids_W[np.repeat(keep, counts)], compute_offsets(counts[keep]), self.vocabulary)


@dataclass(frozen=True)
class LineColumns:
    """Counts per line of some documents. L lines, D documents.

    Attributes:
        chunks_L: Chunks of each line.
        words_L: Words of each line.
        sentences_L: Sentences of each line, counted from its start.
        offsets: First line of each document and end of the last one, int64 of shape (D + 1,).
    """

    chunks_L: Integers
    words_L: Integers
    sentences_L: Integers
    offsets: Integers

    def group_by_document(self, column_L: Integers) -> list[list[int]]:
        """Return the values of the lines of each document."""
        numbers = column_L.tolist()
        return [numbers[start:end] for start, end in pairwise(self.offsets.tolist())]
