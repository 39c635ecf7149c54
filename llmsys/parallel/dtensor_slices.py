"""Whole tensors and this rank's slice of them."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def get_local_slice(whole: Tensor, like: Tensor) -> Tensor:
    """The part of `whole` that this rank holds if it is laid out as `like`."""
    if not isinstance(like, DTensor):
        return whole
    shape, offset = compute_local_shape_and_global_offset(whole.shape, like.device_mesh, like.placements)
    for dim, (size, start) in enumerate(zip(shape, offset, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), size)
    return whole


def group_by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors of the same mesh together, in the order given: what torch's operations on lists of DTensors ask for."""
    alike: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(alike.values())


def to_dtensor_shard(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """`whole`, which every rank of the one-axis `mesh` has, as a DTensor split along its first dim."""
    rows = len(whole)
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
