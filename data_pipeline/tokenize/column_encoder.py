"""Texts given to the tokenizer's own library: whole ones by rule, and the new words that `columns` has not met yet.

Reads Arrow columns of texts and a tokenizer; gives `RaggedTokens` rows of its tokens.

A column of texts in, their tokens out: the library's own ids, many times faster than asking it for each text.

Reads Arrow columns and a tokenizer; gives `RaggedTokens` rows of tokens. A text is cut where no token can lie across
the cut (`CutPointFinder`, `json_cuts`), parts that came before are found by their bytes, and what is new is cut again,
which leaves little for the library to do. Promises: the ids are those that the library gives for the whole text; a
tokenizer that forbids the cuts is left to the library, with the rule in `reason`.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_pipeline.tokenize.cut_points import ESCAPED_SPACE, Bytes, CutPointFinder, Flags, Places
from data_pipeline.tokenize.json_cut_points import (
    find_cut_problem,
    find_cuts_before_spaces,
    has_prepend_normalizer,
    is_sentencepiece_bpe,
)
from data_pipeline.tokenize.sentencepiece_model import SentencePieceFacts, parse_model_facts, remove_normalizer
from data_pipeline.tokenize.short_word_table import get_column_buffers
from data_pipeline.tokenize.token_cache import RaggedTokens, TokenCache
from llmsys.token_shards import choose_token_dtype
from llmsys.tokenizer import SentencePieceTokenizer, Tokenizer

if TYPE_CHECKING:
    from llmsys.hugging_face_tokenizer import HuggingFaceTokenizer

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
            return RaggedTokens(
                np.concatenate(arrays).astype(self.dtype), np.array([len(ids) for ids in arrays], np.int64)
            )
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


if TYPE_CHECKING:
    from llmsys.hugging_face_tokenizer import HuggingFaceTokenizer

MEMO_BYTES = 100_000_000
"""Of each of the two memories of one process, about."""

EncoderKind = Literal["columns", "library"]


class ColumnEncoder(Protocol):
    """Turns columns of texts into tokens."""

    reason: str | None
    """Why the library is asked for every text; None when it is not."""

    def encode(self, texts: pa.Array) -> RaggedTokens:
        """The tokens of each text of a large_string column, without begin or end ids."""


def build_column_encoder(tokenizer: Tokenizer, kind: EncoderKind = "columns") -> ColumnEncoder:
    """The fastest encoder that gives the tokenizer's own ids."""
    if kind == "library":
        return LibraryEncoder(tokenizer, "the config asks for it")
    if not isinstance(tokenizer, SentencePieceTokenizer):
        return _build_json_encoder(tokenizer)
    facts = parse_model_facts(tokenizer.model)
    rules = CutPointFinder(tokenizer.get_text_pieces().values(), facts.byte_fallback)
    if problem := _find_model_problem(tokenizer, facts) or rules.problem:
        return LibraryEncoder(tokenizer, problem)
    library = SentencePieceTokenizer(remove_normalizer(tokenizer.model))
    rewrites = tokenizer if facts.has_rules or facts.trims_spaces else None
    return SentencePieceColumnEncoder(LibraryEncoder(library, ""), rules, prefix=facts.adds_prefix, rewrites=rewrites)


def _build_json_encoder(tokenizer: Tokenizer) -> ColumnEncoder:
    from llmsys.hugging_face_tokenizer import HuggingFaceTokenizer  # its library is not always needed

    assert isinstance(tokenizer, HuggingFaceTokenizer)
    values = tokenizer.to_dict()
    if is_sentencepiece_bpe(values):
        special = (token["content"] for token in values["added_tokens"])  # a text may spell one
        pieces = [piece.replace(ESCAPED_SPACE, " ") for piece in (*tokenizer.get_text_pieces().values(), *special)]
        rules = CutPointFinder(pieces, byte_fallback=True)
        if rules.problem is None:
            return SentencePieceColumnEncoder(
                PieceModelEncoder(tokenizer), rules, prefix=has_prepend_normalizer(values)
            )
        return LibraryEncoder(tokenizer, rules.problem)
    problem = find_cut_problem(values)
    return JsonColumnEncoder(tokenizer, values) if problem is None else LibraryEncoder(tokenizer, problem)


