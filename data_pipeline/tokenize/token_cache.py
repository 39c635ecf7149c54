"""Cache the tokens of distinct texts, looked up many texts at a time.

`ShortWordTable` is a hash table in numpy arrays that maps short words to numbers, for a whole
column at once. A word of at most 15 bytes is two 64-bit integers, its bytes and its length. They
are compared exactly, so two words never share a number.

Invariants:
- Memory is bounded: a full cache is cleared.
- The content of the cache does not change results.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from llmsys.data_pipeline.text.ragged_arrays import GrowableArray, Integers, compute_offsets

# Bytes of the longest word that has a key; the sixteenth byte holds the length.
LONGEST = 15
FIRST_SLOTS = 1 << 12

_LENGTHS = np.arange(LONGEST + 2)  # the last value represents all longer words
_LOW_MASKS = np.array([(1 << 8 * min(size, 8)) - 1 for size in _LENGTHS.tolist()], np.uint64)
_HIGH_MASKS = np.array(
    [(1 << 8 * max(min(size, LONGEST) - 8, 0)) - 1 for size in _LENGTHS.tolist()], np.uint64
)
_LENGTH_BYTE = _LENGTHS.astype(np.uint64) << np.uint64(56)
# of SplitMix64 and xxHash
_LOW_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_HIGH_FACTOR = np.uint64(0xC2B2AE3D27D4EB4F)


class WordKeys(NamedTuple):
    """Words as pairs of integers; all words that are too long share one key, which no short word
    has.
    """

    low: npt.NDArray[np.uint64]
    high: npt.NDArray[np.uint64]

    def take_rows(self, rows: npt.NDArray[np.int64]) -> "WordKeys":
        """Return the keys at these indices."""
        return WordKeys(self.low[rows], self.high[rows])


def compute_word_keys(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> WordKeys:
    """Return the keys of the words at these byte offsets with these sizes in bytes; none may be
    empty.
    """
    # The sixteen bytes of the last word may reach past the end.
    padded = np.concatenate([data, np.zeros(2 * 8, np.uint8)])
    # the eight bytes from each byte on
    eights = np.ndarray((len(data) + 9,), "<u8", buffer=padded, strides=(1,))
    kind = np.minimum(sizes, LONGEST + 1)
    return WordKeys(
        eights[starts] & _LOW_MASKS[kind],
        eights[starts + 8] & _HIGH_MASKS[kind] | _LENGTH_BYTE[kind],
    )


class ShortWordTable:
    """{key: number} by open addressing with linear probing; at least half of the slots are free."""

    def __init__(self) -> None:
        self._count = 0
        self._allocate_slots(FIRST_SLOTS)

    def _allocate_slots(self, slots: int) -> None:
        self._slots = slots
        self._keys = WordKeys(np.zeros(slots, np.uint64), np.zeros(slots, np.uint64))
        self._numbers = np.zeros(slots, np.int64)

    def _compute_first_slots(self, keys: WordKeys) -> npt.NDArray[np.int64]:
        mixed = keys.low * _LOW_FACTOR ^ keys.high * _HIGH_FACTOR
        mixed ^= mixed >> np.uint64(29)
        mixed *= _LOW_FACTOR
        # The upper bits of a product are the best mixed.
        return (mixed >> np.uint64(65 - self._slots.bit_length())).astype(np.int64)

    def look_up(self, keys: WordKeys) -> npt.NDArray[np.int64]:
        """Return the number of each word, -1 for an unknown one."""
        slots = self._compute_first_slots(keys)
        # The length byte makes every key's `high` positive, so 0 is a free slot.
        high = self._keys.high.take(slots)
        same = (high == keys.high) & (self._keys.low.take(slots) == keys.low)
        found = np.where(same, self._numbers.take(slots), -1)
        left = np.flatnonzero(~same & (high != 0))  # another word is there: probe the next slot
        while len(left):
            slots[left] = here = slots[left] + 1 & self._slots - 1
            high, low = self._keys.high[here], self._keys.low[here]
            same = (high == keys.high[left]) & (low == keys.low[left])
            found[left[same]] = self._numbers[here[same]]
            left = left[~same & (high != 0)]
        return found

    def insert(self, keys: WordKeys, numbers: npt.NDArray[np.int64]) -> None:
        """Add distinct unknown words with distinct numbers."""
        self._count += len(numbers)
        if 2 * self._count > self._slots:
            old = self._keys
            old_numbers = self._numbers
            taken = np.flatnonzero(self._keys.high)
            # At most a quarter full, so that growth is rare.
            self._allocate_slots(1 << (4 * self._count - 1).bit_length())
            self._insert_keys(old.take_rows(taken), old_numbers[taken])
        self._insert_keys(keys, numbers)

    def _insert_keys(self, keys: WordKeys, numbers: npt.NDArray[np.int64]) -> None:
        slots = self._compute_first_slots(keys)
        left = np.arange(len(numbers))
        while len(left):
            free = left[self._keys.high[slots[left]] == 0]
            # the last write to a slot wins; the others probe on
            self._numbers[slots[free]] = numbers[free]
            won = free[self._numbers[slots[free]] == numbers[free]]
            self._keys.low[slots[won]] = keys.low[won]
            self._keys.high[slots[won]] = keys.high[won]
            waits = np.ones(len(numbers), np.bool_)
            waits[won] = False
            left = left[waits[left]]
            slots[left] = slots[left] + 1 & self._slots - 1


def get_column_buffers(column: Any) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return the bytes of a large_string or large_binary column without nulls, and the (N + 1,)
    offsets of its rows.
    """
    if not len(column):
        return np.zeros(0, np.uint8), np.zeros(1, np.int64)
    # A slice of a column shares the buffers of the whole.
    offsets = np.frombuffer(column.buffers()[1], np.int64)[
        column.offset : column.offset + len(column) + 1
    ]
    if offsets[0] == offsets[-1]:
        return np.zeros(0, np.uint8), np.zeros(len(offsets), np.int64)
    data = np.frombuffer(column.buffers()[2], np.uint8)[offsets[0] : offsets[-1]]
    return data, offsets - offsets[0]


