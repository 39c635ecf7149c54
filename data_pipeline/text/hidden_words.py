"""Undo what hides the words of an evaluation item from a comparison, and nothing that a reader would see.

Characters without width are removed. Compatibility forms (full-width letters, ligatures) become the letters they show.
A word that a hyphen breaks at the end of a line is read both ways: broken, and as one word.

Invariants:
    - A text with rejoined words has the length of the original, so that positions stay valid.
"""

import re
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache

# Blank letters and marks: default ignorable characters outside the category Cf.
_BLANK_LETTERS = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"
_MARK_SELECTORS = "\u180b-\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef"
_SOFT_HYPHEN = "\u00ad"
_HYPHENS = f"\\-\u2010\u2011\u00ac{_SOFT_HYPHEN}"

MAX_BREAKS_TOGETHER = 3  # within one n-gram; readings grow as 2^breaks


@cache
def _list_invisible_characters() -> str:
    """Return the invisible characters as the content of a character class of `re`."""
    codes = [code for code in range(0x80, sys.maxunicode + 1) if unicodedata.category(chr(code)) == "Cf"]
    ranges: list[list[int]] = []
    for code in codes:
        if ranges and code == ranges[-1][1] + 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges) + _BLANK_LETTERS + _MARK_SELECTORS


@cache
def _build_invisible_pattern() -> re.Pattern[str]:
    return re.compile(f"[{_list_invisible_characters()}]+")


@cache
def _build_break_pattern() -> re.Pattern[str]:
    """Match a hyphen between two letters with white space after it: extraction turns a line end into a space."""
    letter, invisible = r"[^\W\d_]", _list_invisible_characters()
    return re.compile(rf"(?<={letter})[{invisible}]*[{_HYPHENS}][{invisible}]*\s[\s{invisible}]*(?={letter})")


_DASHES = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"))


def normalize_letters(chunk: str) -> str:
    """Return the chunk without invisible characters and with compatibility forms as the letters they show."""
    if chunk.isascii():
        return chunk
    return unicodedata.normalize("NFKC", _build_invisible_pattern().sub("", chunk)).translate(_DASHES)


def iter_joined_readings(text: str) -> Iterator[str]:
    """Yield the text with broken words rejoined: all of them, then each combination of neighbouring ones.

    A break may also be the hyphen of a compound at a line end, so that both readings are given. Soft hyphens replace
    what is removed.

    Args:
        text: The text.

    Yields:
        Texts of the same length. None if the text has no break.
    """
    breaks = [found.span() for found in _build_break_pattern().finditer(text)] if _may_have_breaks(text) else []
    period = min(len(breaks), MAX_BREAKS_TOGETHER)
    for reading in range((1 << period) - 1, 0, -1):
        pieces, position = [], 0
        for number, (begin, end) in enumerate(breaks):
            if reading >> number % period & 1:
                pieces += [text[position:begin], _SOFT_HYPHEN * (end - begin)]
                position = end
        yield "".join([*pieces, text[position:]])


def _may_have_breaks(text: str) -> bool:
    return any(hyphen in text for hyphen in ("-", "\u2010", "\u2011", "\u00ac", _SOFT_HYPHEN))
