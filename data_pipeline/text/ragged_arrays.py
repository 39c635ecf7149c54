"""Rows of unequal lengths that lie one behind another in an array: where they begin, and where their items are.

A numpy array that grows at its end, for tables that are filled while text is read.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


def compute_offsets(counts: npt.NDArray[Any] | Sequence[int]) -> Integers:
    """Where each row of so many items begins, and where the last one ends. (rows + 1,)"""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, dtype=np.int64, out=offsets[1:])
    return offsets


def compute_positions(starts: Integers, counts: Integers) -> Integers:
    """The places of all items of rows that begin at `starts` and have so many items, row by row. (counts.sum(),)"""
    offsets = compute_offsets(counts)
    places: Integers = np.repeat(starts - offsets[:-1], counts) + np.arange(offsets[-1])
    return places


class GrowableArray:
    """A one-dimensional array with amortised appending; rebuilding tables per batch would cost more than using them."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._data: npt.NDArray[Any] = np.zeros(1024, dtype)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def extend(self, values: npt.NDArray[Any] | Sequence[int]) -> None:
        """Append values of the array's type."""
        size = self._size + len(values)
        if size > len(self._data):
            grown = np.zeros(max(size, 2 * len(self._data)), self._data.dtype)
            grown[: self._size] = self._data[: self._size]
            self._data = grown
        self._data[self._size : size] = values
        self._size = size

    @property
    def view(self) -> npt.NDArray[Any]:
        """What has been appended so far, without a copy; later growth does not show in it."""
        return self._data[: self._size]
