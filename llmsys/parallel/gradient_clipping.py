"""The gradient norm over every parameter, whatever mesh it lives on, and clipping by it.

torch's own clip refuses tensors of different meshes. A number's square is counted once: the ranks that hold the same
shard, which other axes copy, count a share of it each.
"""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from llmsys.parallel.process_group import all_reduce_sum, get_world_size


def list_local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """This rank's part of each gradient that exists."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float, scale: float = 1.0) -> Tensor:
    """Divide all gradients by `scale`, and make their joint norm at most `max_norm` (0: no limit).

    Gives the norm in between, which is not finite where a gradient is not.
    """
    alike: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            alike[_count_holders(parameter.grad)] += [
                grad for grad in list_local_gradients([parameter]) if grad.numel()
            ]
    squares = [_sum_squares(gradients) / holders for holders, gradients in alike.items() if gradients]
    norm = all_reduce_sum(torch.stack(squares).sum()).sqrt() / scale
    if max_norm > 0 or scale != 1:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm > 0 else torch.ones_like(norm)
        torch._foreach_mul_([grad for gradients in alike.values() for grad in gradients], factor / scale)
    return norm


def _sum_squares(gradients: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(gradients)).float().square().sum()


def _count_holders(grad: Tensor) -> int:
    """How many ranks hold the same part of a gradient: those beside its mesh, and those it is replicated to."""
    if not isinstance(grad, DTensor):
        return get_world_size()
    mesh = grad.device_mesh
    kept = (mesh.size(dim) for dim, placement in enumerate(grad.placements) if not placement.is_replicate())
    return get_world_size() // math.prod(kept)
