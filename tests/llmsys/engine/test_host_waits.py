"""How often the host would wait for an accelerator in a steady step: once, and once more per
layer of split experts.
"""

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.data.batch import IGNORED, Batch
from llmsys.engine.micro_batch_loss import select_valid_positions
from llmsys.model.normalization import RMSNorm
from llmsys.train.expert_load import update_expert_balance
from tests.helpers.host_waits import count_host_waits
from tests.helpers.parity_runs import LEARNING_RATE, build_engine, select_rank_batches
from tests.helpers.ranks import run_ranks

STEP = {"engine.py:reduce_step_numbers": 1}
LAYERS, MICRO_BATCHES = 2, 2
EXCHANGES = STEP | {"expert_parallel.py:_exchange_counts": LAYERS * MICRO_BATCHES}
DENSE: dict[str, Any] = {"moe": None}
BATCH_LOSS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "num_shared_experts": 1,
    "balance": {"kind": "auxiliary_loss"},
}
CASES: dict[str, tuple[int, str, ParallelLayout, dict[str, Any], dict[str, int]]] = {
    "dense": (1, "torch", ParallelLayout(), DENSE, STEP),
    "dense, DDP": (1, "torch ddp", ParallelLayout(), DENSE, STEP),
    "dense, full": (1, "torch full", ParallelLayout(), DENSE, STEP),
    "experts": (1, "torch", ParallelLayout(), {}, STEP),
    "experts, batch loss": (1, "torch", ParallelLayout(), {"moe": BATCH_LOSS}, STEP),
    "experts, selective": (1, "torch selective", ParallelLayout(), {}, STEP),
    "split experts": (2, "torch", ParallelLayout(expert=2), {}, EXCHANGES),
    "split experts, full": (2, "torch full", ParallelLayout(expert=2), {}, EXCHANGES),
    "split experts, selective": (2, "torch selective", ParallelLayout(expert=2), {}, EXCHANGES),
    "one of split experts, full": (
        2, "torch full", ParallelLayout(expert=2), {"moe": BATCH_LOSS | {"num_experts_per_tok": 1}},
        EXCHANGES,
    ),
}  # fmt: skip


def count_step(rank: int, names: list[str]) -> dict[str, dict[str, int]]:
    """Waits of the second step by file and function."""
    found = {}
    for name in names:
        world_size, kind, layout, changes, _ = CASES[name]
        engine = build_engine(kind, layout, 0.5, 1, **changes)
        for step in range(2):
            batches = [
                batch.to(engine.device)
                for batch in select_rank_batches(step, rank, world_size, MICRO_BATCHES)
            ]
            with count_host_waits() as waits:
                engine.train_step(batches, LEARNING_RATE, extras=(1.0,))
                update_expert_balance(engine.module)
        found[name] = dict(Counter(waits.sites))
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_steady_step_waits_once_and_once_per_layer_of_split_experts(world_size: int) -> None:
    names = [name for name, case in CASES.items() if case[0] == world_size]
    found = run_ranks(count_step, world_size, names)[0]
    assert found == {name: CASES[name][-1] for name in names}


def count_with_planted_item(rank: int) -> dict[str, dict[str, int]]:
    forward = RMSNorm.forward

    def forward_and_read(self: RMSNorm, x: Tensor) -> Tensor:
        y = forward(self, x)
        return y * (1.0 if y.sum().item() else 0.0)

    with patch.object(RMSNorm, "forward", forward_and_read):
        return count_step(rank, ["dense"])


def test_a_planted_item_is_counted() -> None:
    found = run_ranks(count_with_planted_item, 1)[0]["dense"]
    assert found["transformer_block.py:_apply_norm"] == MICRO_BATCHES * 2 * LAYERS
    assert sum(found.values()) == 1 + MICRO_BATCHES * (2 * LAYERS + 1)


@pytest.mark.parametrize("max_valid", [3, 5, 16, 17, 40])
def test_selected_positions_are_the_valid_ones_in_their_order(max_valid: int) -> None:
    x_BTD = torch.randn(4, 16, 3, requires_grad=True)
    targets_BT = torch.full((4, 16), IGNORED)
    targets_BT.view(-1)[[2, 17, 63]] = torch.tensor([5, 0, 7])
    found_BTD, found_BT = select_valid_positions(x_BTD, targets_BT, max_valid)
    valid = found_BT != IGNORED
    assert found_BT.numel() == -(-max_valid // 4) * 4
    assert found_BT[valid].tolist() == [5, 0, 7]
    assert torch.equal(found_BTD[valid], x_BTD.flatten(0, 1)[[2, 17, 63]])
    (gradient,) = torch.autograd.grad((found_BTD * valid[..., None]).sum(), x_BTD)
    assert gradient.sum(-1).nonzero().tolist() == [[0, 2], [1, 1], [3, 15]]


def test_nothing_is_selected_where_nearly_all_positions_are_valid() -> None:
    x_BTD, targets_BT = torch.randn(1, 64, 3), torch.zeros(1, 64, dtype=torch.long)
    assert select_valid_positions(x_BTD, targets_BT, 61)[0] is x_BTD


def test_counts_of_a_batch_travel_with_it() -> None:
    batch = Batch(torch.ones(2, 4, dtype=torch.long), torch.tensor([[1, IGNORED, 1, 1]] * 2))
    moved = batch.to(torch.device("meta"))  # whose values cannot be read
    assert (moved.num_valid_targets, moved.num_tokens, moved.num_source_tokens) == (6, 8, 0)
