"""Every engine and layout against one process, eager, fp32: loss, gradient norm, and each
parameter's moments.

After one step without clipping Adam's first moment is 0.1 times the gradient, so moments compare
gradients parameter by parameter; weights alone would hide a gradient that is twice too large.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.train.expert_load import update_expert_balance
from tests.helpers.parity_runs import (
    LEARNING_RATE,
    STEPS,
    build_engine,
    gather_full_state,
    run_reference,
    select_rank_batches,
)
from tests.helpers.ranks import run_ranks


def engine_run(rank: int, cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """All cases of one world size in one set of processes: starting processes costs more than
    the steps.
    """
    world_size = torch.distributed.get_world_size()
    results = []
    for kind, layout, clip, micro_batches, changes in cases:
        engine = build_engine(kind, layout, clip, micro_batches, **changes)
        steps = []
        for step in range(STEPS):
            steps.append(
                engine.train_step(
                    select_rank_batches(step, rank, world_size, micro_batches), LEARNING_RATE
                )
            )
            update_expert_balance(engine.module)
        state = gather_full_state(engine)
        results.append(
            ([s.loss for s in steps], [s.gradient_norm for s in steps], state)
            if rank == 0
            else None
        )
    return results


# The auxiliary loss is not a sum over tokens, so its value depends on how they are dealt; balancing
# by bias does not.
MOE: dict[str, Any] = {}
DENSE_TIED: dict[str, Any] = {"moe": None, "tie_word_embeddings": True}
# Of one engine those that differ in what moves its gradients; its pairs with micro-batches,
# clipping and tied embeddings are in the covering array (llmsys/doctor/pairs), after every step.
CASES = {
    1: {
        "plain": ("torch plain", ParallelLayout(), 0.5, 2, MOE),
        "bitwise plain": ("bitwise plain", ParallelLayout(), 0.5, 2, MOE),
    },
    2: {
        "fsdp": ("torch", ParallelLayout(), 0.0, 1, MOE),
        "fsdp expert=2": ("torch", ParallelLayout(expert=2), 0.5, 2, MOE),
        "fsdp dense tied": ("torch", ParallelLayout(), 0.5, 1, DENSE_TIED),
        "fsdp expert=2, offload, recomputed": (
            "torch offload full",
            ParallelLayout(expert=2),
            0.5,
            2,
            MOE,
        ),
        "fsdp expert=2, whole gradients": ("torch whole", ParallelLayout(expert=2), 0.5, 2, MOE),
        "bitwise expert=2, selective": ("bitwise selective", ParallelLayout(expert=2), 0.5, 2, MOE),
        "bitwise plain": ("bitwise plain", ParallelLayout(), 0.5, 2, MOE),
        "hsdp": ("torch", ParallelLayout(replicate=2), 0.5, 2, MOE),
        "ddp": ("torch ddp", ParallelLayout(replicate=2), 0.5, 2, MOE),
        "ddp dense tied, recomputed": (
            "torch ddp full",
            ParallelLayout(replicate=2),
            0.5,
            1,
            DENSE_TIED,
        ),
        "plain": ("torch plain", ParallelLayout(), 0.5, 2, MOE),
        "plain dense tied, recomputed": (
            "torch plain full",
            ParallelLayout(),
            0.0,
            1,
            DENSE_TIED,
        ),
        "accelerate": ("accelerate", ParallelLayout(), 0.5, 2, MOE),
        "zero0": ("zero0", ParallelLayout(), 0.0, 2, MOE),
        "zero1": ("zero1", ParallelLayout(), 0.0, 1, MOE),
        "zero1 expert=2": ("zero1", ParallelLayout(expert=2), 0.5, 2, MOE),
        "zero1 offload": ("zero1 offload", ParallelLayout(), 0.5, 2, MOE),
        "zero2 expert=2, recomputed": ("zero2 full", ParallelLayout(expert=2), 0.5, 2, MOE),
        "zero2 dense tied": ("zero2", ParallelLayout(), 0.5, 1, DENSE_TIED),
        "zero2 offload expert=2": ("zero2 offload", ParallelLayout(expert=2), 0.0, 2, MOE),
        "zero3, selective": ("zero3 selective", ParallelLayout(), 0.5, 2, MOE),
        "zero3 dense tied": ("zero3", ParallelLayout(), 0.5, 1, DENSE_TIED),
        "zero3 offload, recomputed": ("zero3 offload full", ParallelLayout(), 0.5, 2, MOE),
    },
    4: {
        "hsdp 2x2": ("torch", ParallelLayout(replicate=2), 0.5, 2, MOE),
        "hsdp 2x2 expert=2, offload, selective": (
            "torch offload selective",
            ParallelLayout(replicate=2, expert=2),
            0.5,
            2,
            MOE,
        ),
        "bitwise 2x2 expert=2": ("bitwise", ParallelLayout(replicate=2, expert=2), 0.5, 1, MOE),
        "fsdp expert=4": ("torch", ParallelLayout(expert=4), 0.0, 1, MOE),
        "hsdp 2x2 expert=2, whole gradients": (
            "torch whole",
            ParallelLayout(replicate=2, expert=2),
            0.5,
            2,
            MOE,
        ),
        "plain of 4": ("torch plain", ParallelLayout(), 0.5, 2, MOE),
        "zero2 expert=2 of 4": ("zero2", ParallelLayout(expert=2), 0.5, 1, MOE),
        "zero0 expert=2 of 4": ("zero0", ParallelLayout(expert=2), 0.5, 1, MOE),
    },
}


@pytest.fixture(scope="module", params=sorted(CASES))
def finished(request: pytest.FixtureRequest) -> tuple[int, list[Any]]:
    """All runs of one world size."""
    world_size = request.param
    return world_size, run_ranks(engine_run, world_size, list(CASES[world_size].values()))[0]


def test_every_engine_and_layout_follows_the_plain_run(finished: tuple[int, list[Any]]) -> None:
    world_size, results = finished
    for (name, (_, _, clip, _, changes)), (losses, norms, state) in zip(
        CASES[world_size].items(), results, strict=True
    ):
        expected_losses, expected_norms, expected = run_reference(clip, **changes)
        torch.testing.assert_close(
            losses, expected_losses, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
        torch.testing.assert_close(
            norms, expected_norms, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
        for key, value in expected.items():
            # A moment is compared at its tensor's scale. A weight moves by LEARNING_RATE in a step
            # however small its gradient is, so near-zero gradients may differ in it by a share of
            # that.
            allowed = (
                0.02 * LEARNING_RATE
                if key.startswith("parameter/")
                else 1e-4 * float(value.abs().max())
            )
            difference = float((torch.from_numpy(state[key]) - value).abs().max())
            assert difference <= allowed, (
                f"{name}: {key} differs by {difference:.2e}, allowed {allowed:.2e}"
            )
