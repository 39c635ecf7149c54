"""Simplify text before it is compared, so that case, numbers, punctuation and accents hide no duplicate.

Equal to datatrove's `simplify_text` with its defaults: lower case, numbers, punctuation, white space, diacritics, in
this order. Characters are looked up in tables as columns of code points, not one by one.
"""

import re
import sys
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from data_pipeline.text.vocabulary import PUNCTUATION, TERMINAL_MARKS

Codes = np.ndarray[Any, np.dtype[np.uint32]]

NUMBER_SEPARATORS = ".,،٫⎖⎗⎘"

_NUMBER = re.compile(rf"\d+(?:[{NUMBER_SEPARATORS}]\d+)?")
_ASCII_NUMBER = re.compile(r"[0-9][0-9]*(?:[.,][0-9]+)?")  # three times as fast: few first characters match
WHITE_SPACE = re.compile(r"\s+")

# Only these code points change. Han, private use and unassigned ones stay; lone surrogates are left out.
HAN = range(0x20000, 0x40000)
CHANGING = (range(0xD800), range(0xE000, 0x20000), range(0x2F800, 0x2FA20), range(0xE0000, 0xE1000))

# As datatrove: sentence marks of other scripts stay, although rules count them as punctuation.
_REMOVED = (PUNCTUATION - TERMINAL_MARKS) | set(".?!。．？！")


@lru_cache(maxsize=1)
def _get_punctuation_table() -> Codes:
    """Return a table by code point: the code point itself, or a space for punctuation."""
    table = np.arange(sys.maxunicode + 1, dtype=np.uint32)
    table[[ord(character) for character in _REMOVED]] = ord(" ")
    return table


@lru_cache(maxsize=1)
def _get_non_accent_mask() -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return a mask by code point: False for accents (category Mn)."""
    table = np.ones(sys.maxunicode + 1, np.bool_)
    table[[point for part in CHANGING for point in part if unicodedata.category(chr(point)) == "Mn"]] = False
    return table


def to_code_points(text: str) -> Codes:
    """Convert a text to code points.

    Args:
        text: Any text. A lone surrogate is a code point like any other.

    Returns:
        uint32 of shape (len(text),).
    """
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def from_code_points(codes: Codes) -> str:
    """Convert code points to a text.

    Args:
        codes: uint32 code points.

    Returns:
        The text.
    """
    return codes.tobytes().decode("utf-32-le", "surrogatepass")


def fold_text(text: str) -> str:
    """Return the text in lower case, numbers as 0, punctuation as spaces, without accents. White space stays."""
    return remove_accents(_fold_characters(text))


def _fold_characters(text: str) -> str:
    number = _ASCII_NUMBER if text.isascii() else _NUMBER
    return from_code_points(_get_punctuation_table()[to_code_points(number.sub("0", text.lower()))])


def remove_accents(text: str) -> str:
    """Return the canonical decomposition of the text without characters of category Mn."""
    if text.isascii():
        return text
    codes = to_code_points(unicodedata.normalize("NFD", text))
    return from_code_points(codes[_get_non_accent_mask()[codes]])


def simplify_text(text: str) -> str:
    """Simplify one text.

    Args:
        text: The text.

    Returns:
        Lower case, numbers as 0, punctuation as spaces, runs of white space as one space, no accents.
    """
    return remove_accents(WHITE_SPACE.sub(" ", _fold_characters(text).strip())).strip()


def simplify_texts(texts: Sequence[str]) -> list[str]:
    """Simplify many texts at a fraction of the cost of one call each.

    Args:
        texts: The texts.

    Returns:
        `simplify_text` of each.
    """
    if not texts:
        return []
    # One call for all texts; newlines survive folding and separate them.
    lines = _fold_characters("\n".join([" ".join(text.split()) for text in texts])).split("\n")
    # White space is folded before accents go, as above: a chunk of accents alone leaves two spaces.
    folded = remove_accents("\n".join([" ".join(line.split()) for line in lines]))
    return [line.strip() for line in folded.split("\n")]
