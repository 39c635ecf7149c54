"""A step that is not accepted changes nothing, on any engine: the trajectory goes on as if it
had not been.
"""

from typing import Any

import pytest
import torch

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.train.expert_load import update_expert_balance
from tests.helpers.parity_runs import (
    LEARNING_RATE,
    build_engine,
    gather_full_state,
    select_rank_batches,
)
from tests.helpers.ranks import run_ranks

CASES = {
    "torch": ("torch", ParallelLayout(), 1),
    "torch expert=2": ("torch", ParallelLayout(expert=2), 2),
    "accelerate": ("accelerate", ParallelLayout(), 2),
    "zero0 expert=2": ("zero0", ParallelLayout(expert=2), 2),
    "zero1 two micro-batches": ("zero1", ParallelLayout(), 2),
    "zero1 bf16 expert=2": ("zero1 bf16", ParallelLayout(expert=2), 2),
    "zero2 expert=2": ("zero2", ParallelLayout(expert=2), 2),
    "zero2 offload": ("zero2 offload", ParallelLayout(), 2),
    "zero1 bf16 offload": ("zero1 bf16 offload", ParallelLayout(), 2),
    "zero2 bf16 offload": ("zero2 bf16 offload", ParallelLayout(), 2),
    "zero3": ("zero3", ParallelLayout(), 2),
    "zero3 offload": ("zero3 offload", ParallelLayout(), 2),
}


def refuse_second(rank: int, cases: list[Any]) -> list[Any]:
    """Step 0, step 1 refused, step 2; beside it step 0 and step 2 alone."""
    results = []
    for kind, layout, micro_batches in cases:
        asked: list[tuple[float, float]] = []

        def refuse(loss: float, norm: float, asked: list[tuple[float, float]] = asked) -> bool:
            asked.append((loss, norm))
            return False

        ends = []
        for with_refused in (True, False):
            engine = build_engine(kind, layout, 0.5, micro_batches)
            for step in (0, 1, 2):
                batches = select_rank_batches(
                    step, rank, torch.distributed.get_world_size(), micro_batches
                )
                if step == 1 and with_refused:
                    refused = engine.train_step(
                        batches, LEARNING_RATE, refuse, extras=(rank + 1.0, 5.0)
                    )
                    update_expert_balance(engine.module, refused.is_applied)
                elif step != 1:
                    update_expert_balance(
                        engine.module, engine.train_step(batches, LEARNING_RATE).is_applied
                    )
            ends.append((gather_full_state(engine), engine.get_state().steps))
        results.append((refused, asked, *ends))
    return results


@pytest.mark.distributed
def test_a_refused_step_leaves_weights_moments_and_count_as_they_were() -> None:
    by_rank = run_ranks(refuse_second, 2, list(CASES.values()))
    for name, mine, theirs in zip(CASES, *by_rank, strict=True):
        refused, asked, (state, steps), (expected, expected_steps) = mine
        assert not refused.is_applied, name
        assert refused.extras == (3.0, 10.0), name
        assert asked == [(refused.loss, refused.gradient_norm)] == theirs[1], name
        assert steps == expected_steps == 2, name
        for key, value in expected.items():
            assert (state[key] == value).all(), f"{name}: {key}"
