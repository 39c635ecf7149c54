"""Cache of the words of chunks: each chunk has a number, and by number the words it was split into.

Short chunks are found by their bytes in an open-addressing hash table in numpy, for a whole batch
at once. Longer ones are found by the string.

Invariants:
    - Keys are compared in full, so that two chunks are never taken for one.
    - The cache never changes a result. It is cleared above a size limit.
"""

from collections.abc import Sequence
from itertools import chain, repeat
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from llmsys.data_pipeline.text.ragged_arrays import (
    SHORT_BYTES,
    ChunkSpans,
    GrowableArray,
    Integers,
    compute_offsets,
    compute_positions,
)
from llmsys.data_pipeline.text.vocabulary import Vocabulary

Keys = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int32]
Rows = npt.NDArray[np.int64]

_FIRST_BITS = 12
_TABLE_BLOCK = 1 << 14  # rows inserted at once: repeats among few rows reserve few slots
_MULTIPLIERS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


class ChunkHashTable:
    """Hash table from two 64-bit keys to a number. At most half of the slots are used."""

    def __init__(self) -> None:
        self._taken = 0
        self._allocate_slots(_FIRST_BITS)

    def find_or_insert(self, low: Keys, high: Keys, following: int) -> tuple[Numbers, Rows]:
        """Return the number of each row, and the rows of new keys. New numbers start at
        `following`.
        """
        numbers = np.full(len(low), -1, np.int32)
        unknown = self._look_up_keys(low, high, numbers)
        new: list[Rows] = [np.zeros(0, np.int64)]
        for start in range(0, len(unknown), _TABLE_BLOCK):
            rows = unknown[start : start + _TABLE_BLOCK]
            # At most half full: probe sequences stay short.
            while 2 * (self._taken + len(rows)) > len(self._numbers):
                self._double_slots()
            found = np.full(len(rows), -1, np.int32)
            first = self._insert_keys(low[rows], high[rows], found, following)
            numbers[rows] = found
            following += len(first)
            new.append(rows[first])
        return numbers, np.concatenate(new)

    def _allocate_slots(self, bits: int) -> None:
        self._bits = bits
        self._low, self._high = np.zeros(1 << bits, np.uint64), np.zeros(1 << bits, np.uint64)
        self._numbers = np.full(1 << bits, -1, np.int32)

    def _double_slots(self) -> None:
        """Rehash everything into twice as many slots."""
        there = self._numbers >= 0
        low = self._low[there]
        high = self._high[there]
        numbers = self._numbers[there]
        self._allocate_slots(self._bits + 1)
        rows = np.arange(len(low))
        slots = self._compute_slots(low, high)
        while len(rows):
            free = np.flatnonzero(self._numbers[slots] < 0)
            self._numbers[slots[free]] = numbers[rows[free]]  # the last of several rows wins
            stays = self._numbers[slots] == numbers[rows]
            self._low[slots[stays]] = low[rows[stays]]
            self._high[slots[stays]] = high[rows[stays]]
            rows = rows[~stays]
            slots = (slots[~stays] + 1) & (len(self._numbers) - 1)

    def _compute_slots(self, low: Keys, high: Keys) -> Rows:
        # A multiplicative mix (Steele et al. 2014): bytes of text alone are badly distributed.
        mixed = (low ^ (high * _MULTIPLIERS[0])) * _MULTIPLIERS[1]
        mixed = (mixed ^ (mixed >> np.uint64(32))) * _MULTIPLIERS[0]
        return (mixed >> np.uint64(64 - self._bits)).view(np.int64)

    def _look_up_keys(self, low: Keys, high: Keys, numbers: Numbers) -> Rows:
        """Write the numbers of known keys into `numbers`. Return the other rows."""
        rows = np.arange(len(low))
        slots = self._compute_slots(low, high)
        unknown: list[Rows] = []
        while len(rows):
            found = self._numbers[slots]
            same = (
                (self._low[slots] == low[rows]) & (self._high[slots] == high[rows]) & (found >= 0)
            )
            numbers[rows[same]] = found[same]
            unknown.append(rows[found < 0])
            other = ~same & (found >= 0)
            rows = rows[other]
            slots = (slots[other] + 1) & (len(self._numbers) - 1)
        return np.sort(np.concatenate(unknown)) if unknown else rows

    def _insert_keys(self, low: Keys, high: Keys, numbers: Numbers, following: int) -> Rows:
        """Write the numbers of all keys into `numbers`. Return the rows of new keys in the order
        of their numbers.
        """
        rows = np.arange(len(low))
        slots = self._compute_slots(low, high)
        new: list[Rows] = []
        while len(rows):
            free = np.flatnonzero(self._numbers[slots] < 0)
            # Concurrent inserts into one slot: whoever reads its own number back has won.
            self._numbers[slots[free]] = free  # the last of several rows wins
            first = free[self._numbers[slots[free]] == free]
            places = slots[first]
            self._low[places] = low[rows[first]]
            self._high[places] = high[rows[first]]
            self._numbers[places] = np.arange(following, following + len(first))
            following += len(first)
            new.append(rows[first])
            same = (self._low[slots] == low[rows]) & (self._high[slots] == high[rows])
            numbers[rows[same]] = self._numbers[slots[same]]
            rows = rows[~same]
            slots = (slots[~same] + 1) & (len(self._numbers) - 1)
        made = np.concatenate(new) if new else rows
        self._taken += len(made)
        return made


