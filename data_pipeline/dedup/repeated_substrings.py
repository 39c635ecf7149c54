"""Find strings of at least L characters that occur more than once in a corpus, without a suffix array.

Every window of exactly L characters of a repeated string is repeated, and every copy of a window but the first is a
later occurrence. So the characters in a later copy of a window are exactly those in a later occurrence of a string that
a suffix array would find (Lee et al. 2022).

Comparing all windows would cost more than the texts take. Each window is represented by its anchor: the smallest piece
of L / 2 characters, by a rolling hash (winnowing; Schleimer et al. 2003). Equal windows have equal anchors. Only
windows whose anchor occurs twice in the corpus are hashed (128 bits) and compared. About one piece in L / 4 is an
anchor.

Invariants:
- No repeated string is missed.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from data_pipeline.text.rolling_hash import INVERSE_BASE, Hashes, RollingHasher
from data_pipeline.text.simplify_text import Codes, to_code_points

Integers = np.ndarray[Any, np.dtype[np.int64]]

_MIX = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)
_CHARACTERS_AT_ONCE = 1 << 20  # bounds the work tables at about 110 MB


def compute_winnowing_anchors(text: str, length: int) -> Hashes:
    """Compute the anchors of the windows of a text.

    Args:
        text: the text.
        length: characters of a window, L.

    Returns:
        (N,) uint64: hashes of the pieces of L / 2 characters that are the smallest of some window, once per position.
    """
    parts = [_compute_slice_anchors(codes, length) for _, codes in _slice_code_points(text, length)]
    return np.concatenate([np.zeros(0, np.uint64), *parts])


def iter_repeated_windows(text: str, length: int, repeated: Hashes) -> Iterator[Integers]:
    """Find the windows whose anchor occurs twice in the corpus.

    Args:
        text: the text.
        length: characters of a window, L.
        repeated: sorted uint64 hashes of the repeated anchors.

    Yields:
        (N,) int64 offsets of windows in characters, slice by slice of the text.
    """
    for start, codes in _slice_code_points(text, length) if len(repeated) else ():
        smallest = _compute_window_minima(_hash_pieces(codes, length // 2), length - length // 2 + 1)
        indices = np.minimum(np.searchsorted(repeated, smallest), len(repeated) - 1)
        yield start + np.flatnonzero(repeated[indices] == smallest)


def hash_windows(text: str, begins: Integers, length: int) -> Hashes:
    """Hash windows with xxh3_128.

    Args:
        text: the text.
        begins: (N,) offsets of windows in characters.
        length: characters of a window.

    Returns:
        (N, 2) uint64: the high and the low half of each hash.
    """
    windows = (text[begin : begin + length].encode("utf-8", "surrogatepass") for begin in begins.tolist())
    digests = b"".join(map(xxhash.xxh3_128_digest, windows))
    return np.frombuffer(digests, ">u8").astype(np.uint64).reshape(-1, 2)


def remove_windows(text: str, begins: Sequence[int], length: int) -> str:
    """Remove windows from a text.

    Args:
        text: the text.
        begins: offsets of windows in characters, in any order.
        length: characters of a window.

    Returns:
        The stripped remaining pieces, joined by newlines.
    """
    kept, position = [], 0
    for begin in sorted(begins):
        if begin > position:
            kept.append(text[position:begin])
        position = max(position, begin + length)
    kept.append(text[position:])
    return "\n".join(part for part in (part.strip() for part in kept) if part)


def _slice_code_points(text: str, length: int) -> list[tuple[int, Codes]]:
    """Return the code points of a text in overlapping slices that hold each window once, with their offsets."""
    codes = to_code_points(text)
    step = max(_CHARACTERS_AT_ONCE, 4 * length)
    return [(start, codes[start : start + step + length - 1]) for start in range(0, len(codes) - length + 1, step)]


def _compute_slice_anchors(codes: Codes, length: int) -> Hashes:
    hashes = _hash_pieces(codes, length // 2)
    width = length - length // 2 + 1
    smallest = _compute_window_minima(hashes, width)
    # A piece is the smallest of some window if the largest of the minima of its windows is its own hash.
    padded = np.concatenate([np.zeros(width - 1, np.uint64), smallest, np.zeros(width - 1, np.uint64)])
    found: Hashes = hashes[~_compute_window_minima(~padded, width) == hashes]
    return found


def _hash_pieces(codes: Codes, length: int) -> Hashes:
    """Hash every piece of `length` characters: its rolling hash divided by base^(length - 1), and mixed."""
    hashes = RollingHasher(codes).hash_windows(length)
    hashes *= np.uint64(pow(int(INVERSE_BASE), length - 1, 1 << 64))
    hashes = (hashes ^ (hashes >> _HALF)) * _MIX
    return hashes ^ (hashes >> _HALF)


def _compute_window_minima(values: Hashes, width: int) -> Hashes:
    """Return the minimum of every `width` neighbours (van Herk 1992: prefix and suffix minima of blocks)."""
    count = len(values) - width + 1
    blocks = -(-len(values) // width)
    padded = np.full(blocks * width, np.iinfo(np.uint64).max, np.uint64)
    padded[: len(values)] = values
    table = padded.reshape(blocks, width)
    forward = np.minimum.accumulate(table, axis=1).ravel()
    backward = np.minimum.accumulate(table[:, ::-1], axis=1)[:, ::-1].ravel()
    minima: Hashes = np.minimum(backward[:count], forward[width - 1 : width - 1 + count])
    return minima
