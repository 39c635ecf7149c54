"""Undo what hides the words of an evaluation item from a comparison, and nothing that a reader would see.

Characters without a width go, compatibility forms (full-width letters, ligatures) become the letters that they show,
and words that a hyphen breaks at the end of a line are read both ways: broken, and as one.

Invariants:
    - A text with words made whole has the length of the text, so that places in it are places in the text.
"""

import re
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache

# Letters and marks that show nothing: default ignorable characters that are of no category of invisible ones.
_BLANK_LETTERS = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"
_MARK_SELECTORS = "\u180b-\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef"
_SOFT_HYPHEN = "\u00ad"
_HYPHENS = f"\\-\u2010\u2011\u00ac{_SOFT_HYPHEN}"

MAX_BREAKS_TOGETHER = 3  # breaks in the words of one n-gram, each of which is read both ways


@cache
def _invisible() -> str:
    """The invisible characters, as what stands between the brackets of an expression."""
    codes = [code for code in range(0x80, sys.maxunicode + 1) if unicodedata.category(chr(code)) == "Cf"]
    ranges: list[list[int]] = []
    for code in codes:
        if ranges and code == ranges[-1][1] + 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges) + _BLANK_LETTERS + _MARK_SELECTORS


@cache
def _invisible_pattern() -> re.Pattern[str]:
    return re.compile(f"[{_invisible()}]+")


@cache
def _break_pattern() -> re.Pattern[str]:
    """A hyphen between two letters with white space after it: extraction makes a space of the end of a line."""
    letter, invisible = r"[^\W\d_]", _invisible()
    return re.compile(rf"(?<={letter})[{invisible}]*[{_HYPHENS}][{invisible}]*\s[\s{invisible}]*(?={letter})")


_DASHES = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"))


def reveal_letters(chunk: str) -> str:
    """Return the chunk without invisible characters, each compatibility form as the letters that it shows."""
    if chunk.isascii():
        return chunk
    return unicodedata.normalize("NFKC", _invisible_pattern().sub("", chunk)).translate(_DASHES)


def iter_joined_readings(text: str) -> Iterator[str]:
    """Yield the text with broken words made whole: all of them, then some of them; nothing for a text without any.

    A break may be the hyphen of a compound at the end of a line, so that each way of reading neighbouring breaks is
    given once. Soft hyphens take the place of what goes.
    """
    breaks = [found.span() for found in _break_pattern().finditer(text)] if _may_have_breaks(text) else []
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
