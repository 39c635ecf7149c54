"""Numbers of short chunks, found for a whole batch at once: an open-addressing hash table in numpy.

Reads two keys for each chunk, gives its number; new ones get the numbers that follow. Keys are compared whole, so that
no two chunks are ever taken for one.
"""

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int32]
Rows = npt.NDArray[np.int64]

_FIRST_BITS = 12
_TABLE_BLOCK = 1 << 14  # rows that may be new are taken in so many at once, so that repeats among them cost no room
_MULTIPLIERS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


class ChunkHashTable:
    """Keys and their numbers. At most half of the slots are taken."""

    def __init__(self) -> None:
        self._taken = 0
        self._allocate_slots(_FIRST_BITS)

    def find_or_insert(self, low: Keys, high: Keys, following: int) -> tuple[Numbers, Rows]:
        """The number of each row, and the rows of new keys in the order of their numbers, from `following` on."""
        numbers = np.full(len(low), -1, np.int32)
        unknown = self._look_up_keys(low, high, numbers)
        new: list[Rows] = [np.zeros(0, np.int64)]
        for start in range(0, len(unknown), _TABLE_BLOCK):
            rows = unknown[start : start + _TABLE_BLOCK]
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
        """Put everything into twice as many slots."""
        there = self._numbers >= 0
        low, high, numbers = self._low[there], self._high[there], self._numbers[there]
        self._allocate_slots(self._bits + 1)
        rows, slots = np.arange(len(low)), self._compute_slots(low, high)
        while len(rows):
            free = np.flatnonzero(self._numbers[slots] < 0)
            self._numbers[slots[free]] = numbers[rows[free]]  # of several rows one stays
            stays = self._numbers[slots] == numbers[rows]
            self._low[slots[stays]], self._high[slots[stays]] = low[rows[stays]], high[rows[stays]]
            rows, slots = rows[~stays], (slots[~stays] + 1) & (len(self._numbers) - 1)

    def _compute_slots(self, low: Keys, high: Keys) -> Rows:
        mixed = (low ^ (high * _MULTIPLIERS[0])) * _MULTIPLIERS[1]
        mixed = (mixed ^ (mixed >> np.uint64(32))) * _MULTIPLIERS[0]
        return (mixed >> np.uint64(64 - self._bits)).view(np.int64)

    def _look_up_keys(self, low: Keys, high: Keys, numbers: Numbers) -> Rows:
        """Write the numbers of known keys, and return the other rows."""
        rows, slots = np.arange(len(low)), self._compute_slots(low, high)
        unknown: list[Rows] = []
        while len(rows):
            found = self._numbers[slots]
            same = (self._low[slots] == low[rows]) & (self._high[slots] == high[rows]) & (found >= 0)
            numbers[rows[same]] = found[same]
            unknown.append(rows[found < 0])
            other = ~same & (found >= 0)
            rows, slots = rows[other], (slots[other] + 1) & (len(self._numbers) - 1)
        return np.sort(np.concatenate(unknown)) if unknown else rows

    def _insert_keys(self, low: Keys, high: Keys, numbers: Numbers, following: int) -> Rows:
        """Write the numbers of all keys, and return the rows of new ones in the order of their numbers."""
        rows, slots = np.arange(len(low)), self._compute_slots(low, high)
        new: list[Rows] = []
        while len(rows):
            free = np.flatnonzero(self._numbers[slots] < 0)
            self._numbers[slots[free]] = free  # of several rows one stays
            first = free[self._numbers[slots[free]] == free]
            places = slots[first]
            self._low[places], self._high[places] = low[rows[first]], high[rows[first]]
            self._numbers[places] = np.arange(following, following + len(first))
            following += len(first)
            new.append(rows[first])
            same = (self._low[slots] == low[rows]) & (self._high[slots] == high[rows])
            numbers[rows[same]] = self._numbers[slots[same]]
            rows, slots = rows[~same], (slots[~same] + 1) & (len(self._numbers) - 1)
        made = np.concatenate(new) if new else rows
        self._taken += len(made)
        return made
