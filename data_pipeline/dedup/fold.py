"""Many texts folded at once, as columns of code points: what `fold` makes of each, by one look at a table per letter.

Folding a character gives one character, or none (an accent), or several (a syllable of Hangul). Only three things need
more than the character: digits that are one number, the sigma that ends a word, and marks that canonical order moves.
Reads texts, gives the characters that are left and where each text begins among them.
"""

import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from data_pipeline.dedup.simplify import CHANGING, HAN, NUMBER_SEPARATORS, Codes, code_points, fold

Integers = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

SPACE, ZERO = ord(" "), ord("0")
_CODE, _ODD, _SPECIAL = (1 << 21) - 1, 1 << 21, 1 << 22
_BORDER = "\U0010ffff"  # no character, it folds to itself


class Folded(NamedTuple):
    """Folded characters of some texts, with one space behind each text.

    Attributes:
        codes: code points; white space and punctuation are spaces.
        odd: which of them are neither letters nor spaces.
        edges: where each text begins, and where the last one ends with its space.
    """

    codes: Codes
    odd: Mask
    edges: Integers


class _Table(NamedTuple):
    """What characters fold to: a value is a code point with the flag `_ODD`, or of some the number of a spelling.

    Attributes:
        values: by code point, one value, or the number of a spelling with the flag `_SPECIAL`.
        spellings: values of all spellings, one after another; `begins` and `sizes`: where, and how many.
        moves: by number of a spelling, whether canonical order may move its character.
    """

    values: Codes
    spellings: Codes
    begins: Integers
    sizes: Integers
    moves: Mask


def _values(text: str) -> Codes:
    """The values of characters that are folded already."""
    codes = code_points(text)
    letters = np.fromiter(map(str.isalpha, text), np.bool_, len(text))
    spaces = np.fromiter(map(str.isspace, text), np.bool_, len(text))
    return np.where(spaces, SPACE, np.where(letters, codes, codes | np.uint32(_ODD))).astype(np.uint32)


@lru_cache(maxsize=1)
def _table() -> _Table:
    """Ask `fold` about every character that it may change, once: a tenth of a second."""
    points = [point for part in CHANGING for point in part]
    folded = fold("".join([chr(point) + _BORDER for point in points]))
    ends = np.flatnonzero(code_points(folded) == ord(_BORDER))
    sizes = np.diff(ends, prepend=-1) - 1
    moving = np.fromiter(map(unicodedata.combining, folded), np.uint8, len(folded)) > 0
    simple = (sizes == 1) & ~moving[ends - 1]
    values = np.arange(0x110000, dtype=np.uint32) | np.uint32(_ODD)
    values[HAN.start : HAN.stop] = _values("".join(map(chr, HAN)))
    values[np.array(points)[simple]] = _values(folded)[ends[simple] - 1]
    numbers: dict[str, int] = {}
    for place in np.flatnonzero(~simple).tolist():
        text = folded[ends[place] - sizes[place] : ends[place]]
        values[points[place]] = numbers.setdefault(text, len(numbers)) | _SPECIAL
    lengths = np.fromiter(map(len, numbers), np.int64, len(numbers))
    moves = np.array([any(map(unicodedata.combining, text)) for text in numbers], np.bool_)
    return _Table(values, _values("".join(numbers)), np.cumsum(lengths) - lengths, lengths, moves)


def fold_all(texts: Sequence[str]) -> Folded:
    """Fold texts without lone surrogates."""
    table = _table()
    joined = " ".join([*texts, ""])
    if "Σ" in joined:  # its lower case depends on its place in the word
        texts = [text.lower() for text in texts]
        joined = " ".join([*texts, ""])
    codes, edges = code_points(joined), _edges(texts)
    values = table.values[codes]
    special = np.flatnonzero(values >= _SPECIAL)
    numbers = values[special] & np.uint32(_CODE)
    if table.moves[numbers].any():
        values, edges = _one_by_one(texts)
    else:
        gone = _behind_first_digit(codes, np.flatnonzero(values == (ZERO | _ODD)))
        values, edges = _changed(values, edges, special, numbers, gone)
    return Folded(values & np.uint32(_CODE), values >= _ODD, edges)


def _edges(texts: Sequence[str]) -> Integers:
    return np.cumsum([0, *map(len, texts)]) + np.arange(len(texts) + 1)


def _one_by_one(texts: Sequence[str]) -> tuple[Codes, Integers]:
    """Values of texts with marks that may change places, which are so rare that they may take their time."""
    folded = [fold(text) for text in texts]
    return _values(" ".join([*folded, ""])), _edges(folded)


def _behind_first_digit(codes: Codes, digits: Integers) -> Integers:
    """The places of what goes when each number becomes its first digit, which is a 0 by now.

    A number is a run of digits, or two with a separator between them: of 1.2.3.4 these are 1.2 and 3.4.
    """
    if not len(digits):
        return digits
    first = np.flatnonzero(np.diff(digits, prepend=-2) != 1)
    starts, ends = digits[first], digits[np.append(first[1:] - 1, len(digits) - 1)] + 1
    linked = np.zeros(len(starts), np.bool_)
    linked[1:] = (starts[1:] - ends[:-1] == 1) & np.isin(codes[ends[:-1]], code_points(NUMBER_SEPARATORS))
    order = np.arange(len(starts))
    second = linked & ((order - np.maximum.accumulate(np.where(linked, 0, order))) % 2 == 1)
    goes = np.ones(len(digits), np.bool_)
    goes[first[~second]] = False
    return np.concatenate([digits[goes], starts[second] - 1])


def _changed(
    values: Codes, edges: Integers, special: Integers, numbers: Codes, gone: Integers
) -> tuple[Codes, Integers]:
    """Put the spellings of special characters in their place, and take away what goes."""
    sizes = _table().sizes[numbers]
    several = sizes > 1
    if several.any():
        counts = np.ones(len(values), np.int64)
        counts[special], counts[gone] = sizes, 0
        begins = np.concatenate([[0], np.cumsum(counts)])
        values, starts = np.repeat(values, counts), begins[special]
        for place in range(int(sizes.max())):
            has = sizes > place
            values[starts[has] + place] = _table().spellings[_table().begins[numbers[has]] + place]
        return values, begins[edges]
    gone = np.concatenate([special, gone])
    if len(gone):
        edges = edges - np.searchsorted(np.sort(gone), edges)
        values = np.delete(values, gone)
    return values, edges
