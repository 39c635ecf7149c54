"""Parts of texts in, the tokens of a tokenizer.json out, with most of its steps taken for all parts at once.

Reads distinct parts, cut as `json_cuts` allows; gives their `RaggedTokens` tokens. What a tokenizer.json costs is mostly not
its model but normalising a text and dividing it into words, which the library does with records of every byte. Here
parts are words (`WordCutFinder`), all are normalised in a few calls, and a part that is one plain word goes to the model
itself; every other part goes to the library as it is.
"""

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from data_pipeline.rules.ragged import compute_offsets
from data_pipeline.tokenize.cuts import decode_code_points
from data_pipeline.tokenize.json_cuts import list_added_tokens, uses_prefix_space, is_bert, is_byte_level
from data_pipeline.tokenize.memo import RaggedTokens
from data_pipeline.tokenize.short_words import get_column_buffers
from data_pipeline.tokenize.word_cuts import WordCutFinder
from llmsys.tokenizer_json import HuggingFaceTokenizer

BETWEEN = "\u2016"
"""Stands between parts while they are normalised: ‖ composes with nothing, and stays as it is."""
MOST_ADDED = 64
CHUNK_BYTES = 1 << 16  # normalised at once: the library keeps a record of every byte
_PREFIXES = ' !"#$%&()*+,-./:;<=>?@[\\]^_`{|}~'  # all of ASCII that is no letter, digit or apostrophe


def has_plain_words(values: dict[str, Any]) -> bool:
    """Whether parts can be cut further and given to the model word by word.

    Words must be GPT-2's or BERT's; added tokens must be no words, and few enough to look for.
    """
    if uses_prefix_space(values) or not (is_byte_level(values) or is_bert(values)):
        return False
    added = [token.strip(" ") for token in list_added_tokens(values)]
    return len(added) <= MOST_ADDED and all(token.isascii() and not token.isalpha() for token in added if token)


class JsonWordEncoder:
    """Encodes parts that `cuts` has made."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, cuts: WordCutFinder, dtype: npt.DTypeLike) -> None:
        self._tokenizer, self._cuts, self._dtype = tokenizer, cuts, np.dtype(dtype)

    def encode(self, parts: pa.Array) -> RaggedTokens:
        """The tokens of each part of a large_binary column."""
        texts = parts.cast(pa.large_string())
        rows, words = self._select_plain_words(texts)
        others = np.setdiff1d(np.arange(len(texts)), rows, assume_unique=True)
        found = self._tokenizer.encode_words(words)
        found += self._tokenizer.encode_batch(texts.take(pa.array(others)).to_pylist())
        lengths = np.fromiter(map(len, found), np.int64, len(found))
        values = np.fromiter(chain.from_iterable(found), self._dtype, int(lengths.sum()))
        return RaggedTokens(values, lengths).take_rows(np.argsort(np.concatenate([rows, others])))

    def _select_plain_words(self, texts: pa.Array) -> tuple[npt.NDArray[np.int64], list[str]]:
        """The rows of the parts that are one plain word each, and what the model is asked for them."""
        rows = np.flatnonzero(~pc.match_substring(texts, BETWEEN).to_numpy(zero_copy_only=False))
        normal = [text for chunk in _iter_chunks(texts.take(pa.array(rows))) for text in self._normalize_chunk(chunk)]
        words = self._strip_edges(normal)
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        odd = compute_offsets(~self._cuts.compute_plain_mask(decode_code_points("".join(words).encode())))
        plain = np.flatnonzero((np.diff(odd[compute_offsets(lengths)]) == 0) & (lengths > 0))
        chosen = [(words if self._cuts.bert else normal)[row] for row in plain.tolist()]
        return rows[plain], chosen if self._cuts.bert else self._tokenizer.encode_bytes_as_pieces(chosen)

    def _strip_edges(self, texts: list[str]) -> list[str]:
        """Texts without what may stand around plain characters in a word: spaces that go, or one in front of it."""
        if self._cuts.bert:
            return [text.strip(" ") for text in texts]
        if self._cuts.gpt2:
            return [text.removeprefix(" ") for text in texts]
        return [text[1:] if text[:1] in _PREFIXES else text for text in texts]

    def _normalize_chunk(self, texts: list[str]) -> list[str]:
        return self._tokenizer.normalize(BETWEEN.join(texts)).split(BETWEEN)


def _iter_chunks(texts: pa.Array) -> Iterator[list[str]]:
    """The texts in lists of about as many bytes, none of which is empty."""
    ends = get_column_buffers(texts)[1]
    edges = np.unique(np.searchsorted(ends, np.arange(0, ends[-1] + CHUNK_BYTES, CHUNK_BYTES)))
    for start, stop in pairwise([*edges[edges < len(texts)].tolist(), len(texts)]):
        yield texts.slice(start, stop - start).to_pylist()
