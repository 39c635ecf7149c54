"""Differentiable collectives of a forward pass.

Invariants:
- A loss is a sum over ranks, so the gradient of an all-gather is a reduce-scatter and vice versa. Nothing is averaged.
- Shards along the gathered dim are in the order of the group's ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup
# The functional forms are dispatched ops, which activation checkpointing can save.
collectives = torch.ops._c10d_functional


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """Concatenate the shards of all ranks along `dim`. The backward is a reduce-scatter. Collective."""
    gathered: Tensor = _AllGather.apply(x, group, dim)  # type: ignore[no-untyped-call]
    return gathered


def reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return this rank's shard, along `dim`, of the sum over ranks; the ranks must divide the dim. Collective."""
    piece: Tensor = _ReduceScatter.apply(x, group, dim)  # type: ignore[no-untyped-call]
    return piece


def all_to_all(x: Tensor, group: Group, split: int, joined: int) -> Tensor:
    """Send shard r of dim `split` to rank r, and concatenate the received shards along dim `joined`. Collective.

    Ulysses (Jacobs 2023, arXiv:2309.14509, 3.1): heads for positions before attention, positions for heads after it.
    """
    exchanged: Tensor = _AllToAll.apply(x, group, split, joined)  # type: ignore[no-untyped-call]
    return exchanged


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Return the sum over ranks. All ranks use it, so gradients are summed too. Collective."""
    total: Tensor = _AllReduce.apply(x, group)  # type: ignore[no-untyped-call]
    return total


def start_exchange(x_MD: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    """Start an all-to-all of rows: `send[r]` of them go to rank r, `receive[r]` come from it. Collective.

    What is computed before `finish_exchange` overlaps it; in backward, what was computed between the two overlaps the
    exchange of gradients.

    Args:
        x_MD: Rows, in the order of the ranks.
        send: Rows for each rank.
        receive: Rows from each rank.
        group: The ranks.

    Returns:
        A tensor that only `finish_exchange` may read.
    """
    pending_MD: Tensor = _StartExchange.apply(x_MD, send, receive, group)  # type: ignore[no-untyped-call]
    return pending_MD


def finish_exchange(pending_MD: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    """Wait for the rows of `start_exchange`: an accelerator's stream waits, the host does not.

    Args:
        pending_MD: From `start_exchange`.
        send: As there.
        receive: As there.
        group: The ranks.

    Returns:
        The received rows, in the order of the ranks.
    """
    arrived_MD: Tensor = _FinishExchange.apply(pending_MD, send, receive, group)  # type: ignore[no-untyped-call]
    return arrived_MD


def exchange_numbers(x_MK: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    """Exchange rows without gradients, as `start_exchange` and `finish_exchange` do. Collective.

    Args:
        x_MK: Rows of integers.
        send: Rows for each rank.
        receive: Rows from each rank.
        group: The ranks.

    Returns:
        The received rows.
    """
    return _wait_tensor(collectives.all_to_all_single(x_MK, receive, send, group.group_name))


class _StartExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
        started: Tensor = collectives.all_to_all_single(x_MD.contiguous(), receive, send, group.group_name)
        return started

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _wait_tensor(gradients[0]), None, None, None


class _FinishExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending_MD: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
        ctx.splits, ctx.group = (send, receive), group
        return _wait_tensor(pending_MD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive = ctx.splits
        gradient = gradients[0].contiguous()
        return collectives.all_to_all_single(gradient, send, receive, ctx.group.group_name), None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _all_gather_tensor(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter_tensor(gradients[0], ctx.group, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _reduce_scatter_tensor(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather_tensor(gradients[0], ctx.group, ctx.dim), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, split: int, joined: int) -> Tensor:
        ctx.group, ctx.dims = group, (split, joined)
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
    pieces = _wait_tensor(collectives.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name))
    by_rank: Tensor = pieces.unflatten(0, (group.size(), -1))
    return by_rank.movedim(0, dim).flatten(dim, dim + 1)


def _reduce_scatter_tensor(x: Tensor, group: Group, dim: int) -> Tensor:
    pieces = x.unflatten(dim, (group.size(), -1)).movedim(dim, 0).contiguous()
    return _wait_tensor(collectives.reduce_scatter_tensor(pieces, "sum", group.size(), group.group_name)).squeeze(0)


def _all_to_all_tensor(x: Tensor, group: Group, split: int, joined: int) -> Tensor:
    leaving = x.unflatten(split, (group.size(), -1)).movedim(split, 0).contiguous()
    ones = [1] * group.size()
    arrived = _wait_tensor(collectives.all_to_all_single(leaving, ones, ones, group.group_name))
    return arrived.movedim(0, joined).flatten(joined, joined + 1)


def _all_reduce_tensor(x: Tensor, group: Group) -> Tensor:
    return _wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group.group_name))


def _wait_tensor(pending: Tensor) -> Tensor:
    arrived: Tensor = collectives.wait_tensor(pending)
    return arrived
