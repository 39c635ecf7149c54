"""Find the 64-bit hashes that occur more than once, without sorting.

Hashes are first counted in a hash table; one that is alone in its slot occurs once. The others go into a table of
positions, in which the first of each hash stores its own.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]

# Odd multipliers for Fibonacci hashing; each round uses the next, so that hashes that collided are separated.
_MULTIPLIERS = tuple(map(np.uint64, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)))
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
    """Return the ascending indices of hashes that may occur more than once; all others occur once."""
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
