"""Documents with the same text: a 128-bit hash per document, equal hashes in one group.

Reads texts, gives hashes (two 64-bit halves) and group numbers. Promises: the groups depend on the texts alone; 128
bits make a wrong group less likely than a broken disk (10^12 documents collide with probability 10^-15).
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import xxhash

Hashes = np.ndarray[Any, np.dtype[np.uint64]]
Indices = np.ndarray[Any, np.dtype[np.int64]]


def text_hashes(texts: Iterable[str]) -> Hashes:
    """Return the xxh3_128 of each text as two halves, (N, 2) uint64."""
    digests = b"".join(xxhash.xxh3_128_digest(text.encode()) for text in texts)
    return np.frombuffer(digests, ">u8").astype(np.uint64).reshape(-1, 2)


def same_text(hashes: Hashes) -> Indices:
    """Return pairs (P, 2) of document indices with equal hashes (N, 2); neighbours of a sort, so P < N."""
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))
    in_order = hashes[order]
    equal = (in_order[1:] == in_order[:-1]).all(axis=1)
    return np.stack([order[:-1][equal], order[1:][equal]], axis=1).astype(np.int64)
