"""What a step trained on as one number, the same whoever held which row: for the record, and for replaying it.

Each row of tokens and targets gives a 64-bit hash; those of a step are added modulo 2^64. Ranks then add up their sums,
so neither order nor number of ranks, nor the size of micro-batches, changes it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from llmsys.data.batch import Batch
from llmsys.data.shuffle import hash_splitmix64

# B rows, T positions

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def compute_batch_digest(batches: Sequence[Batch]) -> int:
    """The sum over all rows, as a signed 64-bit integer, so that it fits a tensor. Rows without a target count 0."""
    total = 0
    with np.errstate(over="ignore"):
        for batch in batches:
            learns_B = (batch.targets_BT >= 0).view(len(batch.targets_BT), -1).any(1).numpy(force=True)
            rows_B = _hash_rows(batch.tokens_BT) + hash_splitmix64(_hash_rows(batch.targets_BT))
            if batch.source_BS is not None:
                rows_B = rows_B + hash_splitmix64(hash_splitmix64(_hash_rows(batch.source_BS)))
            total += int(rows_B[learns_B].sum(dtype=np.uint64))
    return int(np.uint64(total & 0xFFFFFFFFFFFFFFFF).astype(np.int64))


def format_digest(digest: int) -> str:
    """16 hex digits."""
    return f"{digest & 0xFFFFFFFFFFFFFFFF:016x}"


def _hash_rows(ids_BT: torch.Tensor) -> NDArray[np.uint64]:
    """A hash of each row: every id mixed with its place, added up."""
    ids = ids_BT.view(len(ids_BT), -1).numpy(force=True).astype(np.int64).view(np.uint64)
    places = hash_splitmix64((np.arange(ids.shape[1], dtype=np.uint64) + np.uint64(1)) * _GOLDEN)
    rows: NDArray[np.uint64] = hash_splitmix64(hash_splitmix64(ids + _GOLDEN) ^ places).sum(axis=1, dtype=np.uint64)
    return rows
