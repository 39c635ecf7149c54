"""Shuffled order as a pure function of a key.

Invariants:
- The same (fingerprint, seed, epoch, name) gives the same permutation on every machine and with any
  version of numpy. numpy's generators are not used: their streams may change between versions.
- A `KeyedPermutation` of any size takes constant memory, and has an inverse.
"""

import hashlib
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


def derive_order_key(*parts: str | int) -> int:
    """Derive a 64-bit key from names and integers.

    Args:
        parts: What the order depends on, such as a fingerprint, a seed and an epoch.

    Returns:
        An unsigned 64-bit integer.
    """
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def hash_splitmix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash 64-bit integers by the finalizer of splitmix64 (Steele, Lea, Flood 2014).

    Args:
        values: Of any shape.

    Returns:
        Hashes of the same shape. The function is a bijection, so distinct values stay distinct.
    """
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def build_permutation(size: int, key: int) -> NDArray[np.int64]:
    """Shuffle the integers below `size` by a key.

    Args:
        size: Number of items.
        key: From `derive_order_key`.

    Returns:
        The permutation, int64 (size,).
    """
    # A bijective hash cannot tie, so the order does not depend on the sorting algorithm.
    indices = np.arange(size, dtype=np.uint64)
    with np.errstate(over="ignore"):
        hashes = hash_splitmix64(indices * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key))
    return np.argsort(hashes, kind="stable").astype(np.int64)


# Permutations up to this size are stored (512 KiB): a Feistel network of few values is not quite
# uniform.
MAX_STORED = 1 << 16
_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the increment of splitmix64


class KeyedPermutation:
    """A permutation of the integers below `size`, computed on demand in memory that does not grow
    with `size`.

    A generalised Feistel network on pairs below (a, b) with a · b just above `size`; values outside
    are mapped again until one is inside (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains").
    """

    def __init__(self, size: int, key: int) -> None:
        """Choose the permutation; `key` is from `derive_order_key`."""
        self.size = size
        self._stored = build_permutation(size, key) if size <= MAX_STORED else None
        # The square root, rounded up.
        root = math.isqrt(max(size, 1) - 1) + 1
        self._sides = np.uint64(root), np.uint64(-(-size // root))
        counters = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(key)
        self._keys = hash_splitmix64(counters)

    def get_values(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the value at each place.

        Args:
            places: Places in [0, size), int64 of any shape.

        Returns:
            Values, of the same shape.
        """
        return (
            self._walk(places, self._map_forward) if self._stored is None else self._stored[places]
        )

    def find_places(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the place of each value: the inverse of `get_values`.

        Args:
            values: Values in [0, size), int64 of any shape.

        Returns:
            Places, of the same shape.
        """
        return (
            self._walk(values, self._map_backward)
            if self._stored is None
            else np.argsort(self._stored)[values]
        )

    def _walk(
        self, numbers: NDArray[np.int64], step: Callable[[NDArray[np.uint64]], NDArray[np.uint64]]
    ) -> NDArray[np.int64]:
        mapped = step(numbers.astype(np.uint64))
        # It ends: repeated mapping returns to the start, which is inside.
        while (outside := mapped >= np.uint64(self.size)).any():
            mapped[outside] = step(mapped[outside])
        return mapped.astype(np.int64)

    def _map_forward(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        sides = self._sides
        halves = list(np.divmod(numbers, self._sides[1]))
        for number, key in enumerate(self._keys):
            side = number & 1
            other = 1 - (number & 1)
            halves[side] = (
                halves[side] + self._hash_half(halves[other], key) % sides[side]
            ) % sides[side]
        mapped: NDArray[np.uint64] = halves[0] * sides[1] + halves[1]
        return mapped

    def _map_backward(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        sides = self._sides
        halves = list(np.divmod(numbers, self._sides[1]))
        for number, key in reversed(list(enumerate(self._keys))):
            side = number & 1
            other = 1 - (number & 1)
            added = self._hash_half(halves[other], key) % sides[side]
            # Unsigned numbers must not fall below 0.
            halves[side] = (halves[side] + sides[side] - added) % sides[side]
        mapped: NDArray[np.uint64] = halves[0] * sides[1] + halves[1]
        return mapped

    @staticmethod
    def _hash_half(half: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
        return hash_splitmix64(half * np.uint64(_GOLDEN) + key)


class RowOrder:
    """The integers below `size` divided into consecutive runs, of which each place takes the next
    of its row.

    With `rows` places in a step, row r of step s has number s of run r. The first runs are one
    longer where `rows` does not divide `size`.

    Args:
        size: Number of integers.
        rows: Number of runs.
    """

    def __init__(self, size: int, rows: int) -> None:
        self.rows = rows
        self.length, self.num_longer = divmod(size, rows)

    def get_values(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the value at each place.

        Args:
            places: Places in [0, size), int64 of any shape.

        Returns:
            Values, of the same shape.
        """
        numbers, rows = np.divmod(places, self.rows)
        return rows * self.length + np.minimum(rows, self.num_longer) + numbers

    def find_places(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the place of each value: the inverse of `get_values`.

        Args:
            values: Values in [0, size), int64 of any shape.

        Returns:
            Places, of the same shape.
        """
        longer = self.num_longer * (self.length + 1)
        rows = np.where(
            values < longer,
            values // (self.length + 1),
            self.num_longer + (values - longer) // max(self.length, 1),
        )
        numbers: NDArray[np.int64] = values - rows * self.length - np.minimum(rows, self.num_longer)
        return numbers * self.rows + rows
