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


class WhitespaceChunks:
    """Every chunk is one word, as in Python's `str.split`."""

    sentence_marks: frozenset[str] = frozenset()
    cut = staticmethod(str.split)

    def split(self, chunks: Sequence[str]) -> list[list[str]]:
        """The words of each chunk."""
        return [[chunk] for chunk in chunks]


class UnicodeChunks:
    """Segments between the word boundaries of UAX 29 that start with a letter or a digit (uniseg's words in DCLM)."""

    sentence_marks: frozenset[str] = frozenset()

    def cut(self, text: str) -> list[str]:
        """The chunks of a text, in which no boundary depends on a neighbour."""
        return _STRETCH.findall(text) if _JOINING_SPACE in text else text.split()

    def split(self, chunks: Sequence[str]) -> list[list[str]]:
        """The words of each chunk, perhaps none."""
        return [[word for word in self._boundary.split(chunk) if word[:1].isalnum()] for chunk in chunks]

    @cached_property
    def _boundary(self) -> Any:
        return import_module("regex").compile(r"(?V1w)\b")  # w: the word boundaries of UAX 29
