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


def gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """The pieces of all ranks one after another along `dim`; the backward adds up what every rank made of a piece."""
    gathered: Tensor = _Gather.apply(x, group, dim)  # type: ignore[no-untyped-call]
    return gathered


def scatter_sum(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's piece, along `dim`, of the sum over ranks; its size must be a multiple of theirs."""
    piece: Tensor = _ScatterSum.apply(x, group, dim)  # type: ignore[no-untyped-call]
    return piece


def exchange(x: Tensor, group: Group, split: int, joined: int) -> Tensor:
    """All-to-all: piece r of dim `split` goes to rank r, and what arrives is put together along dim `joined`.

    Ulysses (Jacobs 2023, arXiv:2309.14509, 3.1): heads for positions before attention, positions for heads behind it.
    """
    exchanged: Tensor = _Exchange.apply(x, group, split, joined)  # type: ignore[no-untyped-call]
    return exchanged


def sum_over(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks, which all of them go on to use: so gradients are summed too."""
    total: Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return total


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _gathered(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(gradients[0], ctx.group, ctx.dim), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _scattered(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(gradients[0], ctx.group, ctx.dim), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, split: int, joined: int) -> Tensor:
        ctx.group, ctx.dims = group, (split, joined)
        return _exchanged(x, group, split, joined)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        split, joined = ctx.dims
        return _exchanged(gradients[0], ctx.group, joined, split), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _summed(gradients[0], ctx.group), None


def _gathered(x: Tensor, group: Group, dim: int) -> Tensor:
    pieces = _arrived(collectives.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name))
    by_rank: Tensor = pieces.unflatten(0, (group.size(), -1))
    return by_rank.movedim(0, dim).flatten(dim, dim + 1)


def _scattered(x: Tensor, group: Group, dim: int) -> Tensor:
    pieces = x.unflatten(dim, (group.size(), -1)).movedim(dim, 0).contiguous()
    return _arrived(collectives.reduce_scatter_tensor(pieces, "sum", group.size(), group.group_name)).squeeze(0)


def _exchanged(x: Tensor, group: Group, split: int, joined: int) -> Tensor:
    leaving = x.unflatten(split, (group.size(), -1)).movedim(split, 0).contiguous()
    one_each = [1] * group.size()
    arrived = _arrived(collectives.all_to_all_single(leaving, one_each, one_each, group.group_name))
    return arrived.movedim(0, joined).flatten(joined, joined + 1)


def _summed(x: Tensor, group: Group) -> Tensor:
    return _arrived(collectives.all_reduce(x.contiguous(), "sum", group.group_name))


def _arrived(on_its_way: Tensor) -> Tensor:
    arrived: Tensor = collectives.wait_tensor(on_its_way)
    return arrived
