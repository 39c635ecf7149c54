"""Encode columns of texts many times faster than the tokenizer's library does text by text.

A text is cut where no token can cross the cut (`tokenize.cut_points`). Known parts are looked up by
their bytes, and new ones are cut again, which leaves little work for the library.

Reads Arrow columns of texts and a tokenizer; returns `RaggedTokens`.

Invariants:
- The ids are those that the library returns for the whole text.
- A tokenizer that does not allow the cuts is left to the library, with the reason in `reason`.
"""

from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from llmsys.data_pipeline.executors.garbage_collection import pause_collection
from llmsys.data_pipeline.tokenize.cut_points import (
    ESCAPED_SPACE,
    Bytes,
    CutPointFinder,
    Flags,
    Places,
    find_cut_problem,
    find_cuts_before_spaces,
    has_prepend_normalizer,
    is_sentencepiece_bpe,
)
from llmsys.data_pipeline.tokenize.gigatoken_encoder import (
    GigatokenEncoder,
    find_gigatoken_problem,
)
from llmsys.data_pipeline.tokenize.token_cache import RaggedTokens, TokenCache, get_column_buffers
from llmsys.data_pipeline.tokenize.tokenizer_files import (
    SentencePieceFacts,
    parse_model_facts,
    remove_normalizer,
)
from llmsys.dataset.token_shards import choose_token_dtype
from llmsys.vocabulary.tokenizer import SentencePieceTokenizer, Tokenizer

if TYPE_CHECKING:
    from llmsys.vocabulary.hugging_face_tokenizer import HuggingFaceTokenizer

# Mean length from which an array per text costs less than a list of Python integers.
LONG_TEXT_BYTES = 500


class LibraryEncoder:
    """Encoder that passes every text to the tokenizer's library."""

    def __init__(self, tokenizer: Tokenizer, reason: str) -> None:
        self.reason: str | None = reason
        self._tokenizer = tokenizer
        self.dtype = np.dtype(choose_token_dtype(tokenizer.vocab_size))

    def encode(self, texts: pa.Array) -> RaggedTokens:
        """Return the tokens of each text of a large_string or large_binary column."""
        rows = texts.cast(pa.large_string()).to_pylist()
        long = len(get_column_buffers(texts)[0]) > LONG_TEXT_BYTES * len(rows)
        if long and isinstance(self._tokenizer, SentencePieceTokenizer):
            arrays = self._tokenizer.encode_arrays(rows)
            return RaggedTokens(
                np.concatenate(arrays).astype(self.dtype),
                np.array([len(ids) for ids in arrays], np.int64),
            )
        # with lists by the hundred thousand the search for cycles takes a third of the time
        with pause_collection():
            return _build_ragged_tokens(self._tokenizer.encode_batch(rows), self.dtype)


class PieceModelEncoder:
    """Encoder for a tokenizer.json without pre-tokenizer: calls its model, and replaces its
    normalizer.

    Spaces become U+2581 here, as the normalizer would write them.
    """

    def __init__(self, tokenizer: "HuggingFaceTokenizer") -> None:
        self._tokenizer = tokenizer
        self.dtype = np.dtype(choose_token_dtype(tokenizer.vocab_size))

    def encode(self, texts: pa.Array) -> RaggedTokens:
        """Return the tokens of each text of a large_string or large_binary column."""
        escaped = pc.replace_substring(texts.cast(pa.large_string()), " ", ESCAPED_SPACE)
        # with lists by the hundred thousand the search for cycles takes a third of the time
        with pause_collection():
            return _build_ragged_tokens(
                self._tokenizer.encode_words(escaped.to_pylist()), self.dtype
            )


def _build_ragged_tokens(rows: list[list[int]], dtype: "np.dtype[Any]") -> RaggedTokens:
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return RaggedTokens(np.fromiter(chain.from_iterable(rows), dtype, int(lengths.sum())), lengths)


if TYPE_CHECKING:
    from llmsys.vocabulary.hugging_face_tokenizer import HuggingFaceTokenizer

# Approximate limit of each of the two caches of a process.
CACHE_BYTES = 100_000_000