ENTRY_BYTES = 150  # a short key in a Python dictionary, with its object, number and tokens
MAX_TEXT_BYTES = 64  # longer texts rarely repeat and are not cached


class RaggedTokens(NamedTuple):
    """Rows of tokens: `values` are all tokens, concatenated, and `lengths` the number of tokens
    of each row.
    """

    values: npt.NDArray[Any]
    lengths: Integers

    def take_rows(self, rows: Integers) -> "RaggedTokens":
        """Return the rows at these indices."""
        lists = pa.LargeListArray.from_arrays(
            pa.array(compute_offsets(self.lengths)), pa.array(self.values)
        )
        import pyarrow.compute as pc  # slow to import

        return RaggedTokens(pc.take(lists, pa.array(rows)).flatten().to_numpy(), self.lengths[rows])

    def merge_rows(self, starts: Integers) -> "RaggedTokens":
        """Return longer rows of the same tokens; row i consists of the rows from starts[i] to
        starts[i + 1].
        """
        return RaggedTokens(self.values, np.diff(compute_offsets(self.lengths)[starts]))


class TokenCache:
    """Tokens by the bytes of a text."""

    def __init__(self, dtype: npt.DTypeLike, limit_bytes: int) -> None:
        self.dtype = dtype
        self._limit = limit_bytes
        self._clear()

    def _clear(self) -> None:
        self._short = ShortWordTable()
        self._long = dict[bytes, int]()
        self._values = GrowableArray(self.dtype)
        self._lengths = GrowableArray(np.int64)

    def __len__(self) -> int:
        return len(self._lengths.view)

    def encode_parts(
        self, parts: pa.Array, below: Callable[[pa.Array], RaggedTokens]
    ) -> RaggedTokens:
        """Return the tokens of each part of a large_binary column, none empty; `below` encodes
        the new parts.
        """
        data, places = get_column_buffers(parts)
        rows = self._short.look_up(compute_word_keys(data, places[:-1], np.diff(places)))
        unknown = np.flatnonzero(rows < 0)
        if not len(unknown):
            return self._all_tokens.take_rows(rows)
        distinct = parts.take(pa.array(unknown)).dictionary_encode()
        found = self._find_long_texts(distinct.dictionary)
        new = np.flatnonzero(found < 0)
        texts = distinct.dictionary.take(pa.array(new))
        encoded = below(texts)
        found[new] = np.arange(len(new)) + len(self)
        rows[unknown] = found[distinct.indices.to_numpy()]
        # Before `_add_texts`, which may clear the cache.
        known = self._all_tokens
        everything = RaggedTokens(
            *(np.concatenate(pair) for pair in zip(known, encoded, strict=True))
        )
        self._add_texts(texts, encoded)
        return everything.take_rows(rows)

    @property
    def _all_tokens(self) -> RaggedTokens:
        return RaggedTokens(self._values.view, self._lengths.view)

    def _find_long_texts(self, texts: pa.Array) -> Integers:
        """Return the row of each text that is too long for `ShortWordTable`, -1 for unknown and
        for shorter texts.
        """
        rows = np.full(len(texts), -1)
        long = np.flatnonzero(np.diff(get_column_buffers(texts)[1]) > LONGEST)
        keys = texts.take(pa.array(long)).to_pylist()
        rows[long] = np.fromiter(
            map(self._long.get, keys, itertools.repeat(-1)), np.int64, len(keys)
        )
        return rows

    def _add_texts(self, texts: pa.Array, tokens: RaggedTokens) -> None:
        """Add distinct unknown texts."""
        if len(self) * ENTRY_BYTES > self._limit:
            self._clear()
        data, places = get_column_buffers(texts)
        sizes = np.diff(places)
        rows = np.cumsum(sizes <= MAX_TEXT_BYTES) - 1 + len(self)
        short = np.flatnonzero(sizes <= LONGEST)
        long = np.flatnonzero((sizes > LONGEST) & (sizes <= MAX_TEXT_BYTES))
        self._short.insert(compute_word_keys(data, places[short], sizes[short]), rows[short])
        self._long.update(
            zip(texts.take(pa.array(long)).to_pylist(), rows[long].tolist(), strict=True)
        )
        kept = (
            tokens
            if len(short) + len(long) == len(sizes)
            else tokens.take_rows(np.flatnonzero(sizes <= MAX_TEXT_BYTES))
        )
        self._values.extend(kept.values)
        self._lengths.extend(kept.lengths)
