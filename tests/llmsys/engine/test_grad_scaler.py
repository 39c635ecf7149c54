"""fp16: small gradients survive, a step that overflows changes nothing, and a resumed run scales
as the first did.
"""

import math
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.engine import grad_scaler
from llmsys.engine.engine import Engine
from llmsys.engine.grad_scaler import LOSS_SCALE, GradScaler
from llmsys.train import checkpoint_load
from llmsys.train.expert_load import update_expert_balance
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.parity_runs import (
    LEARNING_RATE,
    build_engine,
    gather_full_state,
    run_reference,
    select_rank_batches,
)
from tests.helpers.ranks import run_ranks


def test_the_scale_halves_on_overflow_and_doubles_after_enough_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grad_scaler, "GROWTH_STEPS", 3)
    scale = GradScaler()
    start = scale.scale
    assert not scale.update_scale(2.0, math.inf)
    assert not scale.update_scale(2.0, math.nan)
    assert scale.scale == start / 4
    assert [scale.update_scale(2.0, 1.0) for _ in range(3)] == [True] * 3
    assert scale.scale == start / 2
    scale.update_scale(2.0, 1.0)
    assert not scale.update_scale(2.0, math.inf)
    assert scale.state_dict()[LOSS_SCALE].tolist() == [start / 4, 0.0]


def test_the_scale_grows_to_its_limit_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_scaler, "GROWTH_STEPS", 1)
    scale = GradScaler()
    for _ in range(100):
        scale.update_scale(2.0, 1.0)
    assert scale.scale == grad_scaler.MAX_SCALE


def test_what_no_scale_can_mend_is_left_to_others() -> None:
    scale = GradScaler()
    assert scale.update_scale(math.nan, math.nan)
    assert scale.scale == grad_scaler.INITIAL_SCALE
    scale.tensor[0] = grad_scaler.MIN_SCALE
    assert scale.update_scale(2.0, math.inf)
    assert scale.scale == grad_scaler.MIN_SCALE


def train(engine: Engine, rank: int, steps: range) -> list[Any]:
    results = []
    for step in steps:
        batches = select_rank_batches(step, rank, torch.distributed.get_world_size(), 2)
        results.append(engine.train_step(batches, LEARNING_RATE))
        update_expert_balance(engine.module, results[-1].is_applied)
    return results


def copied_state(engine: Engine) -> dict[str, Any]:
    return {name: value.copy() for name, value in gather_full_state(engine).items()}


def scaled(rank: int, cases: list[tuple[str, ParallelLayout]], folder: Path) -> list[Any]:
    return [
        _scaled(rank, kind, layout, folder / str(number))
        for number, (kind, layout) in enumerate(cases)
    ]


def _scaled(rank: int, kind: str, layout: ParallelLayout, folder: Path) -> Any:
    """A step from a scale that overflows at first, a checkpoint, two more steps; and again from
    the checkpoint.
    """
    engine = build_engine(kind, layout, 0.5, 2)
    engine.get_state().tensors[LOSS_SCALE][0] = 2.0**24
    before = copied_state(engine)
    results = train(engine, rank, range(1))
    unchanged = all(
        (value == before[key]).all()
        for key, value in copied_state(engine).items()
        if key != LOSS_SCALE
    )
    while not results[-1].is_applied:  # the same step until it fits
        results += train(engine, rank, range(1))
    engine.get_state().tensors[LOSS_SCALE][0] /= 16  # later steps may have larger gradients
    saved = save_checkpoint(engine, folder, {}, 1)
    results += train(engine, rank, range(1, 3))
    other = build_engine(kind, layout, 0.5, 2)
    checkpoint_load.load_checkpoint(other, saved)
    at_resume = other.get_state().tensors[LOSS_SCALE].tolist()
    train(other, rank, range(1, 3))
    wide = build_engine(kind.removesuffix(" fp16"), layout, 0.5, 2)  # has no scale, and needs none
    checkpoint_load.load_checkpoint(wide, saved)
    kept = other.get_state().tensors[LOSS_SCALE].tolist()
    ends = copied_state(engine), copied_state(other)
    checkpoint_load.load_checkpoint(other, save_checkpoint(wide, folder / "wide", {}, 1))
    assert other.get_state().tensors[LOSS_SCALE].tolist() == kept, (
        "a checkpoint without a scale leaves the scale alone"
    )
    return unchanged, results, ends, engine.get_state().steps, at_resume


CASES = [
    ("torch fp16", ParallelLayout(expert=2)),
    ("torch ddp fp16", ParallelLayout(replicate=2)),
    ("torch offload fp16", ParallelLayout()),
]


@pytest.mark.distributed
def test_fp16_follows_the_plain_run_and_its_own_checkpoint(tmp_path: Path) -> None:
    losses, norms, expected = run_reference(0.5)
    by_rank = run_ranks(scaled, 2, CASES, tmp_path)
    for unchanged, results, (state, resumed), steps, at_resume in chain(*by_rank):
        good = [result for result in results if result.is_applied]
        assert unchanged
        assert not math.isfinite(results[0].gradient_norm)
        assert steps == len(good) == 3
        assert at_resume == [2.0 ** (24 - len(results) + 3) / 16, 1.0]
        assert state[LOSS_SCALE].tolist() == [at_resume[0], 3.0]
        for key, value in state.items():
            assert (resumed[key] == value).all(), key
        assert [result.loss for result in good] == pytest.approx(losses, rel=2e-3)
        assert [result.gradient_norm for result in good] == pytest.approx(norms, rel=2e-2)
        for key in (
            "first_moment/embed.weight",
            "first_moment/blocks.0.feed_forward.experts.down_proj",
        ):
            error = float(
                (torch.from_numpy(state[key]) - expected[key]).norm() / expected[key].norm()
            )
            assert error < 0.1, key
