"""Chunks of raw text in, the words of their simplified forms out, for many chunks at once and as columns.

A chunk such as "State-of-the-art," becomes parts ("state", "of", "the", "art"), and a part is nearly always one word.
The few that spaCy may split (contractions without their apostrophe, numbers with a unit, symbols) are given to it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_pipeline.dedup.simplify import Codes, code_points, fold
from data_pipeline.rules.chunk import EnglishChunks
from data_pipeline.rules.vocabulary import HASH_BASE

Hashes = np.ndarray[Any, np.dtype[np.uint64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]

_UNIT_AT_END = re.compile(r"\d\D{1,8}\Z")  # spaCy splits units off: "5km" is two words
_SPACE, _NEWLINE = 32, 10
_MOST_ASKED = 200_000  # parts about which the answer is remembered at most


@dataclass(frozen=True)
class PartWords:
    """The words of some chunks, one after another.

    Attributes:
        counts: words per chunk.
        hashes: hash of each word.
        sizes: UTF-8 bytes of each word, and one more.
        folded: the simplified chunks.
        splits: the words of the parts that are more than one word, or none.
    """

    counts: Integers
    hashes: Hashes
    sizes: Integers
    folded: str
    splits: dict[str, list[str]]

    def spelled(self) -> list[bytes]:
        """Per chunk its words joined by spaces, UTF-8."""
        splits = self.splits
        return [
            " ".join([" ".join(splits[part]) if part in splits else part for part in line.split()]).encode()
            for line in self.folded.split("\n")
        ]


class PartSplitter:
    """Simplifies and splits chunks, remembering only what spaCy was asked."""

    def __init__(self) -> None:
        self._english = EnglishChunks()
        self._whole: set[str] = set()  # parts that are one word although that does not show in their letters
        self._splits: dict[str, list[str]] = {}  # parts that are several
        self._exceptions: Hashes | None = None

    def split(self, chunks: list[str]) -> PartWords:
        """The words of each chunk; chunks hold no white space."""
        folded = fold("\n".join(chunks))
        codes = code_points(folded)
        filled = (codes != _SPACE) & (codes != _NEWLINE)
        edges = np.flatnonzero(np.diff(filled, prepend=False, append=False))
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        lines = np.searchsorted(np.flatnonzero(codes == _NEWLINE), starts)
        hashes, sizes = _describe(codes[filled], lengths)
        splits = self._splits_of(folded, codes, starts, lengths, hashes)
        counts = np.ones(len(starts), np.int64)
        counts[list(splits)] = list(map(len, splits.values()))
        hashes, sizes = _with_splits(hashes, sizes, counts, splits)
        per_chunk = np.bincount(lines, counts, len(chunks)).astype(np.int64)
        return PartWords(per_chunk, hashes, sizes, folded, self._splits)

    def _splits_of(
        self, folded: str, codes: Codes, starts: Integers, lengths: Integers, hashes: Hashes
    ) -> dict[int, list[str]]:
        """The words of the parts that are more than one, by the number of the part."""
        if len(self._whole) + len(self._splits) > _MOST_ASKED:
            self._whole, self._splits = set(), {}
        unsure = np.flatnonzero(~_all_letters(codes, starts, lengths) | np.isin(hashes, self._exception_hashes()))
        bounds = zip(starts[unsure].tolist(), (starts + lengths)[unsure].tolist(), strict=True)
        parts = [folded[start:end] for start, end in bounds]
        self._ask([part for part in dict.fromkeys(parts) if part not in self._whole and part not in self._splits])
        splits = self._splits
        numbered = zip(unsure.tolist(), parts, strict=True)
        return {number: splits[part] for number, part in numbered if part in splits}

    def _ask(self, parts: list[str]) -> None:
        """Find out about parts that are not known yet."""
        hard = [part for part in parts if not self._is_word(part)]
        self._whole.update(parts)
        split = zip(hard, self._english.split(hard), strict=True)
        self._splits.update((part, words) for part, words in split if words != [part])
        self._whole.difference_update(self._splits)

    def _is_word(self, part: str) -> bool:
        """Whether spaCy surely leaves a part whole: letters alone, or ASCII letters and digits that end in no unit."""
        if part in self._english.exceptions:
            return False
        return part.isalpha() or (part.isascii() and part.isalnum() and _UNIT_AT_END.search(part) is None)

    def _exception_hashes(self) -> Hashes:
        if self._exceptions is None:
            self._exceptions = spelling_hashes(sorted(self._english.exceptions))
        return self._exceptions


def _all_letters(codes: Codes, starts: Integers, lengths: Integers) -> Any:
    """Whether each part has only ASCII letters, which are lower case here, or is the number 0."""
    letters = offsets_of((codes >= ord("a")) & (codes <= ord("z")))
    is_zero = (codes[starts] == ord("0")) & (lengths == 1)
    return (letters[starts + lengths] - letters[starts] == lengths) | is_zero


def _with_splits(
    hashes: Hashes, sizes: Integers, counts: Integers, splits: dict[int, list[str]]
) -> tuple[Hashes, Integers]:
    """Put the words of the split parts in the place of the parts."""
    if not splits:
        return hashes, sizes
    words = [word for found in splits.values() for word in found]
    hashes, sizes = np.repeat(hashes, counts), np.repeat(sizes, counts)
    split = np.zeros(len(counts), np.bool_)
    split[list(splits)] = True
    places = np.repeat(split, counts)
    hashes[places], sizes[places] = _describe(code_points("".join(words)), np.array(list(map(len, words)), np.int64))
    return hashes, sizes


def spelling_hashes(words: Sequence[str]) -> Hashes:
    """Return the hash of each word c1…cn, none empty: the sum of (code point + 1) · base^(n-i) modulo 2^64."""
    return _describe(code_points("".join(words)), np.fromiter(map(len, words), np.int64, len(words)))[0]


def _describe(codes: Codes, lengths: Integers) -> tuple[Hashes, Integers]:
    """Hash, and UTF-8 bytes with one more, of words that follow each other without a gap."""
    if not len(lengths):
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    ends = np.cumsum(lengths)
    powers = np.full(int(lengths.max()), HASH_BASE)
    powers[0] = 1
    powers = np.multiply.accumulate(powers)
    exponents = np.repeat(ends, lengths) - np.arange(1, len(codes) + 1)
    hashes = np.add.reduceat((codes.astype(np.uint64) + np.uint64(1)) * powers[exponents], ends - lengths)
    wide = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    return hashes, np.add.reduceat(wide, ends - lengths) + 1


def offsets_of(counts: Any) -> Integers:
    """Where each of the groups starts, and where the last one ends."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets
