"""Attention and feed-forward of the user's own code take the same steps under every engine as the
built-in ones, and resume from a checkpoint with the same bits.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.train import checkpoint_load
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.own_blocks import GATED, SOFTMAX
from tests.helpers.parity_runs import (
    LEARNING_RATE,
    STEPS,
    build_engine,
    gather_full_state,
    select_rank_batches,
)
from tests.helpers.ranks import run_ranks

OWN: dict[str, Any] = {"attention": SOFTMAX, "feed_forward": GATED, "moe": None}
BUILT_IN: dict[str, Any] = {"moe": None}
ENGINES = {
    "torch": ParallelLayout(shard=2),
    "torch bf16": ParallelLayout(shard=2),
    "torch selective": ParallelLayout(shard=2),
    "torch ddp": ParallelLayout(replicate=2),
    "accelerate": ParallelLayout(shard=2),
    "zero1": ParallelLayout(shard=2),
    "zero2": ParallelLayout(shard=2),
    "zero3": ParallelLayout(shard=2),
}
Run = tuple[list[float], list[float], dict[str, Any]]


def run_engine(rank: int, kind: str, layout: ParallelLayout, changes: dict[str, Any]) -> Run:
    """Return losses and gradient norms of some steps, and the state behind them."""
    world = torch.distributed.get_world_size()
    engine = build_engine(kind, layout, 1.0, 2, **changes)
    losses, norms = [], []
    for step in range(STEPS):
        result = engine.train_step(select_rank_batches(step, rank, world, 2), LEARNING_RATE)
        losses.append(result.loss)
        norms.append(result.gradient_norm)
    return losses, norms, gather_full_state(engine)


def run_pairs(rank: int, kinds: dict[str, ParallelLayout]) -> dict[str, tuple[Run, Run]]:
    return {
        kind: (run_engine(rank, kind, layout, OWN), run_engine(rank, kind, layout, BUILT_IN))
        for kind, layout in kinds.items()
    }


def assert_equal_runs(kind: str, found: Run, wanted: Run) -> None:
    # In bf16 attention of the CPU's kernel rounds elsewhere than plain matmuls.
    near = 2e-2 if "bf16" in kind else 1e-6
    assert found[0] == pytest.approx(wanted[0], rel=near), kind
    assert found[1] == pytest.approx(wanted[1], rel=5e-2 if "bf16" in kind else 1e-5), kind
    assert found[2].keys() == wanted[2].keys(), kind
    if "bf16" in kind:
        return
    for name, value in wanted[2].items():
        # Gradients, by way of the first moment, and the weights that they moved.
        apart = abs(found[2][name] - value).max()
        if name.startswith("first_moment/"):
            assert apart <= 1e-6, f"{kind}: {name}"


@pytest.mark.distributed
def test_two_ranks_take_the_steps_of_the_built_in_kinds_under_every_engine() -> None:
    for kind, (found, wanted) in run_ranks(run_pairs, 2, ENGINES)[0].items():
        assert_equal_runs(kind, found, wanted)


@pytest.mark.distributed
def test_one_rank_takes_the_steps_of_the_built_in_kinds() -> None:
    kinds = {"torch plain": ParallelLayout(shard=1), "torch": ParallelLayout(shard=1)}
    for kind, (found, wanted) in run_ranks(run_pairs, 1, kinds)[0].items():
        assert_equal_runs(kind, found, wanted)


def resume(rank: int, folder: Path) -> dict[str, list[str]]:
    """Return the tensors that differ between a run and one that a checkpoint interrupted."""
    found = {}
    world = torch.distributed.get_world_size()
    for kind in ("torch", "zero1"):
        layout = ENGINES[kind]
        engine = build_engine(kind, layout, 1.0, 2, **OWN)
        for step in range(2):
            engine.train_step(select_rank_batches(step, rank, world, 2), LEARNING_RATE)
        save_checkpoint(engine, folder / kind, {}, keep_last=1)
        resumed = build_engine(kind, layout, 1.0, 2, seed=9, **OWN)
        newest = checkpoint_load.find_newest_checkpoint(folder / kind)
        assert newest is not None
        checkpoint_load.load_checkpoint(resumed, newest)
        for one in (engine, resumed):
            one.train_step(select_rank_batches(2, rank, world, 2), LEARNING_RATE)
        state, again = engine.get_state().tensors, resumed.get_state().tensors
        assert state.keys() == again.keys()
        found[kind] = [name for name in state if not torch.equal(state[name], again[name])]
    return found


@pytest.mark.distributed
def test_a_checkpoint_resumes_with_the_same_bits(tmp_path: Path) -> None:
    assert run_ranks(resume, 2, tmp_path)[0] == {"torch": [], "zero1": []}
