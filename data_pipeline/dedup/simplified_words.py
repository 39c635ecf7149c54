"""Runs of folded characters between spaces in, the few places out where spaCy cuts one of them into words.

A part such as "state", of "State-of-the-art,", is nearly always one word. Those that may be several (contractions
without their apostrophe, numbers with a unit, symbols) are given to spaCy, each once.

Texts in, the words of their simplified form out as columns: hashes, or spellings.

Whatever simplification does it does between white space, and spaCy splits there too. So the words of a text are the
parts between the spaces of its folded characters, and the pieces of the few parts that are several words. Nothing is
remembered of a text; a text never seen before costs what any other does.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from data_pipeline.text.fold_batch import SPACE, ZERO, FoldedText, Mask, fold_texts
from data_pipeline.text.ragged_arrays import Integers, compute_offsets
from data_pipeline.text.rolling_hash import Hashes, RollingHasher
from data_pipeline.text.simplify_text import WHITE_SPACE, Codes, from_code_points, to_code_points
from data_pipeline.text.spacy_tokenizer import SpacyTokenizer

_UNIT_AT_END = re.compile(r"\d\D{1,8}\Z")  # spaCy splits units off: "5km" is two words
_MOST_ASKED = 200_000  # parts about which the answer is remembered at most


class CharacterRuns(NamedTuple):
    """The runs between spaces of folded characters, or the words that they are cut into: where each starts and ends."""

    starts: Integers
    ends: Integers

    def insert_cuts(self, places: Integers) -> "CharacterRuns":
        """Return them with more cuts, which are sorted."""
        behind = np.searchsorted(self.starts, places)
        return CharacterRuns(np.insert(self.starts, behind, places), np.insert(self.ends, behind - 1, places))


def find_character_runs(codes: Codes) -> CharacterRuns:
    """Return the parts of characters that end with a space."""
    edges = np.flatnonzero(np.diff(codes != SPACE, prepend=False))
    return CharacterRuns(edges[::2], edges[1::2])


class RunSplitter:
    """Finds the parts that are more than one word, remembering what spaCy was asked."""

    def __init__(self) -> None:
        self._english = SpacyTokenizer()
        self._cuts: dict[str, tuple[int, ...]] = {}

    def find_word_starts(self, folded: FoldedText, parts: CharacterRuns, hashes: Hashes) -> Integers:
        """Return where words begin inside of parts, sorted."""
        unsure = self._find_unsure_runs(folded, parts, hashes)
        if not len(unsure):
            return unsure
        starts = parts.starts[unsure].tolist()
        if len(self._cuts) > _MOST_ASKED:
            self._cuts = {}
        text = from_code_points(folded.codes)
        spelled = [text[start:end] for start, end in zip(starts, parts.ends[unsure].tolist(), strict=True)]
        self._cache_cuts([part for part in dict.fromkeys(spelled) if part not in self._cuts])
        cuts = self._cuts
        found = [start + cut for start, part in zip(starts, spelled, strict=True) for cut in cuts[part]]
        return np.array(found, np.int64)

    def _find_unsure_runs(self, folded: FoldedText, parts: CharacterRuns, hashes: Hashes) -> Integers:
        """The parts that are not surely one word: neither letters alone nor the number 0, or an exception of spaCy."""
        odd = np.flatnonzero(folded.irregular)
        owners = np.searchsorted(parts.starts, odd, side="right") - 1
        alone = (folded.codes[odd] == ZERO) & (parts.ends[owners] - parts.starts[owners] == 1)
        unsure = np.zeros(len(parts.starts), np.bool_)
        unsure[owners[~alone]] = True
        exceptions, is_low = self._exceptions
        maybe = np.flatnonzero(is_low[hashes.astype(np.uint16)])
        places = np.minimum(np.searchsorted(exceptions, hashes[maybe]), len(exceptions) - 1)
        unsure[maybe[exceptions[places] == hashes[maybe]]] = True
        return np.flatnonzero(unsure)

    def _cache_cuts(self, parts: list[str]) -> None:
        """Find out about parts that are not known."""
        hard = [part for part in parts if not self._is_word(part)]
        self._cuts.update(dict.fromkeys(parts, ()))
        for part, words in zip(hard, self._english.split_words(hard), strict=True):
            self._cuts[part] = tuple(accumulate(map(len, words[:-1])))

    def _is_word(self, part: str) -> bool:
        """Whether spaCy surely leaves a part whole: letters alone, or ASCII letters and digits that end in no unit."""
        if part in self._english.exceptions:
            return False
        return part.isalpha() or (part.isascii() and part.isalnum() and _UNIT_AT_END.search(part) is None)

    @cached_property
    def _exceptions(self) -> tuple[Hashes, Mask]:
        """The sorted hashes of spaCy's exceptions, and a mask of the lowest 16 bits that one of them has."""
        spelled = [chunk for chunk in sorted(self._english.exceptions) if not chunk.isspace()]
        codes = to_code_points(" ".join([*spelled, ""]))
        hashes = np.sort(RollingHasher(codes).hash_spans(*find_character_runs(codes)))
        is_low = np.zeros(1 << 16, np.bool_)
        is_low[hashes.astype(np.uint16)] = True
        return hashes, is_low


