"""Simplify text before it is compared, so that case, numbers, punctuation and accents hide no
duplicate.

`fold_texts` folds many texts at once as `fold_text` does, with one table look-up per character.
Folding a character gives one character, none (an accent) or several (a Hangul syllable). Three
things need more than the character itself: digits of one number, the sigma at the end of a word,
and marks that canonical order moves.

Equal to datatrove's `simplify_text` with its defaults: lower case, numbers, punctuation, white
space, diacritics, in this order. Characters are looked up in tables as columns of code points, not
one by one.
"""

import re
import sys
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from llmsys.data_pipeline.text.ragged_arrays import Integers, compute_offsets
from llmsys.data_pipeline.text.vocabulary import PUNCTUATION, TERMINAL_MARKS

Codes = np.ndarray[Any, np.dtype[np.uint32]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

NUMBER_SEPARATORS = ".,،٫⎖⎗⎘"

_NUMBER = re.compile(rf"\d+(?:[{NUMBER_SEPARATORS}]\d+)?")
# three times as fast: few first characters match
_ASCII_NUMBER = re.compile(r"[0-9][0-9]*(?:[.,][0-9]+)?")
WHITE_SPACE = re.compile(r"\s+")

# Only these code points change. Han, private use and unassigned ones stay; lone surrogates are left
# out.
HAN = range(0x20000, 0x40000)
CHANGING = (range(0xD800), range(0xE000, 0x20000), range(0x2F800, 0x2FA20), range(0xE0000, 0xE1000))

_PAGE_BITS = 8  # of the tables that are filled when a character first occurs

# As datatrove: sentence marks of other scripts stay, although rules count them as punctuation.
_REMOVED = (PUNCTUATION - TERMINAL_MARKS) | set(".?!。．？！")


@lru_cache(maxsize=1)
def _get_punctuation_table() -> Codes:
    """Return a table by code point: the code point itself, or a space for punctuation."""
    table = np.arange(sys.maxunicode + 1, dtype=np.uint32)
    table[[ord(character) for character in _REMOVED]] = ord(" ")
    return table


class _LetterMask:
    """Mask by code point: False for accents (category Mn). A page of 256 is filled when one of its
    characters first occurs, because all of Unicode would take a tenth of the start of a process.
    """

    def __init__(self) -> None:
        self._mask = np.ones(sys.maxunicode + 1, np.bool_)
        self._is_known = np.zeros(self._mask.size >> _PAGE_BITS, np.bool_)

    def look_up(self, codes: Codes) -> Mask:
        """Return the values of characters, after filling unknown pages."""
        pages = codes >> _PAGE_BITS
        unknown = ~self._is_known[pages]
        if unknown.any():
            for page in np.unique(pages[unknown]).tolist():
                self._learn_page(page)
        return self._mask[codes]

    def _learn_page(self, page: int) -> None:
        points = range(page << _PAGE_BITS, (page + 1) << _PAGE_BITS)
        categories = map(unicodedata.category, map(chr, points))
        self._mask[points.start : points.stop] = [category != "Mn" for category in categories]
        self._is_known[page] = True


@lru_cache(maxsize=1)
def _get_letter_mask() -> _LetterMask:
    """Return the mask of this process."""
    return _LetterMask()


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
    """Return the text in lower case, numbers as 0, punctuation as spaces, without accents. White
    space stays.
    """
    return remove_accents(_fold_characters(text))


def _fold_characters(text: str) -> str:
    number = _ASCII_NUMBER if text.isascii() else _NUMBER
    return from_code_points(_get_punctuation_table()[to_code_points(number.sub("0", text.lower()))])


def remove_accents(text: str) -> str:
    """Return the canonical decomposition of the text without characters of category Mn."""
    if text.isascii():
        return text
    codes = to_code_points(unicodedata.normalize("NFD", text))
    return from_code_points(codes[_get_letter_mask().look_up(codes)])


def simplify_text(text: str) -> str:
    """Simplify one text.

    Args:
        text: The text.

    Returns:
        Lower case, numbers as 0, punctuation as spaces, runs of white space as one space, no
        accents.
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


SPACE = ord(" ")
ZERO = ord("0")
_CODE = (1 << 21) - 1
_ODD = 1 << 21
_SPECIAL = 1 << 22
_UNKNOWN = 1 << 23  # flags lie above the 21 bits of a code point
_BORDER = "\U0010ffff"  # a noncharacter, which folds to itself


class FoldedText(NamedTuple):
    """Folded characters of some texts, with one space after each text.

    Attributes:
        codes: Code points; white space and punctuation are spaces.
        irregular: Mask of the characters that are neither letters nor spaces.
        edges: Start of each text in `codes`, and the end of the last one with its space.
    """

    codes: Codes
    irregular: Mask
    edges: Integers


def _compute_values(text: str) -> Codes:
    """Return the table values of characters that are already folded."""
    codes = to_code_points(text)
    letters = np.fromiter(map(str.isalpha, text), np.bool_, len(text))
    spaces = np.fromiter(map(str.isspace, text), np.bool_, len(text))
    return np.where(spaces, SPACE, np.where(letters, codes, codes | np.uint32(_ODD))).astype(
        np.uint32
    )


class _FoldTable:
    """Table of folded characters. A page of 256 is filled when one of its characters first occurs.

    Attributes:
        values: By code point: a code point with or without the flag `_ODD`, the number of a
            spelling with the flag `_SPECIAL`, or `_UNKNOWN`.
        spellings: Values of all spellings, concatenated; `begins` and `sizes` locate each.
        moves: By number of a spelling: whether canonical order may move its character.
    """

    def __init__(self) -> None:
        self.values: Codes = np.arange(0x110000, dtype=np.uint32) | np.uint32(_ODD)
        for points in (*CHANGING, HAN):
            self.values[points.start : points.stop] = _UNKNOWN
        self._numbers: dict[str, int] = {}
        self._update_spellings()

    def look_up(self, codes: Codes) -> Codes:
        """Return the values of characters, after filling unknown pages."""
        values = self.values[codes]
        unknown = values == _UNKNOWN
        if unknown.any():
            self._learn_pages(np.unique(codes[unknown] >> _PAGE_BITS))
            values = self.values[codes]
        return values

    def _learn_pages(self, pages: Codes) -> None:
        """Fold every character of these pages that may change."""
        points = (
            pages[:, None] << _PAGE_BITS | np.arange(1 << _PAGE_BITS, dtype=np.uint32)
        ).ravel()
        points = points[self.values[points] == _UNKNOWN]
        folded = fold_text(_BORDER.join([*map(chr, points.tolist()), ""]))
        ends = np.flatnonzero(to_code_points(folded) == ord(_BORDER))
        sizes = np.diff(ends, prepend=-1) - 1
        moving = np.fromiter(map(unicodedata.combining, folded), np.uint8, len(folded)) > 0
        simple = (sizes == 1) & ~moving[ends - 1]
        self.values[points[simple]] = _compute_values(folded)[ends[simple] - 1]
        for place in np.flatnonzero(~simple).tolist():
            text = folded[ends[place] - sizes[place] : ends[place]]
            self.values[points[place]] = (
                self._numbers.setdefault(text, len(self._numbers)) | _SPECIAL
            )
        self._update_spellings()

    def _update_spellings(self) -> None:
        self.spellings = _compute_values("".join(self._numbers))
        self.sizes = np.fromiter(map(len, self._numbers), np.int64, len(self._numbers))
        self.begins = compute_offsets(self.sizes)[:-1]
        self.moves: Mask = np.array(
            [any(map(unicodedata.combining, text)) for text in self._numbers], np.bool_
        )


@lru_cache(maxsize=1)
def _get_fold_table() -> _FoldTable:
    """Return the table of this process."""
    return _FoldTable()


def fold_texts(texts: Sequence[str]) -> FoldedText:
    """Fold texts: lower case, numbers as 0, punctuation as spaces, no accents.

    Args:
        texts: Texts without lone surrogates.

    Returns:
        Folded characters. They equal `fold_text` of each text.
    """
    table = _get_fold_table()
    joined = " ".join([*texts, ""])
    if "Σ" in joined:  # its lower case depends on its position in the word
        texts = [text.lower() for text in texts]
        joined = " ".join([*texts, ""])
    codes = to_code_points(joined)
    edges = _compute_edges(texts)
    values = table.look_up(codes)
    special = np.flatnonzero(values >= _SPECIAL)
    numbers = values[special] & np.uint32(_CODE)
    # Canonical order may move marks across the border of a spelling.
    if table.moves[numbers].any():
        values, edges = _fold_one_by_one(texts)
    else:
        gone = _find_number_tails(codes, np.flatnonzero(values == (ZERO | _ODD)))
        values, edges = _apply_spellings(values, edges, special, numbers, gone)
    return FoldedText(values & np.uint32(_CODE), values >= _ODD, edges)


def _compute_edges(texts: Sequence[str]) -> Integers:
    return compute_offsets(list(map(len, texts))) + np.arange(len(texts) + 1)


def _fold_one_by_one(texts: Sequence[str]) -> tuple[Codes, Integers]:
    """Fold texts with marks that may change places. They are rare, so this may be slow."""
    folded = [fold_text(text) for text in texts]
    return _compute_values(" ".join([*folded, ""])), _compute_edges(folded)


def _find_number_tails(codes: Codes, digits: Integers) -> Integers:
    """Return the positions to remove so that each number becomes its first digit, which is already
    folded to 0.

    A number is a run of digits, or two runs with a separator between them: 1.2.3.4 holds 1.2 and
    3.4.
    """
    if not len(digits):
        return digits
    first = np.flatnonzero(np.diff(digits, prepend=-2) != 1)
    starts, ends = digits[first], digits[np.append(first[1:] - 1, len(digits) - 1)] + 1
    linked = np.zeros(len(starts), np.bool_)
    linked[1:] = (starts[1:] - ends[:-1] == 1) & np.isin(
        codes[ends[:-1]], to_code_points(NUMBER_SEPARATORS)
    )
    order = np.arange(len(starts))
    second = linked & ((order - np.maximum.accumulate(np.where(linked, 0, order))) % 2 == 1)
    goes = np.ones(len(digits), np.bool_)
    goes[first[~second]] = False
    return np.concatenate([digits[goes], starts[second] - 1])


def _apply_spellings(
    values: Codes, edges: Integers, special: Integers, numbers: Codes, gone: Integers
) -> tuple[Codes, Integers]:
    """Insert the spellings of special characters and remove the positions in `gone`."""
    sizes = _get_fold_table().sizes[numbers]
    # Most batches only lose characters, which is cheaper than inserting.
    several = sizes > 1
    if several.any():
        counts = np.ones(len(values), np.int64)
        counts[special] = sizes
        counts[gone] = 0
        begins = compute_offsets(counts)
        values = np.repeat(values, counts)
        starts = begins[special]
        for place in range(int(sizes.max())):
            has = sizes > place
            values[starts[has] + place] = _get_fold_table().spellings[
                _get_fold_table().begins[numbers[has]] + place
            ]
        return values, begins[edges]
    gone = np.concatenate([special, gone])
    if len(gone):
        edges = edges - np.searchsorted(np.sort(gone), edges)
        values = np.delete(values, gone)
    return values, edges
