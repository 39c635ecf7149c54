"""Words as other tools than datatrove see them: stretches between white space, and Unicode's word segments.

Both are chunk splitters for `WordSplitter`, so that every rule works on the same columns of word ids.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from typing import Any

# Unicode joins words over this space (it is of the class ExtendNumLet), Python splits at it.
_JOINING_SPACE = "\u202f"
_STRETCH = re.compile(f"(?:\\S|{_JOINING_SPACE})+")


class WhitespaceTokenizer:
    """Every chunk is one word, as in Python's `str.split`."""

    sentence_marks: frozenset[str] = frozenset()
    split_chunks = staticmethod(str.split)

    def split_words(self, chunks: Sequence[str]) -> list[list[str]]:
        """The words of each chunk."""
        return [[chunk] for chunk in chunks]


class UnicodeTokenizer:
    """Segments between the word boundaries of UAX 29 that start with a letter or a digit (uniseg's words in DCLM)."""

    sentence_marks: frozenset[str] = frozenset()

    def split_chunks(self, text: str) -> list[str]:
        """The chunks of a text, in which no boundary depends on a neighbour."""
        return _STRETCH.findall(text) if _JOINING_SPACE in text else text.split()

    def split_words(self, chunks: Sequence[str]) -> list[list[str]]:
        """The words of each chunk, perhaps none."""
        return [[word for word in self._segment_pattern.findall(chunk) if word[0].isalnum()] for chunk in chunks]

    @cached_property
    def _segment_pattern(self) -> Any:
        return import_module("regex").compile(_build_segment_pattern())


def _build_segment_pattern() -> str:
    """A pattern for one segment of UAX 29; the regex library's own \\b does not look past format characters."""
    marks = r"[\p{WB=Extend}\p{WB=Format}\p{WB=ZWJ}]*"  # WB4: they belong to what they follow
    letter, hebrew = r"[\p{WB=ALetter}\p{WB=Hebrew_Letter}]", r"\p{WB=Hebrew_Letter}"
    digit, joiner, katakana = r"\p{WB=Numeric}", rf"\p{{WB=ExtendNumLet}}{marks}", rf"\p{{WB=Katakana}}{marks}"
    within_word = rf"[\p{{WB=MidLetter}}\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}]{marks}(?={letter})"  # WB6, WB7
    within_number = rf"[\p{{WB=MidNum}}\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}]{marks}(?={digit})"  # WB11, WB12
    within_hebrew = rf"\p{{WB=Double_Quote}}{marks}(?={hebrew})|\p{{WB=Single_Quote}}{marks}"  # WB7a, WB7b, WB7c
    letters = rf"{letter}{marks}(?:{within_word}|(?<={hebrew}{marks})(?:{within_hebrew}))?"
    run = rf"(?:(?:{letters}|{digit}{marks}(?:{within_number})?)+|(?:{katakana})+)"
    return rf"(?:{joiner})*{run}(?:(?:{joiner})+{run})*(?:{joiner})*|(?:{joiner})+|(?s:.){marks}"
