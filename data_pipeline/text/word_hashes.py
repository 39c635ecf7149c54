"""Hash the simplified words of texts, and locate each word.

Words are separated by white space after simplification (lower case, numbers as 0, no punctuation,
no accents). In scripts without spaces each character is a word. Invisible characters and
compatibility forms hide no word.

What a reader would not see cannot hide the words of an evaluation item. Characters without width
are removed. Compatibility forms (full-width letters, ligatures) become the letters they show. A
word that a hyphen breaks at the end of a line is read both ways: broken, and as one word.

Invariants:
    - A bounded cache maps chunks to their words. It changes no result.
    - A text with rejoined words has the length of the original, so that positions stay valid.
"""

import re
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from llmsys.data_pipeline.text.ragged_arrays import (
    GrowableArray,
    Integers,
    compute_offsets,
    compute_positions,
)
from llmsys.data_pipeline.text.simplify_text import simplify_text

# Blank letters and marks: default ignorable characters outside the category Cf.
_BLANK_LETTERS = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"
_MARK_SELECTORS = "\u180b-\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef"
_SOFT_HYPHEN = "\u00ad"
_HYPHENS = f"\\-\u2010\u2011\u00ac{_SOFT_HYPHEN}"

MAX_BREAKS_TOGETHER = 3  # within one n-gram; readings grow as 2^breaks


@cache
def _list_invisible_characters() -> str:
    """Return the invisible characters as the content of a character class of `re`."""
    codes = [
        code for code in range(0x80, sys.maxunicode + 1) if unicodedata.category(chr(code)) == "Cf"
    ]
    ranges: list[list[int]] = []
    for code in codes:
        if ranges and code == ranges[-1][1] + 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return (
        "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges)
        + _BLANK_LETTERS
        + _MARK_SELECTORS
    )


@cache
def _build_invisible_pattern() -> re.Pattern[str]:
    return re.compile(f"[{_list_invisible_characters()}]+")


@cache
def _build_break_pattern() -> re.Pattern[str]:
    """Match a hyphen between two letters with white space after it: extraction turns a line end
    into a space.
    """
    letter = r"[^\W\d_]"
    invisible = _list_invisible_characters()
    return re.compile(
        rf"(?<={letter})[{invisible}]*[{_HYPHENS}][{invisible}]*\s[\s{invisible}]*(?={letter})"
    )


_DASHES = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"))


def normalize_letters(chunk: str) -> str:
    """Return the chunk without invisible characters and with compatibility forms as the letters
    they show.
    """
    if chunk.isascii():
        return chunk
    return unicodedata.normalize("NFKC", _build_invisible_pattern().sub("", chunk)).translate(
        _DASHES
    )


def iter_joined_readings(text: str) -> Iterator[str]:
    """Yield the text with broken words rejoined: all of them, then each combination of neighbouring
    ones.

    A break may also be the hyphen of a compound at a line end, so that both readings are given.
    Soft hyphens replace what is removed.

    Args:
        text: The text.

    Yields:
        Texts of the same length. None if the text has no break.
    """
    breaks = (
        [found.span() for found in _build_break_pattern().finditer(text)]
        if _may_have_breaks(text)
        else []
    )
    period = min(len(breaks), MAX_BREAKS_TOGETHER)
    for reading in range((1 << period) - 1, 0, -1):
        pieces = []
        position = 0
        for number, (begin, end) in enumerate(breaks):
            if reading >> number % period & 1:
                pieces += [text[position:begin], _SOFT_HYPHEN * (end - begin)]
                position = end
        yield "".join([*pieces, text[position:]])


def _may_have_breaks(text: str) -> bool:
    return any(hyphen in text for hyphen in ("-", "\u2010", "\u2011", "\u00ac", _SOFT_HYPHEN))


Hashes = npt.NDArray[np.uint64]

# Thai, Lao, Myanmar, Khmer, kana, Han. Hangul has spaces.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff"
)
_HAS_UNSPACED = re.compile(f"[{_UNSPACED}]")
_CHUNK = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")
_SPACED_CHUNK = re.compile(r"\S+")


class HashedWords(NamedTuple):
    """Words of D documents, concatenated. Document d has the words offsets[d] to offsets[d + 1]."""

    hashes: Hashes
    offsets: Integers


