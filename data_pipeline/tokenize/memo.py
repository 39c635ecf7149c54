"""Tokens of distinct texts, remembered: what was asked once is looked up, many texts at a time.

Gives `Ragged` (rows of tokens, one behind another) and `Memo`. Promises: memory is bounded, for a memo that is full
begins anew; what it holds never changes an answer, only how fast it comes.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from data_pipeline.rules.growing import GrowingArray

Indices = npt.NDArray[np.int64]

ENTRY_BYTES = 150  # of a short key in a Python dictionary, with its object, number and tokens


class Ragged(NamedTuple):
    """Rows of tokens: `values` holds them one behind another, `lengths` how many each row has."""

    values: npt.NDArray[Any]
    lengths: Indices

    def take(self, rows: Indices) -> "Ragged":
        """The rows asked for, in that order."""
        lists = pa.LargeListArray.from_arrays(pa.array(ends_of(self.lengths)), pa.array(self.values))
        return Ragged(pc.take(lists, pa.array(rows)).flatten().to_numpy(), self.lengths[rows])

    def grouped(self, starts: Indices) -> "Ragged":
        """The same tokens in longer rows, where row i is made of the rows from starts[i] to starts[i + 1]."""
        return Ragged(self.values, np.diff(ends_of(self.lengths)[starts]))


def ends_of(lengths: Indices) -> Indices:
    """Where rows of these lengths begin, and where the last ends: (rows + 1,)."""
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    return ends


class Memo:
    """Tokens by the bytes of a text; texts longer than `longest` bytes are not worth remembering."""

    def __init__(self, dtype: npt.DTypeLike, limit_bytes: int, longest: int = 64) -> None:
        self.dtype, self._limit, self._longest = dtype, limit_bytes, longest
        self._clear()

    def _clear(self) -> None:
        self._rows: dict[bytes, int] = {}
        self._values, self._lengths = GrowingArray(self.dtype), GrowingArray(np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, keys: Sequence[bytes]) -> Indices:
        """The row of each text, -1 for one that is not known."""
        return np.fromiter(map(self._rows.get, keys, itertools.repeat(-1)), np.int64, len(keys))

    def with_others(self, others: Ragged) -> Ragged:
        """All rows that are known, and these behind them."""
        values, lengths = self._values.view, self._lengths.view
        return Ragged(np.concatenate([values, others.values]), np.concatenate([lengths, others.lengths]))

    def add(self, keys: Sequence[bytes], tokens: Ragged) -> None:
        """Remember texts that are not known yet; they must be distinct."""
        if len(self) * ENTRY_BYTES > self._limit:
            self._clear()
        sizes = np.fromiter(map(len, keys), np.int64, len(keys))
        short = np.flatnonzero(sizes <= self._longest)
        kept = tokens if len(short) == len(keys) else tokens.take(short)
        chosen = keys if len(short) == len(keys) else [keys[row] for row in short.tolist()]
        self._rows.update(zip(chosen, itertools.count(len(self))))
        self._values.extend(kept.values)
        self._lengths.extend(kept.lengths)
