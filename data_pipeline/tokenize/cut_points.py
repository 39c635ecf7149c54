"""Find the positions where a text can be cut so that its parts have the tokens of the whole.

Both BPE and unigram build every token from neighbouring characters of one piece. So a token always ends between two
characters that are adjacent in no piece, and the text before that position does not influence the tokens after it.

Reads the pieces of a vocabulary; positions are in UTF-8 bytes.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]

SPACE, NEWLINE = 0x20, 0x0A
ESCAPED_SPACE = "\u2581"  # a space in pieces; texts here have U+0020 instead
BLOCK = 1 << 20  # characters
_CODE_POINTS = 0x110000
_LEFT, _RIGHT = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B)  # odd, from the golden ratio and from MurmurHash3


class CutPointFinder:
    """The cuts that a vocabulary allows.

    Args:
        pieces: all pieces that represent text, spaces written as U+0020.
        byte_fallback: whether unknown characters become bytes. If not, adjacent unknown characters are one unknown
            token, and no cut may separate them.

    Attributes:
        problem: the reason why no cut between words is allowed; None if cuts are allowed.
    """

    def __init__(self, pieces: Iterable[str], byte_fallback: bool) -> None:
        texts = list(pieces)
        codes = decode_code_points("".join(texts).encode())
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        inner = np.ones(len(codes), np.bool_)
        inner[np.cumsum(lengths)[:-1]] = False
        inner[:1] = False
        left, right = codes[:-1][inner[1:]], codes[1:][inner[1:]]
        self._shift = np.uint32(32 - max(16, (32 * len(left)).bit_length()))
        self._joined = np.zeros(1 << (32 - int(self._shift)), np.bool_)
        self._joined[self._hash_pairs(left, right)] = True
        self._known = None if byte_fallback else _build_membership(codes[(np.cumsum(lengths) - lengths)[lengths == 1]])
        self._cuts_newlines = not (((left == NEWLINE) != (right == NEWLINE)).any() or self._is_unknown(NEWLINE))
        self.problem = self._find_problem(left, right)

    def _find_problem(self, left: npt.NDArray[np.uint32], right: npt.NDArray[np.uint32]) -> str | None:
        if ((right == SPACE) & (left != SPACE)).any():
            return "it has pieces with a space after another character"
        return "it has no piece for a space" if self._is_unknown(SPACE) else None

    def _is_unknown(self, code: int) -> bool:
        return self._known is not None and not self._known[code]

    def _hash_pairs(self, left: npt.NDArray[np.uint32], right: npt.NDArray[np.uint32]) -> Any:
        """Return the slots of pairs in the table; a collision costs a cut, never a token."""
        return (left * _LEFT ^ right * _RIGHT) * _LEFT >> self._shift

    def find_coarse_cuts(self, data: Bytes, _: Places) -> Flags:
        """Mark the bytes that begin a run of spaces or newlines, or the text after newlines. (len(data) + 1,) flags.

        Faster than `find_fine_cuts`, which looks up every pair of characters.
        """
        cuts = np.zeros(len(data) + 1, np.bool_)
        spaces = data == SPACE
        np.greater(spaces[1:], spaces[:-1], out=cuts[1:-1])
        if self._cuts_newlines:
            newlines = data == NEWLINE
            cuts[1:-1] |= newlines[1:] != newlines[:-1]
        return cuts

    def find_fine_cuts(self, data: Bytes, _: Places) -> Flags:
        """Mark the bytes that begin a character that no piece joins to the one before. (len(data) + 1,) flags."""
        codes = decode_code_points(data.tobytes())
        cuts = np.zeros(len(data) + 1, np.bool_)
        joined = np.zeros(len(codes) - 1, np.bool_)
        for start in range(0, len(joined), BLOCK):  # blocks bound the memory for a long text
            block = codes[start : start + BLOCK + 1]
            joined[start : start + BLOCK] = self._joined[self._hash_pairs(block[:-1], block[1:])]
        if self._known is not None:
            unknown = ~self._known[codes]
            joined |= unknown[1:] & unknown[:-1]
        cuts[np.flatnonzero((data & 0xC0) != 0x80)[1:]] = ~joined
        return cuts


def decode_code_points(text: bytes) -> npt.NDArray[np.uint32]:
    """Return the code points of a text in UTF-8.

    Raises:
        UnicodeDecodeError: if it is not valid UTF-8.
    """
    return np.frombuffer(text.decode().encode("utf-32-le"), np.uint32)


def _build_membership(codes: npt.NDArray[np.uint32]) -> Flags:
    known = np.zeros(_CODE_POINTS, np.bool_)
    known[codes] = True
    return known
