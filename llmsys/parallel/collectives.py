"""Differentiable collectives of a forward pass, and the reduce-scatter of FSDP gradients.

Invariants:
- A loss is a sum over ranks, so the gradient of an all-gather is a reduce-scatter and vice versa.
  Nothing is averaged.
- Shards along the gathered dim are in the order of the group's ranks.
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
    """The interface of FSDP's custom reduce-scatter."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the buffers that are sent and kept."""
        return torch.empty(*size, dtype=dtype, device=device)

    @abstractmethod
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum the gradients of a unit over ranks, and keep this rank's shard. Collective.

        Args:
            output_tensor: Set to the sum of this rank's shards, (n,).
            input_tensor: Gradients of this rank, (W n,): the shards of all ranks one after another.
            group: The W ranks.
            op: Not used: `configure_gradient_reduction` makes every reduction a sum.
            async_op: Not used: nothing is returned to wait for.
        """


def configure_gradient_reduction(
    module: FSDPModule, mesh: DeviceMesh, how: CustomReduceScatter | None = None
) -> None:
    """Make FSDP sum gradients without division: the loss is divided by the targets of all ranks.

    Args:
        module: A module with FSDP2.
        mesh: The ranks that share its parameters.
        how: How gradients are reduced. None: the library's own way, but a pairwise exchange
            under gloo, whose reduce-scatter is an all-reduce.
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
    """Reduce-scatter in W - 1 rounds of point-to-point messages, each of one shard, with one
    shard of extra memory.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Implement `CustomReduceScatter.__call__`."""
        ranks = group.size()
        own = group.rank()
        # FSDP lays out the shards of all ranks one after another.
        shards = input_tensor.view(ranks, -1)
        output_tensor.copy_(shards[own])
        arrived = torch.empty_like(output_tensor)
        # In each round every rank sends to one rank and receives from one, so no link is shared.
        for distance in range(1, ranks):
            to = (own + distance) % ranks
            source = (own - distance) % ranks
            sent = dist.P2POp(dist.isend, shards[to], group=group, group_peer=to)
            received = dist.P2POp(dist.irecv, arrived, group=group, group_peer=source)
            for work in dist.batch_isend_irecv([sent, received]):
                work.wait()
            # FSDP was made to ask for sums only, whatever `op` it names.
            output_tensor.add_(arrived)


Group = dist.ProcessGroup
# The functional forms are dispatched ops, which activation checkpointing can save.
collectives = torch.ops._c10d_functional


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """Concatenate the shards of all ranks. The backward is a reduce-scatter. Collective.

    Args:
        x: This rank's shard; the same shape on every rank.
        group: The ranks.
        dim: Dim of the shards.

    Returns:
        The full tensor, the same on every rank.
    """
    gathered: Tensor = _AllGather.apply(x, group, dim)  # type: ignore[no-untyped-call]
    return gathered


def reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """Sum a tensor over ranks and keep this rank's shard. The backward is an all-gather.
    Collective.

    Args:
        x: This rank's summand.
        group: The ranks; their number divides the dim.
        dim: Dim of the shards.

    Returns:
        Shard r of the sum on rank r.
    """
    piece: Tensor = _ReduceScatter.apply(x, group, dim)  # type: ignore[no-untyped-call]
    return piece


