"""A run changes its engine, its layout and its number of processes at every checkpoint, and
follows the oracle.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from llmsys.config.parallel_layout import ParallelLayout
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

STEPS, SHORT = 20, 6
Leg = tuple[str, ParallelLayout, str, int, int]
"""(engine, layout, name of the run's folder, first step, step to stop before)."""
# What one set of processes does, in turn: (number of processes, legs).
PLAN: list[tuple[int, list[Leg]]] = [
    (2, [
        ("zero3", ParallelLayout(), "long", 0, 6),
        ("zero0", ParallelLayout(expert=2), "short", 0, 2),
        ("zero3 offload", ParallelLayout(), "short", 2, 4),
        ("accelerate", ParallelLayout(), "short", 4, 5),
        ("torch", ParallelLayout(expert=2), "short", 5, SHORT),
    ]),
    (4, [("torch", ParallelLayout(expert=2), "long", 6, 13)]),
    (1, [
        ("torch", ParallelLayout(), "long", 13, 16),
        ("zero3", ParallelLayout(), "long", 16, 18),
        ("accelerate", ParallelLayout(), "long", 18, STEPS),
    ]),
]  # fmt: skip


def legs_of(rank: int, legs: list[Leg], folder: Path) -> list[Any]:
    results = []
    for kind, layout, run, first, stop in legs:
        engine = build_engine(kind, layout, 0.5, 1)
        newest = checkpoint_load.find_newest_checkpoint(folder / run)
        assert (newest is None) == (first == 0)
        if newest is not None:
            checkpoint_load.load_checkpoint(engine, newest)
        losses = []
        for step in range(first, stop):
            batches = select_rank_batches(step, rank, torch.distributed.get_world_size(), 1)
            losses.append(engine.train_step(batches, LEARNING_RATE).loss)
            update_expert_balance(engine.module)
        save_checkpoint(engine, folder / run, {}, keep_last=1)
        results.append((run, losses, gather_full_state(engine), engine.get_state().steps))
    return results


@pytest.mark.distributed
def test_a_run_that_changes_its_engine_follows_the_uninterrupted_one(tmp_path: Path) -> None:
    losses: dict[str, list[float]] = {"long": [], "short": []}
    ends: dict[str, Any] = {}
    for world_size, legs in PLAN:
        for run, found, state, steps in run_ranks(legs_of, world_size, legs, tmp_path)[0]:
            losses[run] += found
            ends[run] = state, steps
    for run, count in (("long", STEPS), ("short", SHORT)):
        expected_losses, _, expected = run_reference(0.5, count)
        torch.testing.assert_close(losses[run], expected_losses, rtol=2e-5, atol=1e-6)
        state, steps = ends[run]
        assert steps == count
        for key, value in expected.items():
            allowed = (
                0.05 * LEARNING_RATE
                if key.startswith("parameter/")
                else 1e-3 * float(value.abs().max())
            )
            assert float((torch.from_numpy(state[key]) - value).abs().max()) <= allowed, (run, key)
