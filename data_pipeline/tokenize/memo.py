"""Tokens of distinct texts, remembered: what was asked once is looked up, many texts at a time.

Gives `Ragged` (rows of tokens, one behind another) and `Memo`. Promises: memory is bounded, for a memo that is full
begins anew; what it holds never changes an answer, only how fast it comes.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from data_pipeline.rules.growing import GrowingArray
from data_pipeline.rules.ragged import Integers, offsets_of
from data_pipeline.tokenize.short_words import LONGEST, ShortWords, keys_of, words_of

ENTRY_BYTES = 150  # of a short key in a Python dictionary, with its object, number and tokens
MOST_BYTES = 64  # of a text that is worth remembering


class Ragged(NamedTuple):
    """Rows of tokens: `values` holds them one behind another, `lengths` how many each row has."""

    values: npt.NDArray[Any]
    lengths: Integers

    def take(self, rows: Integers) -> "Ragged":
        """The rows asked for, in that order."""
        lists = pa.LargeListArray.from_arrays(pa.array(offsets_of(self.lengths)), pa.array(self.values))
        return Ragged(pc.take(lists, pa.array(rows)).flatten().to_numpy(), self.lengths[rows])

    def grouped(self, starts: Integers) -> "Ragged":
        """The same tokens in longer rows, where row i is made of the rows from starts[i] to starts[i + 1]."""
        return Ragged(self.values, np.diff(offsets_of(self.lengths)[starts]))


class Memo:
    """Tokens by the bytes of a text."""

    def __init__(self, dtype: npt.DTypeLike, limit_bytes: int) -> None:
        self.dtype, self._limit = dtype, limit_bytes
        self._clear()

    def _clear(self) -> None:
        self._short, self._long = ShortWords(), dict[bytes, int]()
        self._values, self._lengths = GrowingArray(self.dtype), GrowingArray(np.int64)

    def __len__(self) -> int:
        return len(self._lengths.view)

    def encode(self, parts: pa.Array, below: Callable[[pa.Array], Ragged]) -> Ragged:
        """The tokens of each part of a large_binary column, none empty; `below` makes those of parts that are new."""
        data, places = words_of(parts)
        rows = self._short.find(keys_of(data, places[:-1], np.diff(places)))
        unknown = np.flatnonzero(rows < 0)
        if not len(unknown):
            return self._all.take(rows)
        distinct = parts.take(pa.array(unknown)).dictionary_encode()
        found = self._find_long(distinct.dictionary)
        new = np.flatnonzero(found < 0)
        texts = distinct.dictionary.take(pa.array(new))
        made = below(texts)
        found[new] = np.arange(len(new)) + len(self)
        rows[unknown] = found[distinct.indices.to_numpy()]
        known = self._all
        everything = Ragged(*(np.concatenate(pair) for pair in zip(known, made, strict=True)))
        self._add(texts, made)
        return everything.take(rows)

    @property
    def _all(self) -> Ragged:
        return Ragged(self._values.view, self._lengths.view)

    def _find_long(self, texts: pa.Array) -> Integers:
        """The row of each text that is too long for `ShortWords`, -1 for one that is not known and for all others."""
        rows = np.full(len(texts), -1)
        long = np.flatnonzero(np.diff(words_of(texts)[1]) > LONGEST)
        keys = texts.take(pa.array(long)).to_pylist()
        rows[long] = np.fromiter(map(self._long.get, keys, itertools.repeat(-1)), np.int64, len(keys))
        return rows

    def _add(self, texts: pa.Array, tokens: Ragged) -> None:
        """Remember distinct texts that are not known yet."""
        if len(self) * ENTRY_BYTES > self._limit:
            self._clear()
        data, places = words_of(texts)
        sizes = np.diff(places)
        rows = np.cumsum(sizes <= MOST_BYTES) - 1 + len(self)
        short, long = np.flatnonzero(sizes <= LONGEST), np.flatnonzero((sizes > LONGEST) & (sizes <= MOST_BYTES))
        self._short.add(keys_of(data, places[short], sizes[short]), rows[short])
        self._long.update(zip(texts.take(pa.array(long)).to_pylist(), rows[long].tolist(), strict=True))
        kept = tokens if len(short) + len(long) == len(sizes) else tokens.take(np.flatnonzero(sizes <= MOST_BYTES))
        self._values.extend(kept.values)
        self._lengths.extend(kept.lengths)
