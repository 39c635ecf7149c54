"""fp16 in a pipeline: what overflows or is not finite in one stage skips the step on all ranks
alike.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from llmsys.config.train import TrainConfig
from llmsys.doctor.parity_models import DEEP, SEQUENCES, ParityModel
from llmsys.doctor.parity_reference import RATE, SEED, compute_reference_trajectory
from llmsys.doctor.parity_rows import build_micro_batches
from llmsys.engine.engine import Engine, StepResult
from llmsys.engine.grad_scaler import LOSS_SCALE
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.parallel.process_group import get_world_size
from llmsys.train.build_engine import build_engine
from llmsys.train.expert_load import update_expert_balance
from llmsys.train.step_guard import StepGuard
from tests.helpers.ranks import run_ranks
from tests.llmsys.engine.test_pipeline import build_config, gather_state

SCHEDULES = ("1f1b", "interleaved")
START_SCALE, TOO_MUCH = 2.0**12, 2.0**40
# Dense: what a router chooses in 16 bits may be another expert than in 32.
MODEL = ParityModel("dense layers", DEEP.model.model_copy(update={"moe": None}))
OPTIMIZER = {
    "kind": "adamw", "learning_rate": RATE, "max_grad_norm": 0.5, "weight_decay": 0.1,
    "embedding_lr_multiplier": 2.0,
    "eps": 1e-6,
}  # fmt: skip
CPU = torch.device("cpu")


def build_pipeline(schedule: str) -> Engine:
    layout: dict[str, Any] = {"pipeline": 2, "pipeline_schedule": {"kind": schedule}}
    config = build_config(
        MODEL, layout, run={"seed": SEED}, train={"precision": "fp16"}, optimizer=OPTIMIZER
    )
    engine = build_engine(
        config, build_device_meshes(config.resolve_layout(get_world_size()), CPU), CPU
    )
    set_scale(engine, START_SCALE)
    return engine


def set_scale(engine: Engine, scale: float) -> None:
    state = engine.get_state()
    state.tensors[LOSS_SCALE].copy_(torch.tensor([scale, 5.0]))
    engine.load_state(state)


@contextmanager
def spoil_stage(
    module: nn.Module | None, spoil: Callable[[nn.Module, Any, Tensor], Tensor]
) -> Iterator[None]:
    """Change the output of a module of one stage; None where a rank does not have it."""
    hook = None if module is None else module.register_forward_hook(spoil)
    yield
    if hook is not None:
        hook.remove()


def overflow_backward(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    """Leave the output and make the gradient that comes back to it infinite."""
    output.register_hook(lambda gradient: gradient * math.inf)
    return output


def fill_with_nan(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return output * math.nan


def take_step(engine: Engine, step: int) -> StepResult:
    """A step as the trainer takes it: judged by a guard, and the balance of experts after it."""
    guard = StepGuard(TrainConfig())
    batches = build_micro_batches(MODEL, step, rank=0, ranks=1, micro=1, is_bitwise=False)
    assert len(batches) == SEQUENCES
    result = engine.train_step(batches, RATE, guard.accept_step)
    update_expert_balance(engine.module, result.is_applied)
    return result


def run_schedules(rank: int, schedules: tuple[str, ...]) -> dict[str, Any]:
    """For each schedule two good steps with three bad ones between them, and the two good steps
    alone.
    """
    found: dict[str, Any] = {}
    for schedule in schedules:
        engine, calm = build_pipeline(schedule), build_pipeline(schedule)
        steps = {"first": take_step(engine, 0)}
        before = gather_state(engine)

        set_scale(engine, TOO_MUCH)
        steps["overflow"] = take_step(engine, 1)
        scales = [engine.get_state().tensors[LOSS_SCALE].tolist()]
        set_scale(engine, START_SCALE)
        # The first stage alone: gradients of later ones are finite.
        with spoil_stage(engine.module.blocks[0] if rank == 0 else None, overflow_backward):
            steps["first stage"] = take_step(engine, 1)
        scales.append(engine.get_state().tensors[LOSS_SCALE].tolist())
        set_scale(engine, START_SCALE)
        # The loss is known to the last stage alone, and no smaller scale would help.
        with spoil_stage(engine.module.norm if rank == 1 else None, fill_with_nan):
            steps["last stage"] = take_step(engine, 1)
        scales.append(engine.get_state().tensors[LOSS_SCALE].tolist())

        after = gather_state(engine)
        changed = [
            name
            for name, value in after.items()
            if name != LOSS_SCALE and not np.array_equal(value, before[name])
        ]
        steps["second"] = take_step(engine, 1)
        expected = [take_step(calm, step) for step in range(2)]
        ends = gather_state(engine), gather_state(calm)
        differing = [
            name
            for name, value in ends[1].items()
            if name != LOSS_SCALE and not np.array_equal(ends[0][name], value)
        ]
        found[schedule] = {
            "steps": steps,
            "scales": scales,
            "changed": changed,
            "expected": expected,
        }
        found[schedule] |= {
            "differing": differing,
            "updates": engine.get_state().steps,
            "state": ends[0],
        }
    return found


@pytest.mark.distributed
def test_a_stage_that_overflows_skips_the_step_on_all_ranks_and_leaves_no_trace() -> None:
    by_rank = run_ranks(run_schedules, 2, SCHEDULES)
    reference = compute_reference_trajectory(MODEL, steps=2)
    for schedule in SCHEDULES:
        for found in (rank[schedule] for rank in by_rank):
            steps = found["steps"]
            # Infinite and NaN alike on the rank that saw it and on the other.
            for name in ("overflow", "first stage"):
                assert not steps[name].is_applied, (schedule, name)
                assert math.isfinite(steps[name].loss), (schedule, name)
                assert not math.isfinite(steps[name].gradient_norm), (schedule, name)
            assert not steps["last stage"].is_applied, schedule
            assert math.isnan(steps["last stage"].loss), schedule
            assert found["scales"] == [[TOO_MUCH / 2, 0], [START_SCALE / 2, 0], [START_SCALE, 5]], (
                schedule
            )
            assert found["changed"] == [], schedule
            assert found["differing"] == [], schedule
            assert found["updates"] == 2, schedule
            good = [steps["first"], steps["second"]]
            assert all(step.is_applied for step in good), schedule
            assert good == found["expected"], schedule
            assert [step.loss for step in good] == pytest.approx(reference.losses, rel=2e-3), (
                schedule
            )
            assert [step.gradient_norm for step in good] == pytest.approx(
                reference.norms, rel=2e-2
            ), schedule
        first, second = (rank[schedule]["state"] for rank in by_rank)
        assert all(np.array_equal(value, second[name]) for name, value in first.items()), schedule
        for name, value in reference.moments.items():
            moment = {"1": "first_moment", "2": "second_moment"}[name[0]] + name[1:]
            error = float((torch.from_numpy(first[moment]) - value).norm() / value.norm())
            assert error < 0.05, (schedule, name, error)
