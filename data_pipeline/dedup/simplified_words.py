"""Split texts into the words of their simplified form, as columns of hashes or spellings.

Simplification works between white space, and spaCy splits there too. So the words of a text are the
runs between the spaces of its folded characters, and the pieces of the few runs that are several
words. A run such as "state" in "State-of-the-art," is nearly always one word. Runs that may be
several (contractions without apostrophe, numbers with a unit, symbols) are passed to spaCy, each
once.

Rolling hashes of spans of characters: of arbitrary spans, or of all windows of one length.

The 64-bit hash of c1…cn is the sum of (code point + 1) · base^(n-i) modulo 2^64 (Karp and Rabin
1987).

Invariants:
- Nothing about a text is cached: an unseen text costs as much as any other.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from llmsys.data_pipeline.text.ragged_arrays import Integers, compute_offsets
from llmsys.data_pipeline.text.simplify_text import (
    SPACE,
    WHITE_SPACE,
    ZERO,
    Codes,
    FoldedText,
    Mask,
    fold_texts,
    from_code_points,
    to_code_points,
)
from llmsys.data_pipeline.text.spacy_tokenizer import SpacyTokenizer
from llmsys.data_pipeline.text.vocabulary import HASH_BASE

Hashes = np.ndarray[Any, np.dtype[np.uint64]]

INVERSE_BASE = np.uint64(pow(int(HASH_BASE), -1, 1 << 64))


class RollingHasher:
    """Hashes spans in constant time each, from prefix sums of (c + 1) · base^-i."""

    def __init__(self, codes: Codes) -> None:
        """Compute the prefix sums of a text.

        Args:
            codes: Its characters as code points, uint32 (C,).
        """
        count = len(codes)
        self._sums = np.zeros(count + 1, np.uint64)
        terms = codes + np.uint64(1)
        terms *= _get_powers(int(INVERSE_BASE), count)
        np.cumsum(terms, out=self._sums[1:])
        self._powers = _get_powers(int(HASH_BASE), count)

    def hash_spans(self, starts: Any, ends: Any) -> Hashes:
        """Return the hashes of the spans [start, end). None may be empty."""
        # Each term of the sums has the factor base^-i; this one makes it base^(end - 1 - i), which
        # no longer depends on the place of the span.
        hashes: Hashes = (self._sums[ends] - self._sums[starts]) * self._powers[ends - 1]
        return hashes

    def hash_windows(self, length: int) -> Hashes:
        """Hash every window of a length.

        Args:
            length: Characters of a window, from 1 to the length of the text.

        Returns:
            uint64 (C - length + 1,), by the start of the window.
        """
        hashes: Hashes = (self._sums[length:] - self._sums[:-length]) * self._powers[length - 1 :]
        return hashes


def _get_powers(base: int, count: int) -> Hashes:
    """Return base^0, base^1, … modulo 2^64."""
    # Sizes in powers of two: few tables serve all texts.
    return _compute_powers(base, max(1 << 17, 1 << count.bit_length()))[:count]


@lru_cache(maxsize=4)
def _compute_powers(base: int, count: int) -> Hashes:
    powers = np.full(count, base, np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


_UNIT_AT_END = re.compile(r"\d\D{1,8}\Z")  # spaCy splits units off: "5km" is two words
_MAX_ASKED = 200_000  # maximum number of cached runs


class CharacterRuns(NamedTuple):
    """Starts and ends of the runs of folded characters between spaces, or of the words they are
    split into.
    """

    starts: Integers
    ends: Integers

    def insert_cuts(self, places: Integers) -> "CharacterRuns":
        """Return the runs with further cuts at sorted positions."""
        indices = np.searchsorted(self.starts, places)
        return CharacterRuns(
            np.insert(self.starts, indices, places), np.insert(self.ends, indices - 1, places)
        )


def find_character_runs(codes: Codes) -> CharacterRuns:
    """Return the runs of characters that end with a space."""
    edges = np.flatnonzero(np.diff(codes != SPACE, prepend=False))
    return CharacterRuns(edges[::2], edges[1::2])


class RunSplitter:
    """Finder of the runs that are more than one word, with a cache of spaCy's answers."""

    def __init__(self) -> None:
        self._english = SpacyTokenizer()
        self._cuts: dict[str, tuple[int, ...]] = {}

    def find_word_starts(self, folded: FoldedText, runs: CharacterRuns, hashes: Hashes) -> Integers:
        """Return the sorted positions inside of runs at which a word begins."""
        unsure = self._find_unsure_runs(folded, runs, hashes)
        if not len(unsure):
            return unsure
        starts = runs.starts[unsure].tolist()
        if len(self._cuts) > _MAX_ASKED:
            self._cuts = {}
        text = from_code_points(folded.codes)
        spellings = [
            text[start:end] for start, end in zip(starts, runs.ends[unsure].tolist(), strict=True)
        ]
        self._cache_cuts([part for part in dict.fromkeys(spellings) if part not in self._cuts])
        cuts = self._cuts
        found = [
            start + cut for start, part in zip(starts, spellings, strict=True) for cut in cuts[part]
        ]
        return np.array(found, np.int64)

    def _find_unsure_runs(
        self, folded: FoldedText, runs: CharacterRuns, hashes: Hashes
    ) -> Integers:
        """Return the runs that may be several words: those with non-letters (except "0"), or
        exceptions of spaCy.
        """
        odd = np.flatnonzero(folded.irregular)
        owners = np.searchsorted(runs.starts, odd, side="right") - 1
        # A number, folded to a single 0, is one word.
        alone = (folded.codes[odd] == ZERO) & (runs.ends[owners] - runs.starts[owners] == 1)
        unsure = np.zeros(len(runs.starts), np.bool_)
        unsure[owners[~alone]] = True
        exceptions, is_low = self._exceptions
        # The lowest 16 bits exclude nearly all runs before the binary search.
        maybe = np.flatnonzero(is_low[hashes.astype(np.uint16)])
        indices = np.minimum(np.searchsorted(exceptions, hashes[maybe]), len(exceptions) - 1)
        unsure[maybe[exceptions[indices] == hashes[maybe]]] = True
        return np.flatnonzero(unsure)

    def _cache_cuts(self, runs: list[str]) -> None:
        """Compute and cache the cuts of unknown runs."""
        hard = [part for part in runs if not self._is_word(part)]
        self._cuts.update(dict.fromkeys(runs, ()))
        for part, words in zip(hard, self._english.split_words(hard), strict=True):
            self._cuts[part] = tuple(accumulate(map(len, words[:-1])))

    def _is_word(self, part: str) -> bool:
        """Return whether spaCy surely keeps a run whole: letters only, or ASCII letters and
        digits without a unit.
        """
        if part in self._english.exceptions:
            return False
        return part.isalpha() or (
            part.isascii() and part.isalnum() and _UNIT_AT_END.search(part) is None
        )

    @cached_property
    def _exceptions(self) -> tuple[Hashes, Mask]:
        """Sorted hashes of spaCy's exceptions, and a mask of the values of their lowest 16 bits."""
        spellings = [chunk for chunk in sorted(self._english.exceptions) if not chunk.isspace()]
        codes = to_code_points(" ".join([*spellings, ""]))
        hashes = np.sort(RollingHasher(codes).hash_spans(*find_character_runs(codes)))
        is_low = np.zeros(1 << 16, np.bool_)
        is_low[hashes.astype(np.uint16)] = True
        return hashes, is_low


