"""Functions of several full tensors of one parameter, such as a weight and its preconditioners,
that are sharded.

Every rank gathers them and repeats the work. Stacks whose matrices are full on a rank are not
gathered.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llmsys.parallel.dtensor_slices import get_local_slice, has_full_matrices


def update_full_tensors(
    tensors: Sequence[Tensor], function: Callable[[list[Tensor]], None]
) -> None:
    """Call a function that changes full tensors in place, and keep this rank's part of each.
    Collective.

    Args:
        tensors: Shards, sharded alike; plain tensors are full.
        function: Works on each matrix of a stack by itself.
    """
    if all(has_full_matrices(one) for one in tensors):
        local = [one.to_local() if isinstance(one, DTensor) else one for one in tensors]
        # Uneven shards leave some ranks without a matrix.
        if local[0].numel():
            function(local)
        return
    full = [one.full_tensor() if isinstance(one, DTensor) else one for one in tensors]
    function(full)
    for one, whole in zip(tensors, full, strict=True):
        if isinstance(one, DTensor):
            one.to_local().copy_(get_local_slice(whole, one))


def build_sharded_zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    """Build zeros that are sharded as another tensor is.

    Args:
        shape: Shape of the full result; it has as many dims as `like`, of other sizes.
        like: A DTensor, or a plain tensor, for which the result is plain.

    Returns:
        Zeros with the dtype, device and placements of `like`.
    """
    shape = tuple(shape)
    if not isinstance(like, DTensor):
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    placements = [Replicate() if one.is_replicate() else one for one in like.placements]
    sizes, _ = compute_local_shape_and_global_offset(shape, like.device_mesh, placements)
    local = torch.zeros(tuple(sizes), dtype=like.dtype, device=like.to_local().device)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
