"""Tokens of distinct texts, remembered: what was asked once is looked up, many texts at a time.

Gives `RaggedTokens` (rows of tokens, one behind another) and `TokenCache`. Promises: memory is bounded, for a memo that
is full begins anew; what it holds never changes an answer, only how fast it comes.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from data_pipeline.text.ragged_arrays import GrowableArray, Integers, compute_offsets
from data_pipeline.tokenize.short_word_table import LONGEST, ShortWordTable, compute_word_keys, get_column_buffers

ENTRY_BYTES = 150  # of a short key in a Python dictionary, with its object, number and tokens
MOST_BYTES = 64  # of a text that is worth remembering


class RaggedTokens(NamedTuple):
    """Rows of tokens: `values` holds them one behind another, `lengths` how many each row has."""

    values: npt.NDArray[Any]
    lengths: Integers

    def take_rows(self, rows: Integers) -> "RaggedTokens":
        """The rows asked for, in that order."""
        lists = pa.LargeListArray.from_arrays(pa.array(compute_offsets(self.lengths)), pa.array(self.values))
        return RaggedTokens(pc.take(lists, pa.array(rows)).flatten().to_numpy(), self.lengths[rows])

    def merge_rows(self, starts: Integers) -> "RaggedTokens":
        """The same tokens in longer rows, where row i is made of the rows from starts[i] to starts[i + 1]."""
        return RaggedTokens(self.values, np.diff(compute_offsets(self.lengths)[starts]))


class TokenCache:
    """Tokens by the bytes of a text."""

    def __init__(self, dtype: npt.DTypeLike, limit_bytes: int) -> None:
        self.dtype, self._limit = dtype, limit_bytes
        self._clear()

    def _clear(self) -> None:
        self._short, self._long = ShortWordTable(), dict[bytes, int]()
        self._values, self._lengths = GrowableArray(self.dtype), GrowableArray(np.int64)

    def __len__(self) -> int:
        return len(self._lengths.view)

    def encode_parts(self, parts: pa.Array, below: Callable[[pa.Array], RaggedTokens]) -> RaggedTokens:
        """The tokens of each part of a large_binary column, none empty; `below` makes those of parts that are new."""
        data, places = get_column_buffers(parts)
        rows = self._short.look_up(compute_word_keys(data, places[:-1], np.diff(places)))
        unknown = np.flatnonzero(rows < 0)
        if not len(unknown):
            return self._all_tokens.take_rows(rows)
        distinct = parts.take(pa.array(unknown)).dictionary_encode()
        found = self._find_long_texts(distinct.dictionary)
        new = np.flatnonzero(found < 0)
        texts = distinct.dictionary.take(pa.array(new))
        made = below(texts)
        found[new] = np.arange(len(new)) + len(self)
        rows[unknown] = found[distinct.indices.to_numpy()]
        known = self._all_tokens
        everything = RaggedTokens(*(np.concatenate(pair) for pair in zip(known, made, strict=True)))
        self._add_texts(texts, made)
        return everything.take_rows(rows)

    @property
    def _all_tokens(self) -> RaggedTokens:
        return RaggedTokens(self._values.view, self._lengths.view)

    def _find_long_texts(self, texts: pa.Array) -> Integers:
        """The row of each text that is too long for `ShortWordTable`, -1 for one that is not known and for all
        others.
        """
        rows = np.full(len(texts), -1)
        long = np.flatnonzero(np.diff(get_column_buffers(texts)[1]) > LONGEST)
        keys = texts.take(pa.array(long)).to_pylist()
        rows[long] = np.fromiter(map(self._long.get, keys, itertools.repeat(-1)), np.int64, len(keys))
        return rows

    def _add_texts(self, texts: pa.Array, tokens: RaggedTokens) -> None:
        """Remember distinct texts that are not known yet."""
        if len(self) * ENTRY_BYTES > self._limit:
            self._clear()
        data, places = get_column_buffers(texts)
        sizes = np.diff(places)
        rows = np.cumsum(sizes <= MOST_BYTES) - 1 + len(self)
        short, long = np.flatnonzero(sizes <= LONGEST), np.flatnonzero((sizes > LONGEST) & (sizes <= MOST_BYTES))
        self._short.insert(compute_word_keys(data, places[short], sizes[short]), rows[short])
        self._long.update(zip(texts.take(pa.array(long)).to_pylist(), rows[long].tolist(), strict=True))
        kept = tokens if len(short) + len(long) == len(sizes) else tokens.take_rows(np.flatnonzero(sizes <= MOST_BYTES))
        self._values.extend(kept.values)
        self._lengths.extend(kept.lengths)
