"""What is remembered of chunks: each has a number, and by number the words that it was split into.

Short chunks are found by their bytes, others by the string. What is remembered never changes a result; beyond a bound
it is forgotten.
"""

from collections.abc import Sequence
from itertools import chain, repeat
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data_pipeline.rules.chunk_table import ChunkHashTable
from data_pipeline.rules.growing import GrowableArray
from data_pipeline.rules.ragged import Integers, compute_offsets, compute_positions
from data_pipeline.rules.spans import SHORT_BYTES, ChunkSpans
from data_pipeline.rules.vocabulary import Vocabulary

SPACE_WORD = " "  # stands for a run of white space that is a token; no chunk looks like it
SPACE_NUMBER = 0
_PIECE = 1 << 18  # chunks that are looked up together


class WordTokenizer(Protocol):
    """What makes words. The words of a chunk must not depend on the chunks beside it."""

    @property
    def sentence_marks(self) -> frozenset[str]:
        """Words that end a sentence."""

    def split_chunks(self, text: str, /) -> list[str]:
        """The chunks of a text."""

    def split_words(self, chunks: Sequence[str]) -> list[list[str]]:
        """The words of each chunk; a chunk is not empty."""


class WordCache:
    """Numbers of chunks, and their words.

    Args:
        splitter: what makes words of chunks.
        chunks: to remember at most.
        characters: of chunks to remember at most.
    """

    def __init__(self, splitter: WordTokenizer, chunks: int, characters: int) -> None:
        self._splitter, self._most_chunks, self._most_characters = splitter, chunks, characters
        self._clear_cache()

    def __len__(self) -> int:
        return len(self._chunk_counts)

    def evict_if_full(self) -> None:
        """Start again from nothing when there is too much. Numbers that were given before mean nothing then."""
        if len(self) > self._most_chunks or self._characters > self._most_characters:
            self._clear_cache()

    def look_up_spans(self, spans: ChunkSpans) -> Integers:
        """The number of each chunk of texts that are cut at white space."""
        is_short = spans.ends_C - spans.starts_C <= SHORT_BYTES
        numbers = np.zeros(len(is_short), np.int64)
        short = np.flatnonzero(is_short)
        for start in range(0, len(short), _PIECE):
            rows = short[start : start + _PIECE]
            numbers[rows], new = self._table.find_or_insert(*spans.compute_keys(rows), len(self))
            self._learn_chunks(spans.decode_chunks(rows[new]))
        numbers[~is_short] = self.look_up_chunks(spans.decode_chunks(np.flatnonzero(~is_short)))
        return numbers

    def look_up_chunks(self, chunks: Sequence[str]) -> Integers:
        """The number of each chunk, found by the string."""
        encoded = pa.array(chunks, pa.large_string()).dictionary_encode()
        distinct = encoded.dictionary.to_pylist()  # each is looked up once
        numbers = list(map(self._memo.get, distinct, repeat(-1)))
        if -1 in numbers:
            new = [chunk for chunk, number in zip(distinct, numbers, strict=True) if number < 0]
            first = len(self)
            self._learn_chunks(new)
            self._memo.update(zip(new, range(first, first + len(new)), strict=True))
            numbers = list(map(self._memo.__getitem__, distinct))
        found: Integers = np.array(numbers, np.int64)[encoded.indices.to_numpy()]
        return found

    def get_words(self, numbers_C: Integers) -> tuple[npt.NDArray[np.int32], Integers]:
        """All words of all chunks one after another, and the number of words of each chunk."""
        counts = self._chunk_counts.view[numbers_C].astype(np.int64)
        return self._chunk_words.view[compute_positions(self._chunk_starts.view[numbers_C], counts)], counts

    def _learn_chunks(self, chunks: Sequence[str]) -> None:
        """Split chunks that have no number, and give them those that follow."""
        try:
            split = self._splitter.split_words(chunks)
        except Exception:
            self._clear_cache()  # the table has their numbers already
            raise
        words = list(chain.from_iterable(split))
        index = self.vocabulary.index
        self.vocabulary.add_words([word for word in dict.fromkeys(words) if word not in index])
        counts = np.fromiter(map(len, split), np.int64, len(split))
        first = len(self._chunk_words)
        self._chunk_starts.extend(first + compute_offsets(counts)[:-1])
        self._chunk_counts.extend(counts)
        self._chunk_words.extend(np.fromiter(map(index.__getitem__, words), np.int32, len(words)))
        self._characters += sum(map(len, chunks))

    def _clear_cache(self) -> None:
        """Start with a memo that knows only the run of white space. Columns already given keep their vocabulary."""
        self.vocabulary = Vocabulary(self._splitter.sentence_marks)
        self.vocabulary.add_words([SPACE_WORD])
        self._memo: dict[str, int] = {SPACE_WORD: SPACE_NUMBER}
        self._table = ChunkHashTable()
        self._characters = 0
        self._chunk_starts, self._chunk_counts = GrowableArray(np.int64), GrowableArray(np.int32)
        self._chunk_words = GrowableArray(np.int32)
        self._chunk_starts.extend([0])
        self._chunk_counts.extend([1])
        self._chunk_words.extend([0])
