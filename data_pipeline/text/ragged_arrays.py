"""Ragged arrays: rows of unequal lengths, concatenated, among them the chunks and lines of many
texts.

They are found in UTF-8 bytes, as `str.split` and `str.splitlines` find them in one text. A chunk is
a run of characters between white space. Chunks are columns of byte positions; no string is made for
them.

A growable array is for tables filled while text is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


def compute_offsets(counts: npt.NDArray[Any] | Sequence[int]) -> Integers:
    """Compute where each row begins.

    Args:
        counts: Items per row, shape (rows,).

    Returns:
        int64 of shape (rows + 1,): the start of each row, and the end of the last one.
    """
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, dtype=np.int64, out=offsets[1:])
    return offsets


def compute_positions(starts: Integers, counts: Integers) -> Integers:
    """Compute the positions of all items of some rows, row by row.

    Args:
        starts: First position of each row, shape (rows,).
        counts: Items per row, shape (rows,).

    Returns:
        int64 of shape (counts.sum(),).
    """
    offsets = compute_offsets(counts)
    places: Integers = np.repeat(starts - offsets[:-1], counts) + np.arange(offsets[-1])
    return places


class GrowableArray:
    """One-dimensional array with amortised appending. Rebuilding tables per batch would cost
    more than using them.
    """

    def __init__(self, dtype: npt.DTypeLike) -> None:
        """Allocate an empty array.

        Args:
            dtype: Type of the items; appended values are cast to it.
        """
        self._data: npt.NDArray[Any] = np.zeros(1024, dtype)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def extend(self, values: npt.NDArray[Any] | Sequence[int]) -> None:
        """Append values.

        Args:
            values: One-dimensional, of values that the array's dtype can hold.
        """
        size = self._size + len(values)
        if size > len(self._data):
            # Doubling makes appending linear in total.
            grown = np.zeros(max(size, 2 * len(self._data)), self._data.dtype)
            grown[: self._size] = self._data[: self._size]
            self._data = grown
        self._data[self._size : size] = values
        self._size = size

    @property
    def view(self) -> npt.NDArray[Any]:
        """Values appended so far, without a copy. It does not grow."""
        return self._data[: self._size]


Mask = npt.NDArray[np.bool_]

SHORT_BYTES = 15  # with a length byte they fit two 64-bit numbers
_PADDING = 16  # a key reads 16 bytes from the start of a chunk

_SPACES = [chr(point) for point in range(0x3001) if chr(point).isspace()]
_BREAKS = [space for space in _SPACES if len(f"a{space}b".splitlines()) == 2]
_WIDE_SPACES, _WIDE_BREAKS = (
    np.array(
        [int.from_bytes(character.encode()) for character in chosen if not character.isascii()]
    )
    for chosen in (_SPACES, _BREAKS)
)
_ASCII_SPACES = "".join(space for space in _SPACES if space.isascii()).encode()


def _build_first_byte_table(characters: Sequence[str]) -> Mask:
    """Return a mask of the bytes that these characters begin with, bool of shape (256,)."""
    return np.isin(np.arange(256), [character.encode()[0] for character in characters])


_IS_SPACE, _IS_BREAK = (
    _build_first_byte_table([character for character in chosen if character.isascii()])
    for chosen in (_SPACES, _BREAKS)
)
_BEGINS_WIDE = _build_first_byte_table(
    [character for character in _SPACES if not character.isascii()]
)
_LOW_BYTES, _HIGH_BYTES = (
    np.array(
        [(1 << 8 * min(max(size - before, 0), 8)) - 1 for size in range(SHORT_BYTES + 1)], np.uint64
    )
    for before in (0, 8)
)


@dataclass(frozen=True)
class ChunkSpans:
    """The chunks of some texts. C chunks, D texts.

    Attributes:
        joined: The texts in UTF-8, with a space before, between and after them.
        starts_C: First byte of each chunk in `joined`.
        ends_C: End of each chunk in `joined`.
        text_starts: First byte of each text in `joined`, int64 of shape (D,).
    """

    joined: bytes
    starts_C: Integers
    ends_C: Integers
    text_starts: Integers

    @cached_property
    def chunks_per_text(self) -> Integers:
        """Number of chunks of each text."""
        return np.diff(
            np.append(np.searchsorted(self.starts_C, self.text_starts), len(self.starts_C))
        )

    def compute_keys(self, chosen: Any) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Return two numbers per chosen chunk of at most `SHORT_BYTES`, which identify it
        uniquely.
        """
        starts = self.starts_C[chosen]
        sizes = (self.ends_C - self.starts_C)[chosen]
        codes = np.frombuffer(self.joined, np.uint8)
        # A view of eight bytes at every position, without a copy.
        eight: npt.NDArray[np.uint64] = np.lib.stride_tricks.as_strided(
            codes[: len(codes) // 8 * 8].view("<u8"), (len(codes) - 7,), (1,), writeable=False
        )
        low = eight[starts] & _LOW_BYTES[sizes]
        return low, (eight[starts + 8] & _HIGH_BYTES[sizes]) | (
            sizes.astype(np.uint64) << np.uint64(56)
        )

    def decode_chunks(self, chosen: Integers) -> list[str]:
        """Return the chosen chunks as strings."""
        joined = self.joined
        pairs = zip(self.starts_C[chosen].tolist(), self.ends_C[chosen].tolist(), strict=True)
        return [joined[start:end].decode() for start, end in pairs]

    def compute_line_numbers(self, lines_per_text: Integers) -> tuple[Integers, Integers]:
        """Return the line of each chunk, counted over all texts, and the chunks before which white
        space is a word.

        That is white space between two chunks of a line other than a single U+0020.
        """
        before_C, before_text = self._count_breaks_before()
        first_lines = np.cumsum(lines_per_text) - lines_per_text
        line_C = before_C + np.repeat(first_lines - before_text, self.chunks_per_text)
        codes = np.frombuffer(self.joined, np.uint8)
        odd = (self.starts_C[1:] - self.ends_C[:-1] != 1) | (codes[self.ends_C[:-1]] != ord(" "))
        return line_C, np.flatnonzero(odd & (line_C[1:] == line_C[:-1])) + 1

    def _count_breaks_before(self) -> tuple[Integers, Integers]:
        """Return the number of line ends before each chunk, and before each text."""
        codes = np.frombuffer(self.joined, np.uint8)
        is_break = _IS_BREAK[codes]
        if b"\r\n" in self.joined:
            # \r\n is one line end
            is_break[:-1] &= (codes[:-1] != ord("\r")) | (codes[1:] != ord("\n"))
        if not self.joined.isascii():
            for starts, _ in _locate_wide_characters(codes, _WIDE_BREAKS):
                is_break[starts] = True
        breaks = np.flatnonzero(is_break)
        return np.searchsorted(breaks, self.starts_C), np.searchsorted(breaks, self.text_starts)


def compute_chunk_spans(texts: Sequence[str]) -> ChunkSpans:
    """Find the chunks of texts."""
    encoded = [text.encode() for text in texts]
    # Spaces at both ends make every chunk begin and end at a change.
    joined = b" ".join([b"", *encoded, bytes(_PADDING).replace(b"\0", b" ")])
    codes = np.frombuffer(joined, np.uint8)
    space = _IS_SPACE[codes]
    if not joined.isascii():
        for starts, size in _locate_wide_characters(codes, _WIDE_SPACES):
            space[starts[:, np.newaxis] + np.arange(size)] = True
    # Changes alternate: the start of a chunk, its end, the start of the next.
    edges = np.flatnonzero(space[1:] != space[:-1]) + 1
    sizes = np.fromiter(map(len, encoded), np.int64, len(encoded)) + 1
    return ChunkSpans(joined, edges[::2], edges[1::2], np.cumsum(sizes) - sizes + 1)


def join_without_whitespace(texts: Sequence[str]) -> bytes:
    """Concatenate texts without white space.

    Args:
        texts: The texts.

    Returns:
        UTF-8 bytes without any character for which `str.isspace` is true.
    """
    joined = "".join(texts).encode().translate(None, _ASCII_SPACES)
    if joined.isascii():
        return joined
    codes = np.frombuffer(joined + bytes(2), np.uint8)
    stays = np.ones(len(codes), np.bool_)
    for starts, size in _locate_wide_characters(codes, _WIDE_SPACES):
        stays[starts[:, np.newaxis] + np.arange(size)] = False
    return joined if stays.all() else codes[:-2][stays[:-2]].tobytes()


def _locate_wide_characters(
    codes: npt.NDArray[np.uint8], names: Integers
) -> list[tuple[Integers, int]]:
    """Return the positions of characters of two and of three bytes, with their size. A name is the
    bytes as one
    integer.

    `codes` must end with two bytes that do not matter.
    """
    starts = np.flatnonzero(_BEGINS_WIDE[codes[:-2]])
    pairs = codes[starts].astype(np.int64) << 8 | codes[starts + 1]
    triples = pairs << 8 | codes[starts + 2]
    return [(starts[np.isin(pairs, names)], 2), (starts[np.isin(triples, names)], 3)]
