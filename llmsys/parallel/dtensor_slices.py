"""Conversion between full tensors and this rank's shards."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard


def has_full_matrices(tensor: Tensor) -> bool:
    """Return whether the local part of a tensor consists of full matrices.

    Args:
        tensor: A DTensor, or a plain tensor, of which a rank holds all.

    Returns:
        True where nothing is sharded, or only the stack that the matrices are in, also by several
        axes.
    """
    return not isinstance(tensor, DTensor) or all(
        placement.is_replicate() or (tensor.ndim > 2 and is_stack_divided(placement))
        for placement in tensor.placements
    )


def is_stack_divided(placement: Placement) -> bool:
    """Return whether a placement shards the first dim of a tensor.

    Args:
        placement: The placement on one axis of a mesh.

    Returns:
        True for a shard of dim 0, also for one whose rows are not adjacent: the outer of two axes
        that shard it, for which torch's `is_shard` is False.
    """
    return isinstance(placement, Shard | _StridedShard) and placement.dim == 0


def get_local_slice(whole: Tensor, like: Tensor) -> Tensor:
    """Return the shard of a full tensor that this rank holds.

    Args:
        whole: The full tensor, equal on every rank.
        like: A tensor of the same shape with the placements.

    Returns:
        A view of `whole`; all of it where `like` is no DTensor.
    """
    if not isinstance(like, DTensor):
        return whole
    for dim, (begin, size) in enumerate(get_local_region(like)):
        whole = whole.narrow(dim, begin, size)
    return whole


def get_local_region(tensor: Tensor) -> list[tuple[int, int]]:
    """Return (first index, size) in each dim of the part of a tensor that this rank holds.

    Args:
        tensor: A DTensor, or a plain tensor, of which a rank holds all.

    Returns:
        One pair per dim.
    """
    if not isinstance(tensor, DTensor):
        return [(0, length) for length in tensor.shape]
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    # An empty shard begins past the end, which `narrow` rejects.
    return [
        (min(start, length), size)
        for start, size, length in zip(offsets, sizes, tensor.shape, strict=True)
    ]


def group_by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by device mesh: torch's operations on lists of DTensors take one mesh.

    Args:
        tensors: DTensors and plain tensors.

    Returns:
        Lists of tensors with the same mesh, in the order given.
    """
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        by_mesh.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(
            tensor
        )
    return list(by_mesh.values())


def to_dtensor_shard(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a full tensor as a DTensor sharded along its first dim.

    Args:
        whole: The full tensor, equal on every rank.
        mesh: A mesh of one axis.

    Returns:
        A DTensor with a copy of this rank's rows.
    """
    rows = len(whole)
    # As Shard(0) cuts: equal shards rounded up, the last ones shorter or empty.
    per_rank = -(-rows // mesh.size())
    start = min(rows, mesh.get_local_rank() * per_rank)
    local = whole[start : min(rows, start + per_rank)].clone()
    return DTensor.from_local(
        local,
        mesh,
        [Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=torch.empty(whole.shape, device="meta").stride(),
    )
