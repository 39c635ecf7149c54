"""Rows of unequal lengths that lie one behind another in an array: where they begin, and where their items are."""

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
