"""Reduce-scatter of FSDP gradients."""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

# W ranks of a group


class CustomReduceScatter(ABC):
    """The interface of FSDP's custom reduce-scatter."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the buffers that are sent and kept."""
        return torch.empty(*size, dtype=dtype, device=device)

    @abstractmethod
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Set `output_tensor` to the sum over ranks of this rank's shard of their `input_tensor`. Collective."""


def configure_gradient_reduction(module: FSDPModule, mesh: DeviceMesh, how: CustomReduceScatter | None = None) -> None:
    """Make FSDP sum gradients over `mesh` without division: the loss is divided by the targets of all ranks.

    `how` None uses the fastest: the library's own, but a pairwise exchange for gloo.
    """
    if mesh.size() == 1:
        return  # FSDP does not divide over one rank, and a factor would cost it a pass
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction but the plain sum
    if how is None and mesh.device_type == "cpu":
        # gloo's reduce-scatter is an all-reduce: twice the bytes, 2.5 times as long on two cores.
        how = PairwiseReduceScatter()
    if how is not None:
        module.set_custom_reduce_scatter(how)  # type: ignore[arg-type]  # the library's base class is not public


class PairwiseReduceScatter(CustomReduceScatter):
    """Reduce-scatter in W - 1 rounds of point-to-point messages, each of one shard, with one shard of extra memory."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Implement `CustomReduceScatter.__call__`."""
        ranks, own = group.size(), group.rank()
        shards = input_tensor.view(ranks, -1)
        output_tensor.copy_(shards[own])
        arrived = torch.empty_like(output_tensor)
        for distance in range(1, ranks):
            to, source = (own + distance) % ranks, (own - distance) % ranks
            sent = dist.P2POp(dist.isend, shards[to], group=group, group_peer=to)
            received = dist.P2POp(dist.irecv, arrived, group=group, group_peer=source)
            for work in dist.batch_isend_irecv([sent, received]):
                work.wait()
            output_tensor.add_(arrived)
