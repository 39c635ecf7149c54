"""The first cases of sums over ranks: replicas of an interleaved pipeline, and sinks under the
tensor axis.

Every schedule and axis is in test_gradient_reduction.py and in llmsys/parallel's tests, which take
longer.
"""

import numpy as np
import pytest
import torch

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.doctor.parity_reference import OPTIMIZER, Trajectory, compute_reference_trajectory
from tests.helpers.ranks import run_ranks
from tests.helpers.sharded_steps import all_gradients, compute_plain_gradients
from tests.helpers.steps_around_events import (
    build_case_config,
    convert_to_arrays,
    find_farthest,
    train_around_event,
)
from tests.llmsys.engine.test_gradient_reduction import SCHEDULES, UNTIED

pytestmark = pytest.mark.distributed


def train_interleaved(rank: int, expected: Trajectory) -> tuple[float, str]:
    layout = {"pipeline": 2, "replicate": 2, "pipeline_schedule": SCHEDULES["interleaved"]}
    config = build_case_config(UNTIED, OPTIMIZER, layout)
    return find_farthest(train_around_event(config, UNTIED, "nothing"), expected)


def test_every_stage_of_a_rank_is_summed_over_replicas() -> None:
    expected = convert_to_arrays(compute_reference_trajectory(UNTIED))
    for distance, name in run_ranks(train_interleaved, 4, expected):
        assert distance <= 1, name


def test_sinks_are_in_the_norm_that_clips() -> None:
    name = "sinks, softcap, alibi"
    plain = compute_plain_gradients(name)
    [found, _] = run_ranks(all_gradients, 2, [(name, ParallelLayout(tensor=2))])
    gradients = {
        key: value
        for key, value in plain.items()
        if key in found[0] and key not in ("loss", "norm")
    }
    squares = {key: float(value.double().square().sum()) for key, value in gradients.items()}
    sinks = sum(square for key, square in squares.items() if "sinks" in key)
    whole = np.sqrt(sum(squares.values()))
    # Far more than rounding: without them the norm would be seen to be another.
    assert 1 - np.sqrt(1 - sinks / whole**2) > 1e-4
    torch.testing.assert_close(float(found[0]["norm"]), float(whole), rtol=1e-5, atol=0)
