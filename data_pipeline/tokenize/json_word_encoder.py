"""Encode distinct parts of texts with a tokenizer.json, batching most of its steps.

The cost of a tokenizer.json is mostly normalization and word splitting, for which the library keeps
a record of every byte, and not its model. Here parts are words (`WordCutFinder`) that are
normalized in a few calls. A part that is one plain word goes to the model directly; every other
part goes to the library.

Words are cut where they end in any context. For GPT-2 and its successors, a letter ends a word if
no letter follows, and a digit if no digit follows; a newline ends one if text follows. BERT
separates punctuation and Chinese characters. A cut is before ASCII or a letter, which compose with
no punctuation or white space before them. The library is asked once per character whether it is a
letter.
"""

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from llmsys.data_pipeline.text.ragged_arrays import compute_offsets
from llmsys.data_pipeline.tokenize.cut_points import (
    NEWLINE,
    SPACE,
    Bytes,
    Flags,
    Places,
    decode_code_points,
    is_bert,
    is_byte_level,
    is_gpt2,
    list_added_tokens,
    uses_prefix_space,
)
from llmsys.data_pipeline.tokenize.token_cache import RaggedTokens, get_column_buffers
from llmsys.vocabulary.hugging_face_tokenizer import HuggingFaceTokenizer

Codes = npt.NDArray[np.uint32]

_NO = 1
_YES = 2
_CHINESE = (0x5000, 0x9000)  # whole blocks of characters that BERT separates
# Characters that NFC converts to ASCII: a text with them could contain an added token spelled
# otherwise.
_BECOME_ASCII = ("\u037e".encode(), "\u1fef".encode(), "\u212a".encode())

_ASCII = np.arange(0x81)  # the last value represents all non-ASCII characters
_LETTER = (_ASCII | 0x20 >= 0x61) & (_ASCII | 0x20 <= 0x7A)
_DIGIT = (_ASCII >= 0x30) & (_ASCII <= 0x39)
_PUNCTUATION = (_ASCII > SPACE) & (_ASCII < 0x7F) & ~_LETTER & ~_DIGIT
_SOLID = _LETTER | _DIGIT | _PUNCTUATION
# BERT separates these from their neighbours
_APART = _PUNCTUATION | np.isin(_ASCII, [0x09, 0x0A, 0x0D, 0x20])
_NO_GLUE = _PUNCTUATION & (ord("'") != _ASCII)  # begins no 's or 've


