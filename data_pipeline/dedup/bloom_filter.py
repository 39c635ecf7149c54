"""A counting Bloom filter that finds the keys that may occur twice, in memory that does not grow
with the keys.

Two bitmaps hold whether a counter was hit at least once and at least twice (Bloom 1970; Fan et al.
2000).

Invariants:
- All keys are counted before any is queried; the order of counting does not matter.
- A key that occurs twice is always found. About `error_rate` of the keys that occur once are found
  too.
"""

import math
from typing import Any

import numpy as np

Hashes = np.ndarray[Any, np.dtype[np.uint64]]

# 2^64 / golden ratio, odd.
_MIX = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


def compute_filter_size(keys: int, error_rate: float) -> tuple[int, int]:
    """Compute the size of a Bloom filter (-n ln p / (ln 2)^2 counters, -log2 p hashes).

    Args:
        keys: Keys that it will hold, n.
        error_rate: Share of unique keys that may pass, p.

    Returns:
        Counters, and hashes per key.
    """
    counters = max(64, math.ceil(-max(1, keys) * math.log(error_rate) / math.log(2) ** 2))
    return counters, max(1, round(-math.log2(error_rate)))


class CountingBloomFilter:
    """A Bloom filter that counts keys up to two."""

    def __init__(self, keys: int, error_rate: float) -> None:
        """Allocate an empty filter.

        Args:
            keys: Keys that it will hold. It has about 2.4 bytes for each at an error rate of 0.01,
                and more keys raise the rate.
            error_rate: Share of keys counted once that are taken for repeated ones, above 0 and
                below 1.
        """
        self.counters, self.hashes = compute_filter_size(keys, error_rate)
        self._once = np.zeros(self.counters // 8 + 1, np.uint8)
        self._twice = np.zeros(self.counters // 8 + 1, np.uint8)

    def add_keys(self, keys: Hashes) -> None:
        """Count keys; equal keys count each time they occur.

        Args:
            keys: (N,) uint64 hashes.
        """
        for places in self._iter_counter_positions(keys):
            places = np.sort(places)
            # bitwise_or.at would lose a second hit within one call
            again = places[1:] == places[:-1]
            distinct = places[np.concatenate([[True], ~again])] if len(places) else places
            met = distinct[_get_bits(self._once, distinct)]
            _set_bits(self._twice, met)
            _set_bits(self._twice, places[1:][again])
            _set_bits(self._once, distinct)

    def query_repeated(self, keys: Hashes) -> Any:
        """Find the keys that were counted twice or more.

        Args:
            keys: (N,) uint64 hashes.

        Returns:
            (N,) mask, True for every repeated key and for about `error_rate` of the others.
        """
        mask = np.ones(len(keys), np.bool_)
        for places in self._iter_counter_positions(keys):
            mask &= _get_bits(self._twice, places)
        return mask

    def _iter_counter_positions(self, keys: Hashes) -> Any:
        """Yield the counters of each key, one array per hash (Kirsch and Mitzenmacher 2006: two
        hashes make all).
        """
        other = (keys ^ (keys >> _HALF)) * _MIX
        other ^= other >> _HALF
        for number in range(self.hashes):
            # Odd, because an even step modulo 2^64 reaches fewer counters.
            mixed = (keys + np.uint64(number) * (other | np.uint64(1))) * _MIX
            yield (mixed ^ (mixed >> _HALF)) % np.uint64(self.counters)


def _get_bits(bitmap: Any, places: Any) -> Any:
    return (bitmap[places >> np.uint64(3)] >> (places & np.uint64(7)).astype(np.uint8)) & 1 == 1


def _set_bits(bitmap: Any, places: Any) -> None:
    np.bitwise_or.at(
        bitmap, places >> np.uint64(3), np.uint8(1) << (places & np.uint64(7)).astype(np.uint8)
    )
