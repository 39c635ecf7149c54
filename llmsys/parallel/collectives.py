"""The collectives inside a forward pass, each with the collective that is its gradient.

A loss is a sum over ranks here, so the gradient of a gather is a sum that is scattered, and the other way round;
nothing is averaged. Pieces of the gathered dim are in the order of the group's ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup
# The functional forms are operations that recomputation can tell apart and keep.
collectives = torch.ops._c10d_functional


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """The pieces of all ranks one after another along `dim`; the backward adds up what every rank made of a piece."""
    gathered: Tensor = _AllGather.apply(x, group, dim)  # type: ignore[no-untyped-call]
    return gathered


def reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's piece, along `dim`, of the sum over ranks; its size must be a multiple of theirs."""
    piece: Tensor = _ReduceScatter.apply(x, group, dim)  # type: ignore[no-untyped-call]
    return piece


def all_to_all(x: Tensor, group: Group, split: int, joined: int) -> Tensor:
    """All-to-all: piece r of dim `split` goes to rank r, and what arrives is put together along dim `joined`.

    Ulysses (Jacobs 2023, arXiv:2309.14509, 3.1): heads for positions before attention, positions for heads behind it.
    """
    exchanged: Tensor = _AllToAll.apply(x, group, split, joined)  # type: ignore[no-untyped-call]
    return exchanged


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks, which all of them go on to use: so gradients are summed too."""
    total: Tensor = _AllReduce.apply(x, group)  # type: ignore[no-untyped-call]
    return total


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
    one_each = [1] * group.size()
    arrived = _wait_tensor(collectives.all_to_all_single(leaving, one_each, one_each, group.group_name))
    return arrived.movedim(0, joined).flatten(joined, joined + 1)


def _all_reduce_tensor(x: Tensor, group: Group) -> Tensor:
    return _wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group.group_name))


def _wait_tensor(on_its_way: Tensor) -> Tensor:
    arrived: Tensor = collectives.wait_tensor(on_its_way)
    return arrived
