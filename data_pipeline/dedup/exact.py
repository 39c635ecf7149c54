"""Documents with the same text: a 128-bit hash per document.

Reads texts, gives hashes (two 64-bit halves). Promises: 128 bits make a wrong match less likely than a broken disk
(10^12 documents collide with probability 10^-15).
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import xxhash

Hashes = np.ndarray[Any, np.dtype[np.uint64]]


def hash_texts(texts: Iterable[str]) -> Hashes:
    """Return the xxh3_128 of each text as two halves, (N, 2) uint64."""
    digests = b"".join(xxhash.xxh3_128_digest(text.encode()) for text in texts)
    return np.frombuffer(digests, ">u8").astype(np.uint64).reshape(-1, 2)
