"""The dim along which the experts of a layer are sharded. llmsys/parallel applies it, llmsys/estimate counts with it."""

from collections.abc import Sequence
from math import ceil

MAX_IMBALANCE = 1.05
"""Largest shard over the mean shard from which on another dim is sharded."""


def select_shard_dim(shape: Sequence[int], shards: int) -> int:
    """Return the dim along which a stack of experts is sharded.

    FSDP2 pads dim 0 and refuses to pad others: 8 experts on 64 ranks would fill 8 ranks and leave 56 empty. There each
    expert is split instead, along the first dim inside it that the shards divide.

    Args:
        shape: (experts of a rank, …) of one parameter.
        shards: Ranks that share these experts.

    Returns:
        0 where whole experts make even shards, or no other dim can be divided; else 1 or 2.
    """
    if compute_dim_imbalance(shape[0], shards) <= MAX_IMBALANCE:
        return 0
    return next((dim for dim in range(1, len(shape)) if shape[dim] % shards == 0), 0)


def compute_dim_imbalance(size: int, shards: int) -> float:
    """Return the largest shard of a dim over the mean shard.

    Args:
        size: Size of the dim.
        shards: Number of shards.

    Returns:
        The ratio, at least 1.
    """
    return ceil(size / shards) * shards / size
