"""Cache the tokens of distinct texts, looked up many texts at a time.

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
import pyarrow.compute as pc

from data_pipeline.text.ragged_arrays import GrowableArray, Integers, compute_offsets
from data_pipeline.tokenize.short_word_table import LONGEST, ShortWordTable, compute_word_keys, get_column_buffers

ENTRY_BYTES = 150  # a short key in a Python dictionary, with its object, number and tokens
MAX_TEXT_BYTES = 64  # longer texts rarely repeat and are not cached


class RaggedTokens(NamedTuple):
    """Rows of tokens: `values` are all tokens, concatenated, and `lengths` the number of tokens of each row."""

    values: npt.NDArray[Any]
    lengths: Integers

    def take_rows(self, rows: Integers) -> "RaggedTokens":
        """Return the rows at these indices."""
        lists = pa.LargeListArray.from_arrays(pa.array(compute_offsets(self.lengths)), pa.array(self.values))
        return RaggedTokens(pc.take(lists, pa.array(rows)).flatten().to_numpy(), self.lengths[rows])

    def merge_rows(self, starts: Integers) -> "RaggedTokens":
        """Return longer rows of the same tokens; row i consists of the rows from starts[i] to starts[i + 1]."""
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
        """Return the tokens of each part of a large_binary column, none empty; `below` encodes the new parts."""
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
        known = self._all_tokens
        everything = RaggedTokens(*(np.concatenate(pair) for pair in zip(known, encoded, strict=True)))
        self._add_texts(texts, encoded)
        return everything.take_rows(rows)

    @property
    def _all_tokens(self) -> RaggedTokens:
        return RaggedTokens(self._values.view, self._lengths.view)

    def _find_long_texts(self, texts: pa.Array) -> Integers:
        """Return the row of each text that is too long for `ShortWordTable`, -1 for unknown and for shorter texts."""
        rows = np.full(len(texts), -1)
        long = np.flatnonzero(np.diff(get_column_buffers(texts)[1]) > LONGEST)
        keys = texts.take(pa.array(long)).to_pylist()
        rows[long] = np.fromiter(map(self._long.get, keys, itertools.repeat(-1)), np.int64, len(keys))
        return rows

    def _add_texts(self, texts: pa.Array, tokens: RaggedTokens) -> None:
        """Add distinct unknown texts."""
        if len(self) * ENTRY_BYTES > self._limit:
            self._clear()
        data, places = get_column_buffers(texts)
        sizes = np.diff(places)
        rows = np.cumsum(sizes <= MAX_TEXT_BYTES) - 1 + len(self)
        short, long = np.flatnonzero(sizes <= LONGEST), np.flatnonzero((sizes > LONGEST) & (sizes <= MAX_TEXT_BYTES))
        self._short.insert(compute_word_keys(data, places[short], sizes[short]), rows[short])
        self._long.update(zip(texts.take(pa.array(long)).to_pylist(), rows[long].tolist(), strict=True))
        kept = (
            tokens
            if len(short) + len(long) == len(sizes)
            else tokens.take_rows(np.flatnonzero(sizes <= MAX_TEXT_BYTES))
        )
        self._values.extend(kept.values)
        self._lengths.extend(kept.lengths)
