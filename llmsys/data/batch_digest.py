"""A 64-bit digest of the rows that a step trained on, for the log and for replay.

Invariants:
- The digest is a sum modulo 2^64 over rows. It does not depend on the order of rows, the number of ranks or the size of
  micro-batches; ranks add up their sums.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from llmsys.data.batch import Batch
from llmsys.data.shuffle import hash_splitmix64

# B rows, T positions

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, the increment of splitmix64


def compute_batch_digest(batches: Sequence[Batch]) -> int:
    """Compute the digest of the rows of some micro-batches.

    Args:
        batches: Micro-batches of one step on this rank.

    Returns:
        The sum over rows as a signed 64-bit integer, which fits a tensor. Rows without a target count 0.
    """
    total = 0
    with np.errstate(over="ignore"):
        for batch in batches:
            learns_B = (batch.targets_BT >= 0).view(len(batch.targets_BT), -1).any(1).numpy(force=True)
            # Hashed again per role: swapped tokens and targets must not give the same sum.
            rows_B = _hash_rows(batch.tokens_BT) + hash_splitmix64(_hash_rows(batch.targets_BT))
            if batch.source_BS is not None:
                rows_B = rows_B + hash_splitmix64(hash_splitmix64(_hash_rows(batch.source_BS)))
            total += int(rows_B[learns_B].sum(dtype=np.uint64))
    return int(np.uint64(total & 0xFFFFFFFFFFFFFFFF).astype(np.int64))


def format_digest(digest: int) -> str:
    """Format a digest as 16 hexadecimal digits.

    Args:
        digest: From `compute_batch_digest`, summed over ranks modulo 2^64.

    Returns:
        The digits, lower case.
    """
    return f"{digest & 0xFFFFFFFFFFFFFFFF:016x}"


def _hash_rows(ids_BT: torch.Tensor) -> NDArray[np.uint64]:
    """Return a hash of each row: the sum of its ids, each mixed with its position."""
    ids = ids_BT.view(len(ids_BT), -1).numpy(force=True).astype(np.int64).view(np.uint64)
    positions = hash_splitmix64((np.arange(ids.shape[1], dtype=np.uint64) + np.uint64(1)) * _GOLDEN)
    rows: NDArray[np.uint64] = hash_splitmix64(hash_splitmix64(ids + _GOLDEN) ^ positions).sum(axis=1, dtype=np.uint64)
    return rows
