"""Distinct words, with columns by word id: lengths, concatenable hashes and character flags.

Rules look these up for millions of words at once, instead of examining every word again.

The sets of punctuation and of marks that end a sentence are derived from the Unicode database with
the exceptions that datatrove makes, because equal decisions need equal sets."""

import itertools
import string
import unicodedata
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llmsys.data_pipeline.text.ragged_arrays import GrowableArray

# Unicode's Sentence_Terminal property (UAX 44), as ranges of code points, with U+17D6, U+17D9 and
# U+17DA added.
_TERMINAL_RANGES = """
21 2E 3F 589 61D-61F 6D4 700-702 7F9 837 839 83D-83E 964-965 104A-104B 1362 1367-1368 166E 1735-1736
17D4-17D6
17D9-17DA 1803 1809 1944-1945 1AA8-1AAB 1B5A-1B5B 1B5E-1B5F 1B7D-1B7E 1C3B-1C3C 1C7E-1C7F 203C-203D
2047-2049
2E2E 2E3C 2E53-2E54 3002 A4FF A60E-A60F A6F3 A6F7 A876-A877 A8CE-A8CF A92F A9C8-A9C9 AA5D-AA5F
AAF0-AAF1 ABEB
FE52 FE56-FE57 FF01 FF0E FF1F FF61 10A56-10A57 10F55-10F59 10F86-10F89 11047-11048 110BE-110C1
11141-11143
111C5-111C6 111CD 111DE-111DF 11238-11239 1123B-1123C 112A9 1144B-1144C 115C2-115C3 115C9-115D7
11641-11642
1173C-1173E 11944 11946 11A42-11A43 11A9B-11A9C 11C41-11C42 11EF7-11EF8 11F43-11F44 16A6E-16A6F
16AF5
16B37-16B38 16B44 16E98 1BC9F 1DA88
"""


def _parse_character_ranges(ranges: str) -> frozenset[str]:
    """Return the characters of space-separated hexadecimal code points and `first-last` ranges."""
    points: list[str] = []
    for item in ranges.split():
        first, _, last = item.partition("-")
        points += map(chr, range(int(first, 16), int(last or first, 16) + 1))
    return frozenset(points)


TERMINAL_MARKS = _parse_character_ranges(_TERMINAL_RANGES)

# Control characters count as punctuation, tab and newline do not. datatrove's list holds a
# full-width digit one.
_CONTROLS = frozenset(map(chr, [*range(0, 9), *range(11, 32), *range(127, 160)]))
_OTHER_PUNCTUATION = frozenset("«´»–—’“”„…∶━►、。〈〉《》「」【】！％（），．１：；？～")

PUNCTUATION = frozenset(string.punctuation) | _OTHER_PUNCTUATION | _CONTROLS | TERMINAL_MARKS


HASH_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd: its powers are never 0 modulo 2^64

NOT_SYMBOL = 1  # has a character other than punctuation
ALPHABETIC = 2  # has a letter
TERMINAL = 4  # ends a sentence
PASSING = 8  # punctuation that neither ends nor starts a sentence


class Vocabulary:
    """Word ids and their columns.

    The hash of a word c1…cn is the sum of (code point + 1) · base^(n-i) modulo 2^64. So hash(a + b)
    = hash(a) · base^len(b) + hash(b): concatenations are hashed without being built.
    """

    def __init__(self, sentence_marks: frozenset[str]) -> None:
        self.index: dict[str, int] = {}
        self.words: list[str] = []  # by id
        self._sentence_marks = sentence_marks
        self._lengths = GrowableArray(np.int32)
        self._sizes = GrowableArray(np.int32)
        self._hashes = GrowableArray(np.uint64)
        self._powers = GrowableArray(np.uint64)
        self._flags = GrowableArray(np.uint8)

    def __len__(self) -> int:
        return len(self.index)

    def find_word(self, word: str) -> int | None:
        """Find the id of a word.

        Args:
            word: A whole word, as a splitter returns it.

        Returns:
            Its id; None if it has not been met.
        """
        return self.index.get(word)

    def get_word(self, word_id: int) -> str:
        """Return the word with an id."""
        return self.words[word_id]

    def add_words(self, words: Sequence[str]) -> None:
        """Assign ids to new words. They must be distinct and not empty."""
        if not words:
            return
        first = len(self.index)
        self.index.update(zip(words, itertools.count(first)))
        self.words += words
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        ends = np.cumsum(lengths)
        starts = ends - lengths
        codes = np.frombuffer("".join(words).encode("utf-32-le"), np.uint32).astype(
            np.uint64
        ) + np.uint64(1)
        # base^0 belongs to the last character of each word.
        exponents = np.repeat(ends, lengths) - np.arange(len(codes)) - 1
        powers = _compute_powers(int(lengths.max()))
        self._lengths.extend(lengths)
        self._sizes.extend(np.add.reduceat(_compute_utf8_sizes(codes), starts))
        self._hashes.extend(np.add.reduceat(codes * powers[exponents], starts))
        self._powers.extend(powers[lengths])
        self._flags.extend([self.compute_flags(word) for word in words])

    def compute_flags(self, word: str) -> int:
        """Return the sum of the flags of a word."""
        terminal = word in self._sentence_marks
        flags = 0 if PUNCTUATION.issuperset(word) else NOT_SYMBOL
        flags |= ALPHABETIC if word.isalpha() or any(map(str.isalpha, word)) else 0
        if terminal:
            return flags | TERMINAL
        return flags if flags & ALPHABETIC or not _is_unicode_punctuation(word) else flags | PASSING

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Characters (code points) by word id."""
        return self._lengths.view

    @property
    def sizes(self) -> npt.NDArray[np.int32]:
        """UTF-8 bytes by word id."""
        return self._sizes.view

    @property
    def hashes(self) -> npt.NDArray[np.uint64]:
        """Concatenable hash by word id."""
        return self._hashes.view

    @property
    def powers(self) -> npt.NDArray[np.uint64]:
        """base^length by word id."""
        return self._powers.view

    @property
    def flags(self) -> npt.NDArray[np.uint8]:
        """Sum of the flag constants of this module by word id."""
        return self._flags.view


def _compute_utf8_sizes(codes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
    """Return the UTF-8 bytes of each character. `codes` are code points + 1."""
    return np.searchsorted([0x80, 0x800, 0x10000], codes, side="left").astype(np.int32) + 1


def _compute_powers(highest: int) -> npt.NDArray[np.uint64]:
    """Return base^0 … base^highest modulo 2^64."""
    powers = np.full(highest + 1, HASH_BASE)
    powers[0] = 1
    return np.multiply.accumulate(powers)


def _is_unicode_punctuation(word: str) -> bool:
    """Return whether every character is in a Unicode category P, spaCy's definition of
    punctuation.
    """
    return all(unicodedata.category(character).startswith("P") for character in word)
