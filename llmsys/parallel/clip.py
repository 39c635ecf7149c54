"""The gradient norm over every parameter, whatever mesh it lives on, and clipping by it.

torch's own clip refuses tensors of different meshes. A shard's squares are counted once: replicas hold the same
shard, so the sum over all ranks is divided by the number of replicas.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from llmsys.parallel.group import sum_over_ranks


def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """This rank's part of each gradient that exists."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float, replicas: int) -> Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm` (0: no limit). Gives the norm before."""
    gradients = [grad for grad in local_gradients(parameters) if grad.numel()]
    squares = torch.stack(torch._foreach_norm(gradients)).float().square().sum()
    norm = (sum_over_ranks(squares) / replicas).sqrt()
    if max_norm > 0:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
