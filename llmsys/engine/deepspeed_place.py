"""Where DeepSpeed keeps masters and moments: what all places can be asked, and what they are made with.

The places themselves are in deepspeed_state.py (ZeRO-0, 1 and 2) and deepspeed_partitions.py (ZeRO-3).
"""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from llmsys.engine.engine import Accept
from llmsys.parallel.group import all_reduce_sum
from llmsys.parallel.mesh import DeviceMeshes


class DeepSpeedState(Protocol):
    """Masters and moments of one engine. The key None is the fp32 parameter itself, others are those of `MOMENTS`."""

    def get_tensor(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        """The whole tensor, on every rank. Collective."""
        ...

    def set_tensor(self, parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
        """Keep this rank's part of a whole tensor."""
        ...

    def sync_weights(self) -> None:
        """Weights from masters, after those were set. Collective."""
        ...

    def get_step_counters(self) -> list[Tensor]:
        """Adam's counts of steps."""
        ...

    def set_loss_scale(self, scale: float) -> float:
        """The loss of the next step is to be multiplied by `scale`, its gradients divided. Gives what DeepSpeed leaves
        to the caller to multiply by.
        """
        ...

    def step_optimizer(self, loss: float, accept: Accept) -> tuple[float, bool]:
        """Clip and step unless `accept` refuses; (gradient norm before clipping, whether it was applied).

        A step whose gradient is not finite is never applied.
        """
        ...


def build_empty_moments(shard: Tensor) -> dict[str, Tensor]:
    """Adam's state before the first step; there from the start, so that a checkpoint can be loaded into it."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=shard.device),
        "exp_avg": torch.zeros_like(shard, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(shard, requires_grad=False),
    }


def is_split(parameter: Tensor) -> bool:
    """Whether each rank of the expert axis has other rows of it."""
    return not getattr(parameter, "allreduce", True)


def compute_full_norm(gradients: Iterable[tuple[Tensor, bool]], meshes: DeviceMeshes) -> Tensor:
    """The norm over gradients that every rank has whole, but for those of split experts (True). Collective."""
    squares: dict[bool, list[Tensor]] = {False: [], True: []}
    for gradient, split in gradients:
        squares[split].append(gradient.norm().square())
    total = torch.stack(squares[False]).sum()
    if squares[True] and meshes.expert is not None:
        experts = torch.stack(squares[True]).sum()
        total += all_reduce_sum(experts) * meshes.expert.size() / meshes.world.size()
    return total.sqrt()
