"""In bf16 and fp16 every engine keeps fp32 masters that start with the same bits, and all learn
alike from the same rows; in fp16 all leave out the same steps and lower the same scale.
"""

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.doctor.rounding import UNIT_ROUNDOFFS, measure_rounding_errors
from llmsys.model.initialization import compute_initial_value
from tests.helpers.parity_runs import (
    DTYPES,
    LEARNING_RATE,
    build_engine,
    gather_full_state,
    run_reference,
    select_rank_batches,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_training import build_tiny_config

CLIP = 0.5
SEED = 7  # no gradient of a norm is near zero, where 16 bits decide its sign

# DeepSpeed's first stage has another optimizer in bf16, and another one again with offload.
KINDS = {
    1: ["torch bf16", "accelerate bf16", "zero0 bf16", "zero1 bf16", "zero1 bf16 offload",
        "zero2 bf16", "zero3 bf16",
        "zero3 bf16 offload", "torch fp16", "accelerate fp16", "zero1 fp16", "zero3 fp16"],
    2: ["torch bf16", "zero1 bf16", "zero2 bf16 offload", "torch fp16", "zero2 fp16"],
}  # fmt: skip
CASES = [(kind, expert) for expert, kinds in KINDS.items() for kind in kinds]
TOO_MUCH = 2.0**40


def state_now(engine: Any) -> dict[str, Any]:
    """A copy: an engine may give its living tensors."""
    return {name: value.copy() for name, value in gather_full_state(engine).items()}


def three_steps(rank: int, cases: list[tuple[str, int]]) -> list[Any]:
    """Three steps, and in fp16 a fourth whose gradients overflow."""
    from deepspeed.accelerator import get_accelerator

    # for CPUs it says no, though all that it calls can
    get_accelerator().is_fp16_supported = lambda: True
    results = []
    for kind, expert in cases:
        engine: Any = build_engine(kind, ParallelLayout(expert=expert), CLIP, 2, seed=SEED)
        start = state_now(engine)
        steps, first = [], start
        for step in range(3):
            steps.append(engine.train_step(select_rank_batches(step, rank, 2, 2), LEARNING_RATE))
            first = state_now(engine) if step == 0 else first
        dtype = str(engine.compute_logits(select_rank_batches(0, rank, 2, 2)[0]).dtype)
        state, overflowed = state_now(engine), None
        if "fp16" in kind:
            changed = engine.get_state()
            changed.tensors["loss_scale"] = torch.tensor([TOO_MUCH, 5.0])
            engine.load_state(changed)
            overflowed = (
                engine.train_step(select_rank_batches(3, rank, 2, 2), LEARNING_RATE),
                gather_full_state(engine),
            )
        numbers = [(s.loss, s.gradient_norm) for s in steps]
        results.append((start, first, numbers, state, dtype, overflowed))
    return results


@pytest.fixture(scope="module")
def finished() -> dict[tuple[str, int], Any]:
    return dict(zip(CASES, run_ranks(three_steps, 2, CASES)[0], strict=True))


@cache
def measure_half_precision(half: str) -> dict[str, float]:
    """Return how far rounding to `half` may move what three steps leave.

    A master whose last bit differs may be rounded to another 16-bit weight, AdamW makes a whole
    step of a gradient near 0 in either direction, and a token may go to another expert.
    """
    return measure_rounding_errors(
        lambda errors: run_reference(CLIP, 3, SEED, errors)[2], DTYPES[half]
    )


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "expert"), CASES)
def test_masters_stay_in_fp32_and_all_engines_learn_alike(
    kind: str, expert: int, finished: dict[tuple[str, int], Any]
) -> None:
    start, first, steps, state, dtype, _ = finished[kind, expert]
    half = kind.split()[1]
    _, expected_first, expected_steps, expected, _, _ = finished[f"torch {half}", expert]
    assert dtype == {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[half]
    for key, value in start.items():
        name = key.removeprefix("parameter/")
        if key.startswith("parameter/"):
            initial = compute_initial_value(build_tiny_config(), name, value.shape, SEED)
            assert (value == initial.numpy()).all(), name
            assert value.dtype == "float32"
            rounded = torch.from_numpy(state[key]).bfloat16().float().numpy()
            assert (state[key] != rounded).any(), f"{name} has been rounded"
    assert state.keys() == expected.keys()

    # The first step of all has the same weights and the same 16-bit gradients, up to one rounding
    # each; only their sums in float32 have another order. A square has twice the relative error.
    unit = UNIT_ROUNDOFFS[DTYPES[half]]
    np.testing.assert_allclose(steps, expected_steps, rtol=unit)
    for key, value in expected_first.items():
        distance = np.linalg.norm(first[key] - value)
        if key.startswith("parameter/"):
            assert distance <= 0.1 * LEARNING_RATE * math.sqrt(value.size), key
        else:
            assert distance <= 2 * unit * np.linalg.norm(value), key
    for key, allowed in measure_half_precision(half).items():
        # Both may be off by as much.
        assert np.linalg.norm(state[key] - expected[key]) <= 2 * allowed, key


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "expert"), [case for case in CASES if "fp16" in case[0]])
def test_a_step_that_overflows_fp16_is_left_out_and_the_scale_halved(
    kind: str, expert: int, finished: dict[tuple[str, int], Any]
) -> None:
    _, _, _, before, _, (result, after) = finished[kind, expert]
    assert not result.is_applied
    assert math.isfinite(result.loss)
    assert not math.isfinite(result.gradient_norm)
    assert after.pop("loss_scale").tolist() == [TOO_MUCH / 2, 0]
    for key, value in after.items():
        assert (value == before[key]).all(), key
