"""Drops, experts that choose, biases and every balance loss: two ranks, split experts and
micro-batches change nothing.

The same comparison as test_parity.py, with the auxiliary losses in the plain run, and with what is
reported of experts.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.model.initialization import initialize_parameters
from llmsys.model.transformer import Transformer
from llmsys.optim.parameter_groups import build_parameter_groups
from llmsys.train.expert_load import update_expert_balance
from tests.helpers.parity_runs import (
    LEARNING_RATE,
    OPTIMIZER,
    SEED,
    STEPS,
    build_engine,
    compute_mean_loss,
    gather_full_state,
    select_rank_batches,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_training import LENGTH, SEQUENCES, build_sequences, build_tiny_config

BASE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DROPS: dict[str, Any] = {
    "routing": {"kind": "capacity", "factor": 0.7},
    "balance": {"kind": "auxiliary_loss", "weight": 0.5},
    "z_loss_weight": 0.05,
    "router_bias": True,
    "expert": {"kind": "clamped_swiglu", "bias": True, "limit": 0.5},
    "shared_intermediate_size": 12,
    "shared_gate": True,
}
CHOOSERS: dict[str, Any] = {
    # With 1.5, an expert must choose between two places of one word that attention cannot tell
    # apart: rounding decides.
    "routing": {"kind": "expert_choice", "factor": 1.25},
    "balance": {"kind": "none"},
    "z_loss_weight": 0.05,
    "expert": {"kind": "relu", "bias": True},
}
GROUPS: dict[str, Any] = {
    "score": "sigmoid",
    "groups": {"num_groups": 2, "groups_per_token": 1, "score": "top2"},
    "balance": {"kind": "bias", "rate": 0.01, "sequence_weight": 0.5},
    "moe_intermediate_size": 10,
}
CASES: dict[str, tuple[str, ParallelLayout, int, dict[str, Any]]] = {
    "fsdp, drops": ("torch", ParallelLayout(), 2, DROPS),
    "fsdp expert=2, drops": ("torch", ParallelLayout(expert=2), 1, DROPS),
    "fsdp expert=2, drops, micro-batches": ("torch", ParallelLayout(expert=2), 4, DROPS),
    "fsdp expert=2, choosers": ("torch", ParallelLayout(expert=2), 2, CHOOSERS),
    "fsdp expert=2, groups": ("torch", ParallelLayout(expert=2), 2, GROUPS),
    "accelerate, drops, micro-batches": ("accelerate", ParallelLayout(), 4, DROPS),
    "zero0 expert=2, drops": ("zero0", ParallelLayout(expert=2), 2, DROPS),
    "zero3, drops": ("zero3", ParallelLayout(), 2, DROPS),
    "zero3, choosers": ("zero3", ParallelLayout(), 1, CHOOSERS),
    "zero1, choosers": ("zero1", ParallelLayout(), 2, CHOOSERS),
    "zero2 expert=2, drops": ("zero2", ParallelLayout(expert=2), 2, DROPS),
    "zero2 expert=2, choosers": ("zero2", ParallelLayout(expert=2), 1, CHOOSERS),
    "zero2 expert=2, groups": ("zero2", ParallelLayout(expert=2), 2, GROUPS),
}
State = dict[str, Any]


def plain_run(changes: dict[str, Any]) -> tuple[list[State], State]:
    """One process, all sequences in one batch, torch's own AdamW: reports of each step, and the
    state after all.
    """
    model = Transformer(build_tiny_config(moe=BASE | changes))
    initialize_parameters(model, seed=SEED)
    named = dict(model.named_parameters())
    groups = [
        {
            "params": [named[name] for name in group.names],
            "weight_decay": group.weight_decay,
            "lr": LEARNING_RATE * group.lr_multiplier,
        }
        for group in build_parameter_groups(named.items(), OPTIMIZER)
    ]
    optimizer = torch.optim.AdamW(groups, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    reports = []
    for step in range(STEPS):
        batch = build_sequences(step, 0, SEQUENCES, ignored=LENGTH)
        loss = compute_mean_loss(model, batch)
        optimizer.zero_grad()
        (loss + model.compute_auxiliary_loss()).backward()
        optimizer.step()
        reports.append({"loss": float(loss.detach()), **update_expert_balance(model).to_dict()})
    state: State = {
        f"buffer/{name}": buffer for name, buffer in model.state_dict().items() if name not in named
    }
    for name, parameter in named.items():
        state[f"first_moment/{name}"] = optimizer.state[parameter]["exp_avg"]
        state[f"second_moment/{name}"] = optimizer.state[parameter]["exp_avg_sq"]
    return reports, state


def engine_run(rank: int, cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """All cases in one set of processes."""
    results = []
    for kind, layout, micro_batches, changes in cases:
        engine = build_engine(kind, layout, 0.0, micro_batches, moe=BASE | changes)
        reports = []
        for step in range(STEPS):
            result = engine.train_step(
                select_rank_batches(step, rank, 2, micro_batches), LEARNING_RATE
            )
            reports.append({"loss": result.loss, **update_expert_balance(engine.module).to_dict()})
        results.append((reports, gather_full_state(engine)))
    return results


@pytest.fixture(scope="module")
def finished() -> dict[str, tuple[list[State], State]]:
    """What rank 0 has after each case."""
    return dict(zip(CASES, run_ranks(engine_run, 2, list(CASES.values()))[0], strict=True))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_follow_the_plain_run(
    name: str, finished: dict[str, tuple[list[State], State]]
) -> None:
    (reports, state), (expected_reports, expected) = finished[name], plain_run(CASES[name][3])
    for report, wanted in zip(reports, expected_reports, strict=True):
        for key, value in wanted.items():
            torch.testing.assert_close(
                torch.tensor(report[key]), torch.tensor(value), rtol=1e-4, atol=1e-6, msg=key
            )
    assert sum(expected_reports[0]["dropped"]) > 0 or CASES[name][3] is not DROPS
    for key, value in expected.items():
        difference = float((torch.from_numpy(state[key]) - value).abs().max())
        allowed = 1e-4 * float(value.abs().max()) + 1e-12
        assert difference <= allowed, f"{key} differs by {difference:.2e}, allowed {allowed:.2e}"
