"""Shuffled order as a pure function of a key.

Invariants:
- The same (fingerprint, seed, epoch, name) gives the same permutation on every machine and with any version of numpy.
  numpy's generators are not used: their streams may change between versions.
"""

import hashlib

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
    """Return the finalizer of splitmix64 (Steele, Lea, Flood 2014), a bijection on 64-bit integers."""
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
