"""Find repeated word n-grams of many documents at once, by 64-bit hashes.

Find the 64-bit hashes that occur more than once, without sorting.

Hashes are first counted in a hash table; one that is alone in its slot occurs once. The others go
into a table of positions, in which the first of each hash stores its own.

Invariants:
- Equal hashes are taken for equal n-grams.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmsys.data_pipeline.text.ragged_arrays import Integers, compute_offsets
from llmsys.data_pipeline.text.word_columns import WordColumns

Hashes = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]

# Odd multipliers for Fibonacci hashing; each round uses the next, so that hashes that collided are
# separated.
_MULTIPLIERS = tuple(
    map(np.uint64, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93))
)
_FEWEST_BITS = 10


@dataclass(frozen=True, slots=True)
class DuplicateGroups:
    """The hashes that occur more than once.

    Attributes:
        members: their indices, ascending.
        leaders: for each member, the index of the first equal hash.
        sizes: for each member, the number of occurrences of its hash.
    """

    members: Indices
    leaders: Indices
    sizes: Indices


def group_duplicates(hashes: Hashes) -> DuplicateGroups:
    """Group equal hashes."""
    suspects = select_candidate_duplicates(hashes)
    leaders = _compute_leaders(hashes[suspects])
    sizes = np.bincount(leaders, minlength=len(leaders))[leaders]
    chosen = np.flatnonzero(sizes > 1)
    return DuplicateGroups(suspects[chosen], suspects[leaders[chosen]], sizes[chosen])


def select_candidate_duplicates(hashes: Hashes) -> Indices:
    """Return the ascending indices of hashes that may occur more than once; all others occur
    once.
    """
    suspects = _select_colliding(hashes, 0)
    return suspects[_select_colliding(hashes[suspects], 1)]


def _select_colliding(hashes: Hashes, round_number: int) -> Indices:
    """Return the indices of hashes that share a slot with another."""
    slots, size = _compute_slots(hashes, round_number)
    counters = np.bincount(slots, minlength=size)
    return np.flatnonzero(counters[slots] > 1)


def _compute_leaders(hashes: Hashes) -> Indices:
    """Return for each hash the index of the first equal one."""
    leaders = np.empty(len(hashes), np.int64)
    left = np.arange(len(hashes))
    round_number = 2
    while len(left):
        own = hashes[left]
        slots, size = _compute_slots(own, round_number)
        table = np.zeros(size, np.int64)
        table[slots[::-1]] = left[::-1]  # the last to write is the first to occur
        found = table[slots]
        # Others met a different hash in their slot, and go through the next round.
        same = hashes[found] == own
        leaders[left[same]] = found[same]
        left = left[~same]
        round_number += 1
    return leaders


def _compute_slots(hashes: Hashes, round_number: int) -> tuple[Indices, int]:
    """Return a slot for each hash, and the number of slots: about four per hash."""
    bits = max(_FEWEST_BITS, (2 * len(hashes)).bit_length())
    multiplier = _MULTIPLIERS[round_number % len(_MULTIPLIERS)]
    mixed = (hashes ^ (hashes >> np.uint64(29 + round_number % 5))) * multiplier
    return (mixed >> np.uint64(64 - bits)).view(np.int64), 1 << bits


_MIX = np.uint64(0xBF58476D1CE4E5B9)
_STEP = np.uint64(0x94D049BB133111EB)
_FIRST_BITS = 40  # bits of a position in a batch
_HALF = 31


@dataclass(frozen=True, slots=True)
class RepeatedNgrams:
    """The n-grams that occur more than once in their document.

    Attributes:
        n: number of words.
        positions: where each starts, ascending.
        leaders: for each position, where the first equal n-gram starts.
        sizes: for each position, the number of occurrences.
    """

    n: int
    positions: Integers
    leaders: Integers
    sizes: Integers

    @property
    def is_later(self) -> npt.NDArray[np.bool_]:
        """Mask of the occurrences after the first."""
        return np.not_equal(self.positions, self.leaders)


@dataclass(frozen=True, slots=True)
class TopNgrams:
    """The most frequent n-gram of each document: its number of occurrences, and its characters
    without spaces.
    """

    counts: Integers
    characters: Integers


def iter_repeated_ngrams(words: WordColumns, longest: int) -> Iterator[tuple[int, RepeatedNgrams]]:
    """Yield the repeated n-grams for n = 2 … longest; words are compared one by one, not
    concatenated.
    """
    word_hashes = mix_hashes(words.ids_W.astype(np.uint64))
    hashes = word_hashes + compute_salts(words)
    positions = np.arange(len(words.ids_W))
    ends = words.offsets[1:][words.document_of_word]
    for n in range(2, longest + 1):
        inside = positions + n <= ends[positions]
        positions = positions[inside]
        hashes = hashes[inside] * _STEP + word_hashes[positions + n - 1]
        groups = group_duplicates(hashes)
        leaders = positions[groups.leaders]
        # A longer n-gram can only be repeated where its prefix is.
        positions = positions[groups.members]
        hashes = hashes[groups.members]
        yield n, RepeatedNgrams(n, positions, leaders, groups.sizes)


def select_top_ngrams(
    words: WordColumns, groups: RepeatedNgrams, *, once: bool = False, longest: bool = False
) -> TopNgrams:
    """Return the most frequent n-gram per document; of equally frequent ones the first, or the
    longest.

    A document without repeats has a count of 0 or, with `once`, its first n-gram.
    """
    first = np.flatnonzero(~groups.is_later)
    starts = groups.positions[first]
    sizes = groups.sizes[first]
    characters = compute_offsets(words.word_lengths)
    rank = (
        characters[starts + groups.n] - characters[starts]
        if longest
        else (1 << _FIRST_BITS) - 1 - starts
    )
    best = np.zeros(len(words.counts), np.int64)
    # The count in the high bits decides; the rank below breaks ties.
    np.maximum.at(best, words.document_of_word[starts], (sizes << _FIRST_BITS) | rank)
    has_any = best > 0
    low = best & ((1 << _FIRST_BITS) - 1)
    if longest:
        return TopNgrams(best >> _FIRST_BITS, low)
    start = np.where(has_any, (1 << _FIRST_BITS) - 1 - low, words.offsets[:-1])
    stop = np.minimum(start + groups.n, len(words.ids_W))
    counts = np.where(has_any, best >> _FIRST_BITS, (words.counts >= groups.n) if once else 0)
    return TopNgrams(counts, characters[stop] - characters[start])


def mix_hashes(numbers: Hashes) -> Hashes:
    """Spread small numbers over 64 bits (the first half of splitmix64's finisher)."""
    numbers = (numbers + np.uint64(1)) * _MIX
    return (numbers ^ (numbers >> np.uint64(_HALF))) * _STEP


def compute_salts(words: WordColumns) -> Hashes:
    """Return a number per word that differs between documents, so that n-grams are equal only
    within a document.
    """
    # Offset from the word ids, or word a in document b would add up to the same as word b in
    # document a.
    documents = np.arange(len(words.counts), dtype=np.uint64)
    return mix_hashes(documents + (np.uint64(1) << np.uint64(_FIRST_BITS)))[words.document_of_word]