class WordHasher:
    """Splits texts into words and caches every chunk.

    Args:
        memo_chunks: Maximum number of cached chunks, about 200 bytes each. The cache is cleared
            above it.
        memo_characters: Maximum number of characters of all cached chunks.
        ignores_disguise: Ignore invisible characters and compatibility forms.
    """

    def __init__(
        self,
        memo_chunks: int = 500_000,
        memo_characters: int = 8_000_000,
        *,
        ignores_disguise: bool = True,
    ) -> None:
        self._limits = memo_chunks, memo_characters
        self._ignores_disguise = ignores_disguise
        self._reset_cache()

    def hash_words(self, texts: Sequence[str]) -> HashedWords:
        """Split texts into words and hash them.

        Args:
            texts: D texts.

        Returns:
            The hashes of the words of each text. They depend on the words and on `ignores_disguise`
            only, so hashes of other processes may be compared with them.
        """
        if len(self._memo) > self._limits[0] or self._characters > self._limits[1]:
            self._reset_cache()
        chunks = [_split_chunks(text) for text in texts]
        hashes, counts = self._look_up_chunks(list(chain.from_iterable(chunks)))
        return HashedWords(hashes, compute_offsets(counts)[compute_offsets(list(map(len, chunks)))])

    def get_word_spans(self, text: str) -> tuple[Integers, Integers]:
        """Locate the words of a text.

        Args:
            text: One text.

        Returns:
            Begin and end of each word in characters, int64 (W,) each, for the same W words as
            `hash_words` finds. Words of one chunk share its span.
        """
        pattern = _CHUNK if _HAS_UNSPACED.search(text) else _SPACED_CHUNK
        found = [match.span() for match in pattern.finditer(text)]
        counts = self._look_up_chunks([text[begin:end] for begin, end in found])[1]
        spans = np.repeat(np.array(found, np.int64).reshape(-1, 2), counts, axis=0)
        return spans[:, 0], spans[:, 1]

    def _look_up_chunks(self, chunks: list[str]) -> tuple[Hashes, Integers]:
        """Return the hashes of the words of all chunks, concatenated, and the number of words
        per chunk.
        """
        ids = np.fromiter(map(self._memo.get, chunks, repeat(-1)), np.int64, len(chunks))
        unseen = np.flatnonzero(ids < 0)
        if len(unseen):
            self._cache_chunks(list(dict.fromkeys(chunks[number] for number in unseen.tolist())))
            ids[unseen] = [self._memo[chunks[number]] for number in unseen.tolist()]
        counts = self._counts.view[ids]
        return self._hashes.view[compute_positions(self._starts.view[ids], counts)], counts

    def _cache_chunks(self, chunks: list[str]) -> None:
        if self._ignores_disguise:
            words = [_split_chunks(simplify_text(normalize_letters(chunk))) for chunk in chunks]
        else:
            words = [simplify_text(chunk).split() for chunk in chunks]
        counts = np.fromiter(map(len, words), np.int64, len(words))
        self._starts.extend(len(self._hashes) + compute_offsets(counts)[:-1])
        self._counts.extend(counts)
        # Evaluation items may hold lone surrogates.
        encoded = (word.encode("utf-8", "surrogatepass") for word in chain.from_iterable(words))
        self._hashes.extend(
            np.fromiter(map(xxhash.xxh3_64_intdigest, encoded), np.uint64, int(counts.sum()))
        )
        self._memo.update(
            zip(chunks, range(len(self._memo), len(self._memo) + len(chunks)), strict=True)
        )
        self._characters += sum(map(len, chunks))

    def _reset_cache(self) -> None:
        self._memo: dict[str, int] = {}
        self._characters = 0
        self._starts = GrowableArray(np.int64)
        self._counts = GrowableArray(np.int64)
        self._hashes = GrowableArray(np.uint64)


def _split_chunks(text: str) -> list[str]:
    return _CHUNK.findall(text) if _HAS_UNSPACED.search(text) else text.split()


_FACTOR = 0x9E3779B97F4A7C15  # odd: its powers are never 0
_MIX = np.uint64(0xBF58476D1CE4E5B9)


def iter_ngram_hashes(words: Hashes, longest: int) -> Iterator[tuple[int, Hashes]]:
    """Hash the n-grams at each position, for every n.

    The hash is the sum of word hashes times powers of an odd number modulo 2^64, mixed with n, so
    that n-grams of different lengths differ. Equal hashes count as equal n-grams: among 10^12 words
    and 10^7 n-grams of items, one false match is expected every other time.

    Args:
        words: Word hashes, uint64 of shape (W,). N-grams cross document borders.
        longest: Largest n.

    Yields:
        (n, hashes of shape (W - n + 1,)) for n = 1 … longest.
    """
    sums = np.zeros(len(words), np.uint64)
    factor = 1
    for n in range(1, longest + 1):
        if n > len(words):
            return
        sums = sums[: len(words) - n + 1] + words[n - 1 :] * np.uint64(factor)
        factor = factor * _FACTOR & ((1 << 64) - 1)
        mixed = (sums ^ (sums >> np.uint64(32))) * _MIX + np.uint64(n)
        yield n, mixed ^ (mixed >> np.uint64(29))
