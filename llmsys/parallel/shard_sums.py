"""Sums over one dim of parameters that are sharded, such as those over the inputs of a neuron."""

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement


def sum_over_shards(sums: Sequence[Tensor], parts: Sequence[Tensor], dims: Sequence[int]) -> None:
    """Add up what the ranks of each sum have, in place. Collective.

    Args:
        sums: Sums over this rank's part of a dim, all of one dtype.
        parts: The parameters that they belong to: DTensors, or plain tensors, whose sums are full.
        dims: The dim of each, counted from the last one.
    """
    by_axis: dict[tuple[DeviceMesh, int], list[Tensor]] = defaultdict(list)
    for value, part, dim in zip(sums, parts, dims, strict=True):
        if isinstance(part, DTensor):
            for axis, placement in enumerate(part.placements):
                if _is_sharded(placement, part, dim) and part.device_mesh.size(axis) > 1:
                    by_axis[part.device_mesh, axis].append(value)
    for (mesh, axis), values in by_axis.items():
        # One message for all parameters: latency counts.
        joined = torch.cat([value.reshape(-1) for value in values])
        dist.all_reduce(joined, group=mesh.get_group(axis))
        pieces = joined.split([value.numel() for value in values])
        for value, piece in zip(values, pieces, strict=True):
            value.copy_(piece.view_as(value))


def build_sharded_sums(like: Tensor, dim: int) -> Tensor:
    """Build zeros for the sums over one dim of a parameter.

    Args:
        like: A DTensor, or a plain tensor, for which the result is plain.
        dim: The dim, counted from the last one.

    Returns:
        Zeros of its shape but for a length of 1 in the dim, which every rank that has a part of it
        holds.
    """
    shape = torch.Size([1 if at - like.ndim == dim else size for at, size in enumerate(like.shape)])
    if not isinstance(like, DTensor):
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    placements = [
        Replicate() if one.is_replicate() or _is_sharded(one, like, dim) else one
        for one in like.placements
    ]
    sizes, _ = compute_local_shape_and_global_offset(shape, like.device_mesh, placements)
    local = torch.zeros(tuple(sizes), dtype=like.dtype, device=like.to_local().device)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )


def _is_sharded(placement: Placement, part: DTensor, dim: int) -> bool:
    """Return whether a placement, also a strided one, shards a dim of a parameter."""
    return not placement.is_replicate() and placement.dim - part.ndim == dim  # type: ignore[attr-defined]
