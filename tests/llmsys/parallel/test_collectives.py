"""Collectives of the forward pass against the same on whole tensors in one process, with their
gradients.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from llmsys.parallel.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from tests.helpers.ranks import run_ranks

RANKS = 2
Whole = Callable[[list[Tensor]], list[Tensor]]
"""(input of each rank) → output of each rank."""

CASES: dict[str, tuple[Callable[[Tensor], Tensor], Whole]] = {
    "all_gather": (
        lambda x: all_gather(x, dist.group.WORLD, 1),  # type: ignore[arg-type]
        lambda xs: [torch.cat(xs, dim=1)] * RANKS,
    ),
    "reduce_scatter": (
        lambda x: reduce_scatter(x, dist.group.WORLD, 1),  # type: ignore[arg-type]
        lambda xs: list(sum(xs[1:], xs[0]).chunk(RANKS, dim=1)),
    ),
    "all_reduce": (
        lambda x: all_reduce(x, dist.group.WORLD),  # type: ignore[arg-type]
        lambda xs: [sum(xs[1:], xs[0])] * RANKS,
    ),
    "all_to_all": (
        lambda x: all_to_all(x, dist.group.WORLD, 2, 1),  # type: ignore[arg-type]
        lambda xs: [
            torch.cat([x.chunk(RANKS, dim=2)[rank] for x in xs], dim=1) for rank in range(RANKS)
        ],
    ),
}


def build_input(rank: int) -> Tensor:
    return torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(rank)).requires_grad_()


def weigh_output(output: Tensor, rank: int) -> Tensor:
    """A loss whose gradient differs between all elements and ranks."""
    return (
        output * torch.randn(output.shape, generator=torch.Generator().manual_seed(10 + rank))
    ).sum()


def run_collectives(rank: int) -> dict[str, list[Any]]:
    found = {}
    for name, (collective, _) in CASES.items():
        x = build_input(rank)
        output = collective(x)
        weigh_output(output, rank).backward()
        assert x.grad is not None
        found[name] = [output.detach().numpy(), x.grad.numpy()]
    return found


@pytest.mark.distributed
def test_outputs_and_gradients_are_those_of_whole_tensors() -> None:
    found = run_ranks(run_collectives, RANKS)
    for name, (_, whole) in CASES.items():
        inputs = [build_input(rank) for rank in range(RANKS)]
        outputs = whole(inputs)
        torch.stack(
            [weigh_output(output, rank) for rank, output in enumerate(outputs)]
        ).sum().backward()
        for rank in range(RANKS):
            output, gradient = map(torch.from_numpy, found[rank][name])
            torch.testing.assert_close(
                output, outputs[rank], msg=lambda text, name=name: f"{name}: {text}"
            )
            torch.testing.assert_close(
                gradient, inputs[rank].grad, msg=lambda text, name=name: f"{name}: {text}"
            )
