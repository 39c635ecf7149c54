"""Parameters that every rank holds, computed from the placements of one rank's shards.

Invariants:
- The counts of the rank that runs are those of its real shards; a difference is an error.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from llmsys.config.parallel_layout import ParallelLayout

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class RankKind:
    """Ranks with equal shards of every parameter.

    Attributes:
        first_rank: the lowest of them.
        num_ranks: how many there are.
        parameters: elements that each of them holds.
    """

    first_rank: int
    num_ranks: int
    parameters: int


@dataclass(frozen=True)
class ParameterCounts:
    """Elements by rank.

    Attributes:
        total: elements of the model.
        own: elements of the rank that runs.
        largest: elements of the largest rank.
        largest_rank: that rank.
        smallest: elements of the smallest rank.
        mean: mean over the ranks.
        kinds: ranks with different shards, largest first.
        own_kind: place of the rank that runs among them.
    """

    total: int
    own: int
    largest: int
    largest_rank: int
    smallest: int
    mean: float
    kinds: tuple[RankKind, ...]
    own_kind: int

    @property
    def imbalance(self) -> float:
        """Elements of the largest rank over the mean."""
        return self.largest / self.mean


def compute_parameter_counts(
    model: nn.Module, layout: ParallelLayout, rank: int
) -> ParameterCounts:
    """Compute the elements that every rank holds.

    Args:
        model: sharded model of one rank.
        layout: resolved layout.
        rank: the rank of the model's shards.

    Returns:
        The counts, and the kinds of ranks. In a pipeline those of the ranks with the same stages.
    """
    offset = rank - rank % layout.ranks_per_stage
    layout = layout.model_copy(update={"pipeline": 1})
    rank = rank - offset
    coordinates = compute_coordinates(layout)
    counts = np.zeros(layout.world_size, dtype=np.int64)
    # A running hash of the shard sizes tells ranks with different shards apart; equal totals may
    # hide them.
    keys = np.zeros(layout.world_size, dtype=np.uint64)
    cache: dict[Any, Numbers] = {}
    total = own = 0
    for parameter in model.parameters():
        key: Any = (tuple(parameter.shape), None)
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            key = (tuple(parameter.shape), (names, tuple(map(str, parameter.placements))))
        if key not in cache:
            cache[key] = _count_by_rank(parameter, coordinates, layout.world_size)
        sizes = cache[key]
        total += parameter.numel()
        local = (
            parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()
        )
        if sizes[rank] != local:
            raise AssertionError(
                f"rank {rank} holds {local} elements of a parameter, and {sizes[rank]} were "
                "computed"
            )
        own += local
        counts += sizes
        keys = keys * np.uint64(1_000_003) + sizes.astype(np.uint64)
    kinds, own_kind = _group_kinds(keys, counts, rank)
    kinds = tuple(replace(kind, first_rank=kind.first_rank + offset) for kind in kinds)
    return ParameterCounts(
        total=total,
        own=own,
        largest=int(counts.max()),
        largest_rank=int(counts.argmax()) + offset,
        smallest=int(counts.min()),
        mean=float(counts.mean()),
        kinds=kinds,
        own_kind=own_kind,
    )


def compute_coordinates(layout: ParallelLayout) -> dict[str, tuple[Numbers, int]]:
    """Return the coordinates of all ranks on every named axis, and its size; see device_mesh.py
    for their order.
    """
    ranks = np.arange(layout.world_size, dtype=np.int64)
    inner = ranks % layout.ranks_per_replica
    fsdp = inner // layout.tensor
    sizes = {
        "world": (ranks, layout.world_size),
        "replicate": (ranks // layout.ranks_per_replica, layout.replicate),
        "replica": (inner, layout.ranks_per_replica),
        "shard": (inner // layout.sequence_parallel_size, layout.shard),
        "context": (fsdp % layout.context, layout.context),
        "fsdp": (fsdp, layout.shard * layout.context),
        "tensor": (ranks % layout.tensor, layout.tensor),
        "expert": (inner % layout.expert, layout.expert),
        "expert_fsdp": (inner // layout.expert, layout.ranks_per_replica // layout.expert),
    }
    return sizes


def _count_by_rank(
    parameter: Any, coordinates: dict[str, tuple[Numbers, int]], world_size: int
) -> Numbers:
    """Return the elements of one parameter on every rank."""
    sizes = [np.full(world_size, size, dtype=np.int64) for size in parameter.shape]
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        # A strided shard was cut after the shards of later mesh dims.
        for dim in sorted(
            range(len(names)), key=lambda dim: isinstance(parameter.placements[dim], _StridedShard)
        ):
            placement = parameter.placements[dim]
            if isinstance(placement, Shard | _StridedShard):
                place, parts = coordinates[names[dim]]
                sizes[placement.dim] = _compute_chunk_length(sizes[placement.dim], place, parts)
    product = np.ones(world_size, dtype=np.int64)
    for size in sizes:
        product *= size
    return product


def _compute_chunk_length(sizes: Numbers, place: Numbers, parts: int) -> Numbers:
    """Return the length of chunk `place` of `torch.chunk` into `parts`, where rows past the end
    are 0.
    """
    rows = -(-sizes // parts)
    return np.clip(sizes - place * rows, 0, rows)


def _group_kinds(
    keys: NDArray[np.uint64], counts: Numbers, rank: int
) -> tuple[tuple[RankKind, ...], int]:
    """Return the kinds of ranks, and the place of one rank's kind among them."""
    _, firsts, members = np.unique(keys, return_index=True, return_counts=True)
    kinds = [
        RankKind(int(first), int(number), int(counts[first]))
        for first, number in zip(firsts, members, strict=True)
    ]
    kinds.sort(key=lambda kind: (-kind.parameters, kind.first_rank))
    own = next(number for number, kind in enumerate(kinds) if keys[kind.first_rank] == keys[rank])
    return tuple(kinds), own
