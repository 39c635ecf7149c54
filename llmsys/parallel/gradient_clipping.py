"""The gradient norm over parameters of any mesh, and clipping by it. torch's own clip takes one
mesh only.

Invariants:
- Each element's square is counted once: ranks that hold the same shard count a fraction of it each.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from llmsys.parallel.process_group import all_reduce_sum, get_world_size


def list_local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """List this rank's shard of each gradient that exists.

    Args:
        parameters: DTensors and plain tensors.

    Returns:
        Local tensors that share storage with the gradients.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]


def collect_gradients(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return gradients by name, not copied; zeros for a parameter without one.

    Args:
        parameters: Names and parameters.

    Returns:
        Tensors of the kind of the parameters, DTensors or plain.
    """
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in parameters
    }


def list_absent_gradients(named: Iterable[tuple[str, Tensor]]) -> tuple[str, ...]:
    """List the parameters without a gradient, for `StepResult.absent` of an engine.

    Args:
        named: Names and parameters, after the gradients of a step were summed over ranks and before
            anything takes an absent gradient for zeros.

    Returns:
        Names.
    """
    return tuple(name for name, parameter in named if parameter.grad is None)


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[Tensor],
    max_norm: float,
    scale: float = 1.0,
    *,
    ranks: int | None = None,
    doubled: Collection[Tensor] = (),
) -> Tensor:
    """Divide all gradients by `scale`, and clip their global norm to `max_norm`, in place.
    Collective.

    Args:
        parameters: DTensors and plain tensors, on any meshes; those without a gradient are skipped.
        max_norm: The largest global norm; 0 does not clip.
        scale: The loss scale.
        ranks: Ranks that have these parameters, in shards or copies; None: all. In a pipeline those
            of a stage.
        doubled: Parameters that two stages of a pipeline have.

    Returns:
        The norm after division and before clipping, a scalar tensor; not finite where a gradient is
        not.
    """
    by_holders: dict[int, list[Tensor]] = defaultdict(list)
    ranks = ranks or get_world_size()
    doubled_ids = {id(parameter) for parameter in doubled}
    for parameter in parameters:
        if parameter.grad is not None:
            copies = 2 if id(parameter) in doubled_ids else 1
            by_holders[copies * _count_holders(parameter.grad, ranks)] += [
                grad for grad in list_local_gradients([parameter]) if grad.numel()
            ]
    squares = [
        _sum_squares(gradients) / holders for holders, gradients in by_holders.items() if gradients
    ]
    norm = all_reduce_sum(torch.stack(squares).sum()).sqrt() / scale
    if max_norm > 0 or scale != 1:
        # 1e-6 as in torch.nn.utils.clip_grad_norm_.
        factor = (
            (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm > 0 else torch.ones_like(norm)
        )
        torch._foreach_mul_(
            [grad for gradients in by_holders.values() for grad in gradients], factor / scale
        )
    return norm


def _sum_squares(gradients: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(gradients)).float().square().sum()


def _count_holders(grad: Tensor, ranks: int) -> int:
    """Count those of `ranks` that hold the same shard of a gradient: by replication, or outside
    of its mesh.
    """
    if not isinstance(grad, DTensor):
        return ranks
    mesh = grad.device_mesh
    shards = (
        mesh.size(dim)
        for dim, placement in enumerate(grad.placements)
        if not placement.is_replicate()
    )
    return ranks // math.prod(shards)
