"""The backward passes of every schedule: which of them is the last one of its stage."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from llmsys.config.pipeline import PipelineScheduleConfig
from llmsys.estimate.pipeline_stages import PipelineCut
from llmsys.parallel.pipeline import PipelineRunner
from llmsys.parallel.process_group import all_gather_object
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.distributed

SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"kind": "gpipe"},
    "1f1b": {"kind": "1f1b"},
    "interleaved": {"kind": "interleaved", "stages_per_rank": 2},
}
RANKS, WIDTH, ROWS, POSITIONS = 2, 4, 1, 3

# By stage: whether each of its backward passes was said to be the last one.
Passes = dict[int, list[bool]]


def run_schedules(rank: int) -> dict[str, list[Passes]]:
    """The passes of two steps with 2 and then 4 micro-batches, over all ranks."""
    return {
        name: [merge_ranks(passes) for passes in run_steps(settings)]
        for name, settings in SCHEDULES.items()
    }


def merge_ranks(own: Passes) -> Passes:
    return {stage: said for part in all_gather_object(own) for stage, said in part.items()}


def run_steps(settings: dict[str, Any]) -> list[Passes]:
    schedule: Any = TypeAdapter(PipelineScheduleConfig).validate_python(settings)
    num_stages = RANKS * settings.get("stages_per_rank", 1)
    cut = PipelineCut(tuple(range(stage, stage + 1) for stage in range(num_stages)), RANKS)
    mesh = torch.distributed.init_device_mesh("cpu", (RANKS,))
    options: dict[str, Any] = {
        "hidden_size": WIDTH,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
    }
    runner = PipelineRunner(cut, schedule, mesh, **options)
    weights = {stage: torch.ones(WIDTH, requires_grad=True) for stage in runner.stages}
    found = []
    for num_micro_batches in (2, 4):
        passes: Passes = defaultdict(list)

        def run_stage(stage: int, hidden_BLD: Tensor | None, number: int) -> Tensor:
            entered = torch.ones(ROWS, POSITIONS, WIDTH) if hidden_BLD is None else hidden_BLD
            left = entered * weights[stage]
            return left.sum() if cut.is_last(stage) else left

        @contextmanager
        def enter_backward(stage: int, last: bool, passes: Passes = passes) -> Iterator[None]:
            passes[stage].append(last)
            yield

        runner.run_step(num_micro_batches, ROWS, POSITIONS, run_stage, enter_backward)
        found.append(dict(passes))
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, list[Passes]]:
    return dict(run_ranks(run_schedules, RANKS)[0])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_last_backward_of_each_stage_is_said_to_be_the_last_and_no_other(
    found: dict[str, list[Passes]], schedule: str
) -> None:
    num_stages = RANKS * SCHEDULES[schedule].get("stages_per_rank", 1)
    for num_micro_batches, passes in zip((2, 4), found[schedule], strict=True):
        expected = [False] * (num_micro_batches - 1) + [True]
        assert passes == dict.fromkeys(range(num_stages), expected)
