"""Bugs that have shipped elsewhere, planted one by one: each must be caught by the parity that
users run.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from llmsys.doctor.parity_check import TrajectoryDistance, compare_to_reference
from llmsys.doctor.parity_matrix import ParityCase
from llmsys.doctor.parity_models import DENSE, EXPERTS
from llmsys.doctor.parity_reference import Trajectory, compute_reference_trajectory
from llmsys.engine import deepspeed_engine, torch_engine
from llmsys.engine.engine import reduce_token_counts
from llmsys.optim import build_optimizer
from llmsys.parallel import gradient_clipping, parallelize, tensor_parallel
from llmsys.parallel.dtensor_slices import get_local_region
from tests.helpers.ranks import run_ranks

SHARDED = ParityCase(2, "fsdp", (), "fp32", "none", DENSE, 2)
DEALT = ParityCase(2, "fsdp", (("expert", 2),), "fp32", "none", EXPERTS, 2)
SPLIT = ParityCase(2, "fsdp", (("tensor", 2),), "fp32", "none", DENSE, 2)
ZERO = ParityCase(2, "zero-2", (("expert", 2),), "fp32", "none", EXPERTS, 2)


@contextmanager
def scale_by_expert_degree() -> Iterator[None]:
    """Gradients of dealt experts summed over the ranks that deal them, as if those had copies."""

    def clip_scaled(parameters: Iterable[Tensor], *rest: Any, **more: Any) -> Tensor:
        listed = list(parameters)
        for parameter in listed:
            if parameter.ndim == 3 and parameter.grad is not None:
                parameter.grad *= 2
        return gradient_clipping.clip_gradients(listed, *rest, **more)

    with patch.object(torch_engine, "clip_gradients", clip_scaled):
        yield


def drop_norm_reduction() -> Any:
    return patch.object(gradient_clipping, "all_reduce_sum", lambda value: value)


def drop_partial_gradient_reduction() -> Any:
    return patch.object(tensor_parallel.PartialGradientReducer, "all_reduce", lambda self: None)


def keep_stale_bias() -> Any:
    from llmsys.train import expert_load

    return patch.object(expert_load, "update_balance_bias", lambda bias, *rest: bias)


def swap_shards() -> Any:
    """Each rank keeps the slice of its neighbour."""

    def get_other_region(tensor: Tensor) -> list[tuple[int, int]]:
        (begin, size), *others = get_local_region(tensor)
        return [(len(tensor) - begin - size, size), *others]

    return patch.object(parallelize, "get_local_region", get_other_region)


@contextmanager
def double_adam_step() -> Iterator[None]:
    """The counter of steps advances twice, as where two groups share one tensor for it."""
    step = build_optimizer.OptimizersContainer.step

    def step_twice(self: build_optimizer.OptimizersContainer) -> None:
        step(self)
        for state in self.state.values():
            state["step"] += 1

    with patch.object(build_optimizer.OptimizersContainer, "step", step_twice):
        yield


def divide_twice_by_ranks() -> Any:
    """DeepSpeed's averaging is not undone."""
    return patch.object(deepspeed_engine, "get_world_size", lambda: 1)


def count_own_targets() -> Any:
    """The loss divided by the targets of the rank instead of those of the step."""

    def reduce_own_counts(batches: Any, device: torch.device) -> Tensor:
        return counts_of(batches, device) / 2

    counts_of = reduce_token_counts
    return patch.object(torch_engine, "reduce_token_counts", reduce_own_counts)


BUGS: dict[str, tuple[Callable[[], Any], ParityCase]] = {
    "a gradient scaled by the expert degree": (scale_by_expert_degree, DEALT),
    "a dropped reduction of the norm": (drop_norm_reduction, SHARDED),
    "a dropped reduction over the tensor axis": (drop_partial_gradient_reduction, SPLIT),
    "a stale bias": (keep_stale_bias, DEALT),
    "swapped shards": (swap_shards, SHARDED),
    "a doubled Adam step": (double_adam_step, SHARDED),
    "averaging that is not undone": (divide_twice_by_ranks, ZERO),
    "a count of targets that is not the step's": (count_own_targets, SHARDED),
}


def train_with_bugs(rank: int, expected: dict[str, Trajectory]) -> dict[str, TrajectoryDistance]:
    found = {"healthy": compare_to_reference(DEALT, expected[EXPERTS.name])}
    for name, (bug, cell) in BUGS.items():
        with bug():
            found[name] = compare_to_reference(cell, expected[cell.parity_model.name])
    found["healthy again"] = compare_to_reference(SHARDED, expected[DENSE.name])
    return found


@pytest.mark.distributed
def test_every_planted_bug_is_caught_and_nothing_else() -> None:
    expected = {subject.name: compute_reference_trajectory(subject) for subject in (DENSE, EXPERTS)}
    found = run_ranks(train_with_bugs, 2, expected)[0]
    missed = [name for name in BUGS if found[name].passed]
    assert not missed, f"not caught: {missed}"
    assert found["healthy"].passed, found["healthy"]
    assert found["healthy again"].passed, found["healthy again"]
