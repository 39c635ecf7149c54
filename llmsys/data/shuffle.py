"""Order as a pure function: which item stands at which place, from a key alone.

Reads nothing, gives permutations, and promises that the same (fingerprint, seed, epoch, name) gives the same
permutation on every machine, with any version of numpy, for ever. That is why it does not use numpy's generators,
whose streams may change between versions.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray


def derive_order_key(*parts: str | int) -> int:
    """A 64-bit key from any number of names and integers."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def hash_splitmix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection on 64-bit integers that looks random."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def build_permutation(size: int, key: int) -> NDArray[np.int64]:
    """The integers below `size`, shuffled by `key`.

    Sorting by a bijective hash of the index cannot tie, so the order does not depend on the sorting algorithm.
    """
    indices = np.arange(size, dtype=np.uint64)
    with np.errstate(over="ignore"):
        hashes = hash_splitmix64(indices * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key))
    return np.argsort(hashes, kind="stable").astype(np.int64)
