"""The messages of a pipeline: a parameter on both ends gets the gradients of both, and each rank
its own stages.
"""

from typing import Any

import numpy as np
import pytest
import torch

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.pipeline import OneForwardOneBackwardConfig
from llmsys.estimate.pipeline_stages import PipelineCut
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.parallel.pipeline import PipelineRunner
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_training import build_tiny_config

CPU = torch.device("cpu")


def build_runner(ranks: int) -> PipelineRunner:
    config = build_tiny_config(num_hidden_layers=ranks, moe=None)
    layout = ParallelLayout(pipeline=ranks).resolve(ranks, config)
    mesh = build_device_meshes(layout, CPU).pipeline
    assert mesh is not None
    cut = PipelineCut(tuple(range(stage, stage + 1) for stage in range(ranks)), ranks)
    return PipelineRunner(
        cut, OneForwardOneBackwardConfig(), mesh, hidden_size=4, dtype=torch.float32, device=CPU
    )  # fmt: skip


def sum_ends(rank: int, ranks: int) -> dict[str, Any]:
    """Gradients of the shared parameter after the sum, and what the stages make of a batch
    without gradients.
    """
    runner = build_runner(ranks)
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    found: dict[str, Any] = {}
    for name, has_gradient in (("both", True), ("first alone", rank == 0), ("none", False)):
        parameter.grad = torch.full((2, 3), 10.0**rank) if has_gradient else None
        if rank in (0, ranks - 1):
            runner.sum_with_other_end(parameter)
        found[name] = None if parameter.grad is None else parameter.grad.numpy().copy()

    def run_stage(stage: int, hidden_BTD: torch.Tensor | None) -> torch.Tensor:
        return torch.ones(1, 2, 4) if hidden_BTD is None else 10 * hidden_BTD + stage

    result = runner.run_forward(1, 2, run_stage)
    found["result"] = runner.broadcast_result(result, (1, 2, 4)).numpy()
    return found


@pytest.mark.distributed
def test_both_ends_of_a_pipeline_sum_the_gradients_of_what_both_have() -> None:
    ranks = 3
    by_rank = run_ranks(sum_ends, ranks, ranks)
    for found in (by_rank[0], by_rank[-1]):
        assert np.array_equal(found["both"], np.full((2, 3), 1.0 + 100.0))
        assert np.array_equal(found["first alone"], np.ones((2, 3)))
        assert np.array_equal(found["none"], np.zeros((2, 3)))
    # 1, then 10 · 1 + 1, then 10 · 11 + 2: every stage once, in order, and the result on all ranks.
    assert all(np.array_equal(found["result"], np.full((1, 2, 4), 112.0)) for found in by_rank)