EncoderKind = Literal["columns", "library"]


class ColumnEncoder(Protocol):
    """An encoder of columns of texts."""

    reason: str | None
    """Why the library encodes every text; None if it does not."""

    def encode(self, texts: pa.Array) -> RaggedTokens:
        """Encode a column of texts, without begin and end ids.

        Args:
            texts: large_string, without nulls.

        Returns:
            The tokens of each text, the same ids as the tokenizer gives.
        """


def build_column_encoder(tokenizer: Tokenizer, kind: EncoderKind = "columns") -> ColumnEncoder:
    """Build the fastest encoder with the tokenizer's own ids.

    Args:
        tokenizer: The tokenizer.
        kind: `columns` by words where that is proven to give the same ids, `library` never.

    Returns:
        The encoder; it has the reason where it calls the library.
    """
    if kind == "library":
        return LibraryEncoder(tokenizer, "the config selects it")
    if not isinstance(tokenizer, SentencePieceTokenizer):
        return _build_json_encoder(tokenizer)
    facts = parse_model_facts(tokenizer.model)
    rules = CutPointFinder(tokenizer.get_text_pieces().values(), facts.byte_fallback)
    if problem := _find_model_problem(tokenizer, facts) or rules.problem:
        return LibraryEncoder(tokenizer, problem)
    library = SentencePieceTokenizer(remove_normalizer(tokenizer.model))
    rewrites = tokenizer if facts.has_rules or facts.trims_spaces else None
    return SentencePieceColumnEncoder(
        LibraryEncoder(library, ""), rules, prefix=facts.adds_prefix, rewrites=rewrites
    )


def _build_json_encoder(tokenizer: Tokenizer) -> ColumnEncoder:
    from llmsys.vocabulary.hugging_face_tokenizer import (
        HuggingFaceTokenizer,
    )  # imported here because its library is not always needed

    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return LibraryEncoder(
            tokenizer, "only the code of the tokenizer knows where a text can be cut"
        )
    values = tokenizer.to_dict()
    if is_sentencepiece_bpe(values):
        special = (token["content"] for token in values["added_tokens"])  # a text may contain one
        pieces = [
            piece.replace(ESCAPED_SPACE, " ")
            for piece in (*tokenizer.get_text_pieces().values(), *special)
        ]
        rules = CutPointFinder(pieces, byte_fallback=True)
        if rules.problem is None:
            return SentencePieceColumnEncoder(
                PieceModelEncoder(tokenizer), rules, prefix=has_prepend_normalizer(values)
            )
        return LibraryEncoder(tokenizer, rules.problem)
    if find_gigatoken_problem(values) is None:
        # A tokenizer that it cannot load, or that it encodes otherwise, is encoded as before.
        with suppress(ValueError):
            return GigatokenEncoder(values, tokenizer, _build_word_encoder(tokenizer, values))
    return _build_word_encoder(tokenizer, values)


def _build_word_encoder(tokenizer: "HuggingFaceTokenizer", values: dict[str, Any]) -> ColumnEncoder:
    """Build the encoder by words of a tokenizer.json, or the library's."""
    problem = find_cut_problem(values)
    return (
        JsonColumnEncoder(tokenizer, values)
        if problem is None
        else LibraryEncoder(tokenizer, problem)
    )


def _find_model_problem(tokenizer: SentencePieceTokenizer, facts: SentencePieceFacts) -> str | None:
    """Return the reason why no cut of a text is known to be safe; None if those of
    `CutPointFinder` are.
    """
    if facts.kind == "unigram":
        # 27 of 600 crawled pages had other ids word by word, where two ways to cut a word are
        # nearly equally likely.
        return (
            "a unigram model sums 32-bit scores over the whole text, so its words are not "
            "independent"
        )
    if facts.kind != "bpe":
        return f"it is a model of kind {facts.kind}"
    if facts.space_ends_word or not facts.escapes_spaces:
        return "its spaces are not at the start of words"
    # The library resolves disabled pieces with one table for the whole text.
    return "it has disabled pieces" if tokenizer.has_unused_pieces else None


