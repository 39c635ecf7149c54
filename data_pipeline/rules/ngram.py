"""Repeated n-grams of many documents at once, by 64-bit hashes.

Reads word columns, gives per document the characters that Gopher's repetition tests count. Equal hashes are taken for
equal n-grams. Hashes are first thrown into a table of counters: what lands there alone occurs once and needs no
sorting.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data_pipeline.rules.words import Integers, WordColumns, offsets_of

Hashes = npt.NDArray[np.uint64]

_MIX = np.uint64(0xBF58476D1CE4E5B9)
_STEP = np.uint64(0x94D049BB133111EB)
_FIRST_BITS = 40  # positions in a batch fit into so many bits


def top_ngram_characters(words: WordColumns, longest: int) -> dict[int, Integers]:
    """Length × count of the most frequent n-gram for n = 2 … longest, 0 for documents of fewer words than n.

    The n-gram is joined by single spaces. Among equally frequent ones the first to occur counts, also when none occurs
    twice.
    """
    word_hashes = _mixed(words.ids_W.astype(np.uint64))
    hashes = word_hashes + _salt(words)
    positions = np.arange(len(words.ids_W))
    ends = words.offsets[1:][words.document_of_word]
    characters = offsets_of(words.word_lengths)
    top: dict[int, Integers] = {}
    for n in range(2, longest + 1):
        inside = positions + n <= ends[positions]
        positions = positions[inside]
        hashes = hashes[inside] * _STEP + word_hashes[positions + n - 1]
        groups = _repeated(hashes)
        counts, firsts = _most_frequent(words, n, positions, groups)
        stop = np.minimum(firsts + n, len(words.ids_W))
        top[n] = (characters[stop] - characters[firsts] + n - 1) * counts
        # A longer n-gram can only occur twice where the shorter one it starts with does.
        positions, hashes = positions[groups.members], hashes[groups.members]
    return top


def duplicate_ngram_characters(words: WordColumns, shortest: int, longest: int) -> dict[int, Integers]:
    """Characters in n-grams that occurred before, for n = shortest … longest.

    Read from left to right: a repeated n-gram is counted and jumped over, a new one is remembered and the scan moves
    on by one word. The words are joined without a separator, so that `ab c` equals `a bc`.
    """
    word_hashes, powers = words.vocabulary.hashes[words.ids_W], words.vocabulary.powers[words.ids_W]
    room = words.offsets[1:][words.document_of_word] - np.arange(len(words.ids_W))
    characters, salt = offsets_of(words.word_lengths), _salt(words)
    hashes = word_hashes
    found: dict[int, Integers] = {}
    for n in range(2, longest + 1):
        hashes = hashes[:-1] * powers[n - 1 :] + word_hashes[n - 1 :] if len(hashes) else hashes
        if n < shortest:
            continue
        positions = np.flatnonzero(room[: len(hashes)] >= n)
        groups = _repeated(hashes[positions] + salt[positions])
        counted = _walk(positions[groups.members], groups.names, n)
        sizes = characters[counted + n] - characters[counted]
        documents = words.document_of_word[counted]
        found[n] = np.bincount(documents, weights=sizes, minlength=len(words.counts)).astype(np.int64)
    return found


@dataclass(frozen=True, slots=True)
class _Groups:
    """Which hashes occur more than once: their indices in order, and a small number for each distinct hash."""

    members: Integers
    names: Integers
    num_names: int


def _repeated(hashes: Hashes) -> _Groups:
    """Group the hashes that occur more than once."""
    suspects = _suspects(hashes)
    order = np.argsort(hashes[suspects])
    ordered = hashes[suspects[order]]
    new = np.ones(len(order), np.bool_)
    new[1:] = ordered[1:] != ordered[:-1]
    group = np.empty(len(order), np.int64)
    group[order] = np.cumsum(new) - 1
    multiple = np.bincount(group, minlength=1) > 1
    chosen = multiple[group]
    numbers = np.cumsum(multiple) - 1
    return _Groups(suspects[chosen], numbers[group[chosen]], int(np.count_nonzero(multiple)))


def _suspects(hashes: Hashes) -> Integers:
    """Indices that share a counter with another, so that they may be repeated; all others are not."""
    bits = max(10, (4 * len(hashes)).bit_length())
    slots = ((hashes * _MIX) >> np.uint64(64 - bits)).view(np.int64)
    counters = np.bincount(slots, minlength=1 << bits)
    return np.flatnonzero(counters[slots] > 1)


def _most_frequent(words: WordColumns, n: int, positions: Integers, groups: _Groups) -> tuple[Integers, Integers]:
    """Count and first position of the most frequent n-gram per document; count 0 where there is no n-gram."""
    counts = (words.counts >= n).astype(np.int64)
    firsts = words.offsets[:-1].copy()
    if groups.num_names == 0:
        return counts, firsts
    sizes = np.bincount(groups.names)
    first_member = np.full(groups.num_names, np.iinfo(np.int64).max)
    first_member[groups.names[::-1]] = positions[groups.members[::-1]]  # the last to write is the first to occur
    # Larger count wins, then the smaller position.
    rank = (sizes << _FIRST_BITS) | ((1 << _FIRST_BITS) - 1 - first_member)
    best = np.zeros(len(counts), np.int64)
    np.maximum.at(best, words.document_of_word[first_member], rank)
    repeated = best > 0
    counts[repeated] = best[repeated] >> _FIRST_BITS
    firsts[repeated] = (1 << _FIRST_BITS) - 1 - (best[repeated] & ((1 << _FIRST_BITS) - 1))
    return counts, firsts


def _walk(positions: Integers, names: Integers, n: int) -> Integers:
    """Positions at which the scan meets an n-gram it has seen. Documents need no border: no n-gram reaches over one."""
    seen = bytearray(int(names.max()) + 1 if len(names) else 0)
    counted: list[int] = []
    following = 0
    for position, name in zip(positions.tolist(), names.tolist(), strict=True):
        if position < following:
            continue
        if seen[name]:
            counted.append(position)
            following = position + n
        else:
            seen[name] = 1
    return np.array(counted, np.int64)


def _mixed(numbers: Hashes) -> Hashes:
    """Spread small numbers over 64 bits (the first half of splitmix64's finisher)."""
    numbers = (numbers + np.uint64(1)) * _MIX
    return (numbers ^ (numbers >> np.uint64(31))) * _STEP


def _salt(words: WordColumns) -> Hashes:
    """A number per word that differs between documents, so that n-grams are only equal within one.

    Drawn from other numbers than those of the words: the sum of word a in document b must not be that of b in a.
    """
    documents = np.arange(len(words.counts), dtype=np.uint64)
    return _mixed(documents + (np.uint64(1) << np.uint64(_FIRST_BITS)))[words.document_of_word]