SPACE_WORD = " "  # a run of white space that is a token; no chunk equals it
SPACE_NUMBER = 0
_PIECE = 1 << 18  # chunks looked up together: bounds temporary arrays


class WordTokenizer(Protocol):
    """Splits texts into chunks and chunks into words. The words of a chunk must not depend on
    other chunks.
    """

    @property
    def sentence_marks(self) -> frozenset[str]:
        """Words that end a sentence."""

    def split_chunks(self, text: str, /) -> list[str]:
        """Return the chunks of a text."""

    def split_words(self, chunks: Sequence[str]) -> list[list[str]]:
        """Return the words of each chunk. A chunk is not empty."""


class WordCache:
    """Numbers of chunks, and their words.

    Args:
        splitter: Splits chunks into words.
        chunks: Maximum number of chunks.
        characters: Maximum number of characters of all chunks.
    """

    def __init__(self, splitter: WordTokenizer, chunks: int, characters: int) -> None:
        self._splitter = splitter
        self._most_chunks = chunks
        self._most_characters = characters
        self._clear_cache()

    def __len__(self) -> int:
        return len(self._chunk_counts)

    def evict_if_full(self) -> None:
        """Clear the cache if it is above its limits. Numbers returned earlier become invalid."""
        if len(self) > self._most_chunks or self._characters > self._most_characters:
            self._clear_cache()

    def look_up_spans(self, spans: ChunkSpans) -> Integers:
        """Return the number of each chunk of texts that are split at white space."""
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
        """Return the number of each chunk, found by the string."""
        encoded = pa.array(chunks, pa.large_string()).dictionary_encode()
        distinct = encoded.dictionary.to_pylist()  # one look-up each
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
        """Return the word ids of all chunks, concatenated, and the number of words per chunk."""
        counts = self._chunk_counts.view[numbers_C].astype(np.int64)
        return self._chunk_words.view[
            compute_positions(self._chunk_starts.view[numbers_C], counts)
        ], counts

    def _learn_chunks(self, chunks: Sequence[str]) -> None:
        """Split new chunks and give them the next numbers."""
        try:
            split = self._splitter.split_words(chunks)
        except Exception:
            self._clear_cache()  # the hash table already holds their numbers
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
        """Reset to a cache that holds the run of white space only. Columns returned earlier keep
        their vocabulary.
        """
        self.vocabulary = Vocabulary(self._splitter.sentence_marks)
        self.vocabulary.add_words([SPACE_WORD])
        self._memo: dict[str, int] = {SPACE_WORD: SPACE_NUMBER}
        self._table = ChunkHashTable()
        self._characters = 0
        self._chunk_starts = GrowableArray(np.int64)
        self._chunk_counts = GrowableArray(np.int32)
        self._chunk_words = GrowableArray(np.int32)
        self._chunk_starts.extend([0])
        self._chunk_counts.extend([1])
        self._chunk_words.extend([0])
