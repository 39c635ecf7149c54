"""Sums over ranks for FSDP where gloo makes them: each rank is sent its own part only.

gloo's reduce-scatter is an all-reduce of which most is thrown away: twice the bytes, and on two cores 2.5 times as
long.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

# W ranks of a group


class CustomReduceScatter(ABC):
    """What FSDP calls in place of a reduce-scatter."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for what is sent and for what is kept."""
        return torch.empty(*size, dtype=dtype, device=device)

    @abstractmethod
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """`output_tensor` becomes the sum over ranks of this rank's part of their `input_tensor`."""


def configure_gradient_reduction(module: FSDPModule, mesh: DeviceMesh, how: CustomReduceScatter | None = None) -> None:
    """Let FSDP add up gradients over `mesh` and divide by nothing: the loss is divided by the targets of all ranks.

    `how` is None for the fastest way there is: the library's own, but for gloo.

    gloo knows plain sums only (`set_force_sum_reduction_for_comms`). Of one rank FSDP divides by nothing as it is, and
    a factor would cost it a pass.
    """
    if mesh.size() == 1:
        return
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    if how is None and mesh.device_type == "cpu":
        how = PairwiseReduceScatter()
    if how is not None:
        module.set_custom_reduce_scatter(how)  # type: ignore[arg-type]  # the library's base class is not public


class PairwiseReduceScatter(CustomReduceScatter):
    """For gloo: W - 1 rounds, each of one part, so one part more of memory."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """See OwnReduceScatter."""
        ranks, own = group.size(), group.rank()
        parts = input_tensor.view(ranks, -1)
        output_tensor.copy_(parts[own])
        arrived = torch.empty_like(output_tensor)
        for distance in range(1, ranks):
            to, source = (own + distance) % ranks, (own - distance) % ranks
            sent = dist.P2POp(dist.isend, parts[to], group=group, group_peer=to)
            received = dist.P2POp(dist.irecv, arrived, group=group, group_peer=source)
            for work in dist.batch_isend_irecv([sent, received]):
                work.wait()
            output_tensor.add_(arrived)