_BLOCK = 1 << 16  # characters worked on at once, about 40 bytes each
_LONGEST = 1 << 20  # characters without white space, behind a block, that are not cut


@dataclass(frozen=True)
class SimplifiedWords:
    """The words of D documents, one after another: W words.

    Attributes:
        offsets: D + 1 values: where each document starts, and where the last one ends.
        hashes_W: 64-bit hash of each word's spelling.
        spelled: the words, UTF-8, each with a space behind it; nothing unless spellings were asked for.
        ends_W: where each word ends in `spellings`, with its space.
    """

    offsets: Integers
    hashes_W: Hashes
    spellings: bytes
    ends_W: Integers


class SimplifiedWordSplitter:
    """Splits texts into simplified words."""

    def __init__(self, spelling: bool) -> None:
        """Give spellings too, which SHA-1 needs and the combined hash does not."""
        self._spelling = spelling
        self._cutter = RunSplitter()

    def split_words(self, texts: Sequence[str] | pa.Array) -> SimplifiedWords:
        """The words of each text; texts hold no lone surrogates."""
        pieces_of = [_split_long_text(text) for text in (texts.to_pylist() if isinstance(texts, pa.Array) else texts)]
        counts, hashes, spelled = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)], [b""]
        for block in _iter_blocks([piece for pieces in pieces_of for piece in pieces]):
            folded = fold_texts(block)
            hasher, parts = RollingHasher(folded.codes), find_character_runs(folded.codes)
            found = hasher.hash_spans(*parts)
            cuts = self._cutter.find_word_starts(folded, parts, found)
            if len(cuts):
                parts = parts.insert_cuts(cuts)
                found = hasher.hash_spans(*parts)
            counts.append(np.diff(np.searchsorted(parts.starts, folded.edges)))
            hashes.append(found)
            if self._spelling:
                spelled.append(_spell_words(folded.codes, cuts))
        joined = b"".join(spelled)
        ends = np.flatnonzero(np.frombuffer(joined, np.uint8) == SPACE) + 1
        first_pieces = compute_offsets([len(pieces) for pieces in pieces_of])
        offsets = compute_offsets(np.concatenate(counts))[first_pieces]
        return SimplifiedWords(offsets, np.concatenate(hashes), joined, ends)


def _split_long_text(text: str) -> list[str]:
    """Cut a long text where it has white space; without any for a million characters, anywhere."""
    pieces, begin = [], 0
    while len(text) - begin > _BLOCK:
        limit = begin + _BLOCK + _LONGEST
        match = WHITE_SPACE.search(text, begin + _BLOCK, limit)
        cut = match.start() if match else min(limit, len(text))
        pieces.append(text[begin:cut])
        begin = cut
    return [*pieces, text[begin:]]


def _iter_blocks(pieces: Sequence[str]) -> Iterator[list[str]]:
    """Yield pieces that follow each other, as many as make a block."""
    block: list[str] = []
    size = 0
    for piece in pieces:
        block.append(piece)
        size += len(piece)
        if size >= _BLOCK:
            yield block
            block, size = [], 0
    if block:
        yield block


def _spell_words(codes: Codes, cuts: Integers) -> bytes:
    """The words of folded characters with one space behind each."""
    codes = np.insert(codes, cuts, SPACE)
    kept = codes != SPACE
    kept[1:] |= kept[:-1].copy()
    return from_code_points(codes[kept]).encode()