def _find_model_problem(tokenizer: SentencePieceTokenizer, facts: SentencePieceFacts) -> str | None:
    """Why no cut of a text is known to be safe; None when those of `CutPointFinder` are."""
    if facts.kind == "unigram":
        # Of 600 crawled pages 27 had other ids word by word, where two ways to cut a word are nearly as likely.
        return "a unigram model adds up 32-bit scores over the whole text, so that its words are not independent"
    if facts.kind != "bpe":
        return f"it is a model of kind {facts.kind}"
    if facts.space_ends_word or not facts.escapes_spaces:
        return "its spaces are not written in front of words"
    # What becomes of a piece that is switched off depends on the whole text: the library keeps one table for it.
    return "it has pieces that are switched off" if tokenizer.has_unused_pieces else None


class SentencePieceColumnEncoder:
    """SentencePiece's BPE, its own or written as a tokenizer.json: cut by what its pieces join.

    Texts become what the model sees, by the tokenizer that `rewrites` characters or by the space put before them where
    `prefix` says so; `library` does neither, and encodes each distinct part once.
    """

    reason: str | None = None

    def __init__(
        self,
        library: LibraryEncoder | PieceModelEncoder,
        rules: CutPointFinder,
        *,
        prefix: bool,
        rewrites: SentencePieceTokenizer | None = None,
    ) -> None:
        self._prefix, self._rewrites = prefix, rewrites
        parts = _CachedEncoder(rules.find_fine_cuts, library.encode, TokenCache(library.dtype, MEMO_BYTES))
        self._words = _CachedEncoder(rules.find_coarse_cuts, parts.encode, TokenCache(library.dtype, MEMO_BYTES))

    def encode(self, texts: pa.Array) -> RaggedTokens:
        """The tokens of each text."""
        return self._words.encode(self._normalize_texts(texts))

    def _normalize_texts(self, texts: pa.Array) -> pa.Array:
        """Texts as the model sees them, with U+0020 for the space that it writes as U+2581."""
        if self._rewrites is not None:
            texts = pa.array(self._rewrites.normalize(texts.to_pylist()), pa.large_string())
        elif self._prefix:
            prefix = pc.if_else(pc.equal(pc.binary_length(texts), 0), "", " ").cast(pa.large_string())
            texts = pc.binary_join_element_wise(prefix, texts, pa.scalar("", pa.large_string()))
        if pc.any(pc.match_substring(texts, ESCAPED_SPACE)).as_py():
            return pc.replace_substring(texts, ESCAPED_SPACE, " ")
        return texts


class JsonColumnEncoder:
    """A tokenizer.json that divides texts into words: encodes each distinct word with the spaces before it once.

    `values` are the tokenizer's, which take a while to read.
    """

    reason: str | None = None

    def __init__(self, tokenizer: "HuggingFaceTokenizer", values: dict[str, Any]) -> None:
        from data_pipeline.tokenize.json_word_encoder import JsonWordEncoder, WordCutFinder, has_plain_words

        dtype = np.dtype(choose_token_dtype(tokenizer.vocab_size))
        below = LibraryEncoder(tokenizer, "").encode
        if has_plain_words(values):
            cuts = WordCutFinder(tokenizer, values)
            below = _CachedEncoder(
                cuts.find_word_starts, JsonWordEncoder(tokenizer, cuts, dtype).encode, TokenCache(dtype, MEMO_BYTES)
            ).encode
        self._words = _CachedEncoder(find_cuts_before_spaces, below, TokenCache(dtype, MEMO_BYTES))

    def encode(self, texts: pa.Array) -> RaggedTokens:
        """The tokens of each text."""
        return self._words.encode(texts)


class _CachedEncoder:
    """Cuts texts into parts, looks the distinct ones up, and asks the level below for those that are new."""

    def __init__(
        self, cuts: Callable[[Bytes, Places], Flags], below: Callable[[pa.Array], RaggedTokens], memo: TokenCache
    ) -> None:
        self._cuts, self._below, self._memo = cuts, below, memo

    def encode(self, texts: pa.Array) -> RaggedTokens:
        """The tokens of each text of a large_string or large_binary column without nulls."""
        data, ends = get_column_buffers(texts)
        if not len(data):
            return RaggedTokens(np.zeros(0, self._memo.dtype), np.zeros(len(texts), np.int64))
        flags = self._cuts(data, ends)
        flags[ends] = True
        places = np.flatnonzero(flags)
        parts = pa.Array.from_buffers(
            pa.large_binary(), len(places) - 1, [None, pa.py_buffer(places), pa.py_buffer(data)]
        )
        return self._memo.encode_parts(parts, self._below).merge_rows(np.searchsorted(places, ends))