_BLOCK = 1 << 16  # characters processed at once, about 40 bytes each
_LONGEST = 1 << 20  # characters without white space that may follow a block uncut


@dataclass(frozen=True)
class SimplifiedWords:
    """The W words of D documents, concatenated.

    Attributes:
        offsets: (D + 1,) index of each document's first word, and W.
        hashes_W: 64-bit hash of each word's spelling.
        spellings: the words in UTF-8, each followed by a space; empty unless spellings were asked
            for.
        ends_W: end of each word in `spellings`, its space included.
    """

    offsets: Integers
    hashes_W: Hashes
    spellings: bytes
    ends_W: Integers


class SimplifiedWordSplitter:
    """Splitter of texts into simplified words."""

    def __init__(self, spelling: bool) -> None:
        """Set whether to spell the words: SHA-1 needs the spellings, the combined hash does not."""
        self._spelling = spelling
        self._cutter = RunSplitter()

    def split_words(self, texts: Sequence[str] | pa.Array) -> SimplifiedWords:
        """Return the words of each text; texts must not hold lone surrogates."""
        pieces_per_text = [
            _split_long_text(text)
            for text in (texts.to_pylist() if isinstance(texts, pa.Array) else texts)
        ]
        counts = [np.zeros(0, np.int64)]
        hashes = [np.zeros(0, np.uint64)]
        spellings = [b""]
        for block in _iter_blocks([piece for pieces in pieces_per_text for piece in pieces]):
            folded = fold_texts(block)
            hasher = RollingHasher(folded.codes)
            runs = find_character_runs(folded.codes)
            found = hasher.hash_spans(*runs)
            cuts = self._cutter.find_word_starts(folded, runs, found)
            if len(cuts):
                runs = runs.insert_cuts(cuts)
                found = hasher.hash_spans(*runs)
            counts.append(np.diff(np.searchsorted(runs.starts, folded.edges)))
            hashes.append(found)
            if self._spelling:
                spellings.append(_spell_words(folded.codes, cuts))
        joined = b"".join(spellings)
        ends = np.flatnonzero(np.frombuffer(joined, np.uint8) == SPACE) + 1
        first_pieces = compute_offsets([len(pieces) for pieces in pieces_per_text])
        offsets = compute_offsets(np.concatenate(counts))[first_pieces]
        return SimplifiedWords(offsets, np.concatenate(hashes), joined, ends)


def _split_long_text(text: str) -> list[str]:
    """Split a long text at white space; anywhere if there is none for a million characters."""
    pieces = []
    begin = 0
    while len(text) - begin > _BLOCK:
        limit = begin + _BLOCK + _LONGEST
        match = WHITE_SPACE.search(text, begin + _BLOCK, limit)
        cut = match.start() if match else min(limit, len(text))
        pieces.append(text[begin:cut])
        begin = cut
    return [*pieces, text[begin:]]


def _iter_blocks(pieces: Sequence[str]) -> Iterator[list[str]]:
    """Yield lists of consecutive pieces with at least `_BLOCK` characters each."""
    block: list[str] = []
    size = 0
    for piece in pieces:
        block.append(piece)
        size += len(piece)
        if size >= _BLOCK:
            yield block
            block = []
            size = 0
    if block:
        yield block


def _spell_words(codes: Codes, cuts: Integers) -> bytes:
    """Return the words of folded characters, each followed by one space."""
    codes = np.insert(codes, cuts, SPACE)
    kept = codes != SPACE
    # A copy, because the mask is read while it is written.
    kept[1:] |= kept[:-1].copy()
    return from_code_points(codes[kept]).encode()
