"""Ragged arrays: rows of unequal lengths, concatenated. And a growable array for tables filled while text is read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


def compute_offsets(counts: npt.NDArray[Any] | Sequence[int]) -> Integers:
    """Compute where each row begins.

    Args:
        counts: Items per row, shape (rows,).

    Returns:
        int64 of shape (rows + 1,): the start of each row, and the end of the last one.
    """
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, dtype=np.int64, out=offsets[1:])
    return offsets


def compute_positions(starts: Integers, counts: Integers) -> Integers:
    """Compute the positions of all items of some rows, row by row.

    Args:
        starts: First position of each row, shape (rows,).
        counts: Items per row, shape (rows,).

    Returns:
        int64 of shape (counts.sum(),).
    """
    offsets = compute_offsets(counts)
    places: Integers = np.repeat(starts - offsets[:-1], counts) + np.arange(offsets[-1])
    return places


class GrowableArray:
    """One-dimensional array with amortised appending. Rebuilding tables per batch would cost more than using them."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._data: npt.NDArray[Any] = np.zeros(1024, dtype)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def extend(self, values: npt.NDArray[Any] | Sequence[int]) -> None:
        """Append values of the array's dtype."""
        size = self._size + len(values)
        if size > len(self._data):
            # Doubling makes appending linear in total.
            grown = np.zeros(max(size, 2 * len(self._data)), self._data.dtype)
            grown[: self._size] = self._data[: self._size]
            self._data = grown
        self._data[self._size : size] = values
        self._size = size

    @property
    def view(self) -> npt.NDArray[Any]:
        """Values appended so far, without a copy. It does not grow."""
        return self._data[: self._size]
