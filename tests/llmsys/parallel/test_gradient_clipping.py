"""Norm and clipping of shards, copies and plain tensors over two ranks: those of torch on whole
gradients.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from llmsys.parallel.gradient_clipping import clip_gradients, list_local_gradients
from tests.helpers.ranks import run_ranks

ROWS = 3
CASES = [(0.0, 1.0), (0.5, 1.0), (100.0, 1.0), (0.5, 8.0), (0.0, 8.0)]
"""Limit and loss scale; the norm is between 0.5 and 100."""


def build_gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((2 * ROWS, 3), (4,), (2, 2))]


def clip_shards(rank: int) -> list[tuple[float, list[Any]]]:
    """The norm and this rank's gradients of a shard, a copy on a mesh, and a plain tensor."""
    mesh, found = init_device_mesh("cpu", (2,)), []
    for limit, scale in CASES:
        split, copied, plain = (gradient * scale for gradient in build_gradients())
        gradients = [
            DTensor.from_local(
                split[ROWS * rank : ROWS * (rank + 1)], mesh, [Shard(0)], run_check=False
            ),
            DTensor.from_local(copied, mesh, [Replicate()], run_check=False),
            plain,
        ]
        parameters = [torch.nn.Parameter(gradient.clone()) for gradient in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        norm = float(clip_gradients(parameters, limit, scale))
        found.append(
            (norm, [gradient.clone().numpy() for gradient in list_local_gradients(parameters)])
        )
    return found


@pytest.mark.distributed
def test_norm_and_clipped_gradients_are_those_of_whole_ones() -> None:
    for rank, found in enumerate(run_ranks(clip_shards, 2)):
        for (limit, _), (norm, local) in zip(CASES, found, strict=True):
            parameters = [
                torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in build_gradients()
            ]
            for parameter, gradient in zip(parameters, build_gradients(), strict=True):
                parameter.grad = gradient
            expected = torch.nn.utils.clip_grad_norm_(parameters, limit or float("inf"))
            assert norm == pytest.approx(float(expected), rel=1e-6)
            split, copied, plain = (parameter.grad for parameter in parameters)
            assert split is not None
            expected_local = [split[ROWS * rank : ROWS * (rank + 1)], copied, plain]
            torch.testing.assert_close(
                [torch.from_numpy(gradient) for gradient in local], expected_local
            )