def all_to_all(x: Tensor, group: Group, split: int, joined: int) -> Tensor:
    """Exchange shards: split one dim over the ranks and concatenate another. Collective.

    Ulysses (Jacobs 2023, arXiv:2309.14509, 3.1): heads for positions before attention, positions
    for heads after it.

    Args:
        x: This rank's tensor.
        group: The ranks; their number divides dim `split`.
        split: Dim whose shard r goes to rank r.
        joined: Dim along which the received shards are concatenated.

    Returns:
        A tensor with dim `split` divided and dim `joined` multiplied by the number of ranks.
    """
    exchanged: Tensor = _AllToAll.apply(x, group, split, joined)  # type: ignore[no-untyped-call]
    return exchanged


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum a tensor over ranks, with gradients. Collective.

    All ranks use the sum, so its gradients are summed over ranks too.

    Args:
        x: This rank's summand.
        group: The ranks.

    Returns:
        The sum, the same on every rank.
    """
    total: Tensor = _AllReduce.apply(x, group)  # type: ignore[no-untyped-call]
    return total


class RowExchange:
    """One all-to-all of rows with uneven splits, in two halves: what is computed between them
    overlaps it.

    In backward the second half starts the exchange of gradients and the first one finishes it, so
    the backward of what was computed between them overlaps that.

    Args:
        send: Rows for each rank.
        receive: Rows from each rank.
        group: The ranks.
    """

    def __init__(self, send: list[int], receive: list[int], group: Group) -> None:
        self.send = send
        self.receive = receive
        self.group = group
        # Autograd would compare its shape with that of the received rows.
        self.pending_gradient: Tensor | None = None

    def start(self, x_MD: Tensor) -> Tensor:
        """Start sending rows. Collective.

        Args:
            x_MD: Rows to send, in the order of the ranks.

        Returns:
            What `finish` takes. Nothing else may read it: the rows may not have arrived.
        """
        pending_MD: Tensor = _StartExchange.apply(x_MD, self)  # type: ignore[no-untyped-call]
        return pending_MD

    def finish(self, pending_MD: Tensor) -> Tensor:
        """Wait for the received rows. On accelerators the stream waits, not the host.

        Args:
            pending_MD: Result of `start`.

        Returns:
            The received rows, in the order of the ranks.
        """
        arrived_MD: Tensor = _FinishExchange.apply(pending_MD, self)  # type: ignore[no-untyped-call]
        return arrived_MD


def exchange_rows(x_MD: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    """Send `send[r]` rows to rank r, and receive `receive[r]` from it. Collective.

    Args:
        x_MD: Rows, in the order of the ranks; integers have no gradients.
        send: Rows for each rank.
        receive: Rows from each rank.
        group: The ranks.

    Returns:
        The received rows, in the order of the ranks.
    """
    exchange = RowExchange(send, receive, group)
    return exchange.finish(exchange.start(x_MD))


class _StartExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return _start_all_to_all(x_MD, exchange.send, exchange.receive, exchange.group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # Taken out: the exchange would otherwise hold the gradient until the next step.
        pending = ctx.exchange.pending_gradient
        ctx.exchange.pending_gradient = None
        return _wait_tensor(pending), None


class _FinishExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending_MD: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return _wait_tensor(pending_MD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        exchange.pending_gradient = _start_all_to_all(
            gradients[0], exchange.receive, exchange.send, exchange.group
        )
        # Without values: `_StartExchange` has the gradient.
        return gradients[0].new_zeros(()).expand_as(gradients[0]), None


def _start_all_to_all(x_MD: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    pending: Tensor = collectives.all_to_all_single(
        x_MD.contiguous(), receive, send, group.group_name
    )
    return pending


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group = group
        ctx.dim = dim
        return _all_gather_tensor(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter_tensor(gradients[0], ctx.group, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group = group
        ctx.dim = dim
        return _reduce_scatter_tensor(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather_tensor(gradients[0], ctx.group, ctx.dim), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, split: int, joined: int) -> Tensor:
        ctx.group = group
        ctx.dims = (split, joined)
        return _all_to_all_tensor(x, group, split, joined)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        split, joined = ctx.dims
        return _all_to_all_tensor(gradients[0], ctx.group, joined, split), None, None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _all_reduce_tensor(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_reduce_tensor(gradients[0], ctx.group), None


def _all_gather_tensor(x: Tensor, group: Group, dim: int) -> Tensor:
    pieces = _wait_tensor(
        collectives.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name)
    )
    # The collective stacks the ranks along dim 0, whatever the dim.
    by_rank: Tensor = pieces.unflatten(0, (group.size(), -1))
    return by_rank.movedim(0, dim).flatten(dim, dim + 1)


def _reduce_scatter_tensor(x: Tensor, group: Group, dim: int) -> Tensor:
    pieces = x.unflatten(dim, (group.size(), -1)).movedim(dim, 0).contiguous()
    # The dim of ranks is left, with one entry.
    return _wait_tensor(
        collectives.reduce_scatter_tensor(pieces, "sum", group.size(), group.group_name)
    ).squeeze(0)


def _all_to_all_tensor(x: Tensor, group: Group, split: int, joined: int) -> Tensor:
    leaving = x.unflatten(split, (group.size(), -1)).movedim(split, 0).contiguous()
    # Splits count entries of dim 0, which has one per rank.
    ones = [1] * group.size()
    arrived = _wait_tensor(collectives.all_to_all_single(leaving, ones, ones, group.group_name))
    return arrived.movedim(0, joined).flatten(joined, joined + 1)


def _all_reduce_tensor(x: Tensor, group: Group) -> Tensor:
    return _wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group.group_name))


def _wait_tensor(pending: Tensor) -> Tensor:
    arrived: Tensor = collectives.wait_tensor(pending)
    return arrived
