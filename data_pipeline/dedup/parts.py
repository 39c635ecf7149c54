"""Runs of folded characters between spaces in, the few places out where spaCy cuts one of them into words.

A part such as "state", of "State-of-the-art,", is nearly always one word. Those that may be several (contractions
without their apostrophe, numbers with a unit, symbols) are given to spaCy, each once.
"""

import re
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from data_pipeline.dedup.fold import SPACE, ZERO, FoldedText, Mask
from data_pipeline.dedup.simplify import Codes, to_code_points, from_code_points
from data_pipeline.dedup.stretch import Hashes, RollingHasher
from data_pipeline.rules.chunk import SpacyTokenizer
from data_pipeline.rules.ragged import Integers

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