class WordCutFinder:
    """The cuts of one tokenizer with plain words (`has_plain_words`)."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, values: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self.bert = is_bert(values)
        self.gpt2 = not self.bert and is_gpt2(values)
        self._added = [token.encode() for token in list_added_tokens(values) if token.strip(" ")]
        self._plain = np.zeros(0x110000, np.uint8)

    def find_word_starts(self, data: Bytes, ends: Places) -> Flags:
        """Mark the bytes that begin a word in any context. (len(data) + 1,) flags; `ends`
        separate the texts.
        """
        text = data.tobytes()
        codes = decode_code_points(text)
        # Continuation bytes of UTF-8 are 10xxxxxx; all others begin a character.
        places = np.flatnonzero((data & 0xC0) != 0x80)[1:]
        cuts = np.zeros(len(data) + 1, np.bool_)
        cuts[ends] = True
        left, right = np.minimum(codes[:-1], 0x80), np.minimum(codes[1:], 0x80)
        if self.bert:
            apart = (right < 0x80) & (_APART[right] | _APART[left])
            apart |= _is_chinese(codes[:-1]) & _is_chinese(codes[1:])
        else:
            apart = self._find_byte_level_cuts(
                self.compute_plain_mask(codes), left, right, ~cuts[places]
            )
        cuts[places] = apart
        self._drop_cuts_in_added_tokens(text, cuts)
        return cuts

    def _find_byte_level_cuts(
        self, letter: Flags, left: Codes, right: Codes, inside: Flags
    ) -> Flags:
        """Return whether words end between each pair of characters; `inside` marks pairs within
        one text.
        """
        letter_left, letter_right = letter[:-1], letter[1:]
        ends = (right < 0x80) & (letter_left & ~letter_right | _DIGIT[left] & ~_DIGIT[right])
        last = inside & (left == NEWLINE) & (letter_right | _SOLID[right])
        if self.gpt2:
            ends |= _NO_GLUE[left] & letter_right
            # The last white space before a text is a separate word, so that a space can join the
            # next word.
            again = last[1:] & (left[:-1] == NEWLINE)
            ends[:-1] |= again
            last[1:] &= again | letter_left[:-1] | _SOLID[left[:-1]]
        together: Flags = ends | last
        return together

    def compute_plain_mask(self, codes: Codes) -> Flags:
        """Return whether each character is part of one word with letters around it."""
        kinds = self._plain[codes]
        if not kinds.all():
            for code in np.unique(codes[kinds == 0]).tolist():
                self._plain[code] = _YES if self._tokenizer.is_one_word(f"a{chr(code)}a") else _NO
            kinds = self._plain[codes]
        plain: Flags = kinds == _YES
        return plain

    def _drop_cuts_in_added_tokens(self, text: bytes, cuts: Flags) -> None:
        """Remove the cuts inside added tokens: the library searches for these before it splits a
        text.
        """
        if self._added and any(character in text for character in _BECOME_ASCII):
            cuts[:] = False
        for token in self._added:
            place = text.find(token)
            while place >= 0:
                cuts[place + 1 : place + len(token)] = False
                # Occurrences may overlap.
                place = text.find(token, place + 1)


def _is_chinese(codes: Codes) -> Flags:
    return (codes >= _CHINESE[0]) & (codes < _CHINESE[1])


# Separates parts during normalization: ‖ composes with nothing and is not changed.
BETWEEN = "\u2016"
MAX_ADDED = 64
CHUNK_BYTES = 1 << 16  # bytes normalized at once: the library keeps a record of every byte
_PREFIXES = ' !"#$%&()*+,-./:;<=>?@[\\]^_`{|}~'  # ASCII without letters, digits and the apostrophe


def has_plain_words(values: dict[str, Any]) -> bool:
    """Return whether parts can be cut further and passed to the model word by word.

    Words must be GPT-2's or BERT's; added tokens must not be words, and few enough to search for.
    """
    if uses_prefix_space(values) or not (is_byte_level(values) or is_bert(values)):
        return False
    added = [token.strip(" ") for token in list_added_tokens(values)]
    return len(added) <= MAX_ADDED and all(
        token.isascii() and not token.isalpha() for token in added if token
    )


class JsonWordEncoder:
    """Encoder of the parts between `cuts`."""

    def __init__(
        self, tokenizer: HuggingFaceTokenizer, cuts: WordCutFinder, dtype: npt.DTypeLike
    ) -> None:
        self._tokenizer = tokenizer
        self._cuts = cuts
        self._dtype = np.dtype(dtype)

    def encode(self, parts: pa.Array) -> RaggedTokens:
        """Return the tokens of each part of a large_binary column."""
        texts = parts.cast(pa.large_string())
        rows, words = self._select_plain_words(texts)
        others = np.setdiff1d(np.arange(len(texts)), rows, assume_unique=True)
        found = self._tokenizer.encode_words(words)
        found += self._tokenizer.encode_batch(texts.take(pa.array(others)).to_pylist())
        lengths = np.fromiter(map(len, found), np.int64, len(found))
        values = np.fromiter(chain.from_iterable(found), self._dtype, int(lengths.sum()))
        return RaggedTokens(values, lengths).take_rows(np.argsort(np.concatenate([rows, others])))

    def _select_plain_words(self, texts: pa.Array) -> tuple[npt.NDArray[np.int64], list[str]]:
        """Return the rows of the parts that are one plain word each, and the model's input for
        them.
        """
        rows = np.flatnonzero(~pc.match_substring(texts, BETWEEN).to_numpy(zero_copy_only=False))
        normal = [
            text
            for chunk in _iter_chunks(texts.take(pa.array(rows)))
            for text in self._normalize_chunk(chunk)
        ]
        words = self._strip_edges(normal)
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        # Prefix sums of the characters that are not plain: a word without one has equal sums at
        # both ends.
        odd = compute_offsets(
            ~self._cuts.compute_plain_mask(decode_code_points("".join(words).encode()))
        )
        plain = np.flatnonzero((np.diff(odd[compute_offsets(lengths)]) == 0) & (lengths > 0))
        chosen = [(words if self._cuts.bert else normal)[row] for row in plain.tolist()]
        return rows[plain], chosen if self._cuts.bert else self._tokenizer.encode_bytes_as_pieces(
            chosen
        )

    def _strip_edges(self, texts: list[str]) -> list[str]:
        """Return the texts without what may surround plain characters in a word: removed spaces,
        or a leading one.
        """
        if self._cuts.bert:
            return [text.strip(" ") for text in texts]
        if self._cuts.gpt2:
            return [text.removeprefix(" ") for text in texts]
        return [text[1:] if text[:1] in _PREFIXES else text for text in texts]

    def _normalize_chunk(self, texts: list[str]) -> list[str]:
        return self._tokenizer.normalize(BETWEEN.join(texts)).split(BETWEEN)


def _iter_chunks(texts: pa.Array) -> Iterator[list[str]]:
    """Yield non-empty lists of texts of about equal size in bytes."""
    ends = get_column_buffers(texts)[1]
    edges = np.unique(np.searchsorted(ends, np.arange(0, ends[-1] + CHUNK_BYTES, CHUNK_BYTES)))
    for start, stop in pairwise([*edges[edges < len(texts)].tolist(), len(texts)]):
        yield texts.slice(start, stop - start).to_pylist()
