"""Texts given to the tokenizer's own library: whole ones by rule, and the new words that `columns` has not met yet.

Reads Arrow columns of texts and a tokenizer; gives `RaggedTokens` rows of its tokens.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_pipeline.tokenize.cuts import ESCAPED_SPACE
from data_pipeline.tokenize.memo import RaggedTokens
from data_pipeline.tokenize.short_words import get_column_buffers
from llmsys.shards import choose_token_dtype
from llmsys.tokenizer import SentencePieceTokenizer, Tokenizer

if TYPE_CHECKING:
    from llmsys.tokenizer_json import HuggingFaceTokenizer

LONG_TEXT_BYTES = 500
"""From this mean on an array for each text costs less than a list of Python's integers."""


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """No search for cycles while lists by the hundred thousand are made: it would take a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class LibraryEncoder:
    """Asks the library for every text."""

    def __init__(self, tokenizer: Tokenizer, reason: str) -> None:
        self.reason: str | None = reason
        self._tokenizer = tokenizer
        self.dtype = np.dtype(choose_token_dtype(tokenizer.vocab_size))

    def encode(self, texts: pa.Array) -> RaggedTokens:
        """The tokens of each text of a large_string or large_binary column."""
        rows = texts.cast(pa.large_string()).to_pylist()
        long = len(get_column_buffers(texts)[0]) > LONG_TEXT_BYTES * len(rows)
        if long and isinstance(self._tokenizer, SentencePieceTokenizer):
            arrays = self._tokenizer.encode_arrays(rows)
            return RaggedTokens(np.concatenate(arrays).astype(self.dtype), np.array([len(ids) for ids in arrays], np.int64))
        with _pause_garbage_collection():
            return _build_ragged_tokens(self._tokenizer.encode_batch(rows), self.dtype)


class PieceModelEncoder:
    """Asks the model of a tokenizer.json that has no words, past its normaliser: spaces are written here."""

    def __init__(self, tokenizer: "HuggingFaceTokenizer") -> None:
        self._tokenizer = tokenizer
        self.dtype = np.dtype(choose_token_dtype(tokenizer.vocab_size))

    def encode(self, texts: pa.Array) -> RaggedTokens:
        """The tokens of each text of a large_string or large_binary column."""
        escaped = pc.replace_substring(texts.cast(pa.large_string()), " ", ESCAPED_SPACE)
        with _pause_garbage_collection():
            return _build_ragged_tokens(self._tokenizer.encode_words(escaped.to_pylist()), self.dtype)


def _build_ragged_tokens(rows: list[list[int]], dtype: "np.dtype[Any]") -> RaggedTokens:
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return RaggedTokens(np.fromiter(chain.from_iterable(rows), dtype, int(lengths.sum())), lengths)