class SentencePieceColumnEncoder:
    """Encoder for SentencePiece's BPE, native or written as a tokenizer.json.

    Args:
        library: encodes each distinct part once, without normalization.
        rules: the cuts that the vocabulary allows.
        prefix: whether the model puts a space before every text.
        rewrites: tokenizer that normalizes the characters of texts; None if the model has no such
            rules.
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
        self._prefix = prefix
        self._rewrites = rewrites
        parts = _CachedEncoder(
            rules.find_fine_cuts, library.encode, TokenCache(library.dtype, CACHE_BYTES)
        )
        self._words = _CachedEncoder(
            rules.find_coarse_cuts, parts.encode, TokenCache(library.dtype, CACHE_BYTES)
        )

    def encode(self, texts: pa.Array) -> RaggedTokens:
        """Return the tokens of each text."""
        return self._words.encode(self._normalize_texts(texts))

    def _normalize_texts(self, texts: pa.Array) -> pa.Array:
        """Return the texts as the model sees them, with U+0020 for the space that it writes as
        U+2581.
        """
        if self._rewrites is not None:
            texts = pa.array(self._rewrites.normalize(texts.to_pylist()), pa.large_string())
        elif self._prefix:
            # The library puts no space before an empty text.
            prefix = pc.if_else(pc.equal(pc.binary_length(texts), 0), "", " ").cast(
                pa.large_string()
            )
            texts = pc.binary_join_element_wise(prefix, texts, pa.scalar("", pa.large_string()))
        if pc.any(pc.match_substring(texts, ESCAPED_SPACE)).as_py():
            return pc.replace_substring(texts, ESCAPED_SPACE, " ")
        return texts


class JsonColumnEncoder:
    """Encoder for a tokenizer.json that splits texts into words: encodes each distinct word once.

    A word includes the spaces before it.

    Args:
        tokenizer: the tokenizer.
        values: its tokenizer.json, parsed once because that is slow.
    """

    reason: str | None = None

    def __init__(self, tokenizer: "HuggingFaceTokenizer", values: dict[str, Any]) -> None:
        from llmsys.data_pipeline.tokenize.json_word_encoder import (
            JsonWordEncoder,
            WordCutFinder,
            has_plain_words,
        )

        dtype = np.dtype(choose_token_dtype(tokenizer.vocab_size))
        below = LibraryEncoder(tokenizer, "").encode
        if has_plain_words(values):
            cuts = WordCutFinder(tokenizer, values)
            below = _CachedEncoder(
                cuts.find_word_starts,
                JsonWordEncoder(tokenizer, cuts, dtype).encode,
                TokenCache(dtype, CACHE_BYTES),
            ).encode
        self._words = _CachedEncoder(find_cuts_before_spaces, below, TokenCache(dtype, CACHE_BYTES))

    def encode(self, texts: pa.Array) -> RaggedTokens:
        """Return the tokens of each text."""
        return self._words.encode(texts)


class _CachedEncoder:
    """Encoder that cuts texts into parts, looks up the distinct ones, and passes new ones to the
    level below.
    """

    def __init__(
        self,
        cuts: Callable[[Bytes, Places], Flags],
        below: Callable[[pa.Array], RaggedTokens],
        cache: TokenCache,
    ) -> None:
        self._cuts = cuts
        self._below = below
        self._cache = cache

    def encode(self, texts: pa.Array) -> RaggedTokens:
        """Return the tokens of each text of a large_string or large_binary column without nulls."""
        data, ends = get_column_buffers(texts)
        if not len(data):
            return RaggedTokens(np.zeros(0, self._cache.dtype), np.zeros(len(texts), np.int64))
        flags = self._cuts(data, ends)
        flags[ends] = True
        edges = np.flatnonzero(flags)
        parts = pa.Array.from_buffers(
            pa.large_binary(), len(edges) - 1, [None, pa.py_buffer(edges), pa.py_buffer(data)]
        )
        return self._cache.encode_parts(parts, self._below).merge_rows(np.searchsorted(edges, ends))
