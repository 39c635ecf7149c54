"""A flipped bit in a forward pass is found before it reaches a weight, and its rank is named."""

import re
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.engine.ema_engine import EmaEngine
from llmsys.engine.state_hash import hash_state
from llmsys.errors import ConfigError, LlmsysError
from llmsys.train.corruption_check import CorruptionCheck, require_comparable_gradients
from llmsys.train.dropout_seed import seed_dropout
from llmsys.train.expert_load import update_expert_balance
from tests.helpers.parity_runs import LEARNING_RATE, build_engine, select_rank_batches
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_training import build_tiny_config

DROPOUT: dict[str, Any] = {"dropout": {"residual": 0.1}}
CASES = {
    "fsdp": ("torch", ParallelLayout()),
    "fsdp, blocks recomputed": ("torch full", ParallelLayout()),
    "ddp": ("torch ddp", ParallelLayout(replicate=2)),
    "bitwise": ("bitwise", ParallelLayout()),
}
MODEL = build_tiny_config(moe=None, max_position_embeddings=512)
CONFIG = RunConfig.model_validate({"train": {"corruption_check_every_steps": 2}, "model": MODEL})


def flip_bit(output: Tensor) -> Tensor:
    """The output with one bit of one of its numbers flipped."""
    flipped = output.detach().clone()
    flipped.view(torch.int32).flatten()[-7] ^= 1 << 20  # the first rows have no targets
    return output + (flipped - output.detach())


def train_with_flip(
    rank: int, kind: str, layout: ParallelLayout, flipped: str, checked: bool
) -> Any:
    """The state after three steps, or the message. Rank 1 flips a bit in the first pass of
    `flipped` of step 2.
    """
    engine = EmaEngine(build_engine(kind, layout, 0.5, 2, **DROPOUT), 100)
    ranks = torch.distributed.get_world_size()
    check = CorruptionCheck(
        CONFIG, engine, lambda step, of: select_rank_batches(step, of, ranks, 2), rank, ranks
    )
    phase = ""

    def corrupt(module: Any, inputs: Any, output: Tensor) -> Tensor | None:
        nonlocal phase
        before, phase = phase, ""
        return flip_bit(output) if (rank, step, before) == (1, 1, flipped) else None

    engine.module.blocks[1].register_forward_hook(corrupt)
    events = []

    def accept(loss: float, norm: float) -> bool:
        events.append(check.end_step())
        return True

    for step in range(3):
        phase = "repetition"
        if checked:
            check.begin_step(step)
        phase = "step"
        seed_dropout(CONFIG.run.seed, step)
        before = hash_state(engine.get_state())
        try:
            engine.train_step(select_rank_batches(step, rank, ranks, 2), LEARNING_RATE, accept)
        except LlmsysError as error:
            return str(error), hash_state(engine.get_state()) == before
        update_expert_balance(engine.module)
    return hash_state(engine.get_state()), events


def train_cases(rank: int, cases: list[tuple[str, ParallelLayout]]) -> list[Any]:
    return [
        (
            train_with_flip(rank, *case, "nothing", checked=False),
            train_with_flip(rank, *case, "nothing", checked=True),
            train_with_flip(rank, *case, "step", checked=True),
            train_with_flip(rank, *case, "repetition", checked=True),
        )
        for case in cases
    ]


@pytest.mark.distributed
def test_a_flipped_bit_names_its_rank_and_changes_no_weight_and_a_check_changes_no_bit() -> None:
    by_rank = run_ranks(train_cases, 2, list(CASES.values()))
    for name, mine, theirs in zip(CASES, *by_rank, strict=True):
        assert mine == theirs, name
        unchecked, (state, events), in_step, in_repetition = mine
        assert state == unchecked[0], name
        assert [event is not None for event in events] == [False, True, False], name
        assert events[1]["ranks"] == 2, name
        for (message, is_unchanged), suspect in ((in_step, 1), (in_repetition, 0)):
            assert is_unchanged, name
            assert re.search(
                rf"step 2: the gradients of rank {suspect} have hash \w+, and computed again on",
                message,
            )
            assert re.search(
                r"A third computation agrees with all but rank 1 on .* run the same command again",
                message,
            )


def test_compiled_kernels_are_refused() -> None:
    train = {"corruption_check_every_steps": 5, "compile": "block"}
    with pytest.raises(ValidationError, match="kernels by the first shapes that a rank sees"):
        RunConfig.model_validate({"model": MODEL, "train": train})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": {"kind": "deepspeed"}}, "needs engine.kind=torch, not deepspeed"),
        ({"layout": {"tensor": 2}}, "layout.tensor=2 splits them. Use layout.tensor=1"),
        ({"train": {"precision": "fp16"}}, "fp16 skips steps that overflow"),
        (
            {"train": {"noise_scale_every_steps": 5}, "batch": {"micro_sequences": 1}},
            "in another order. Set one of the",
        ),
        (
            {"train": {"reproducibility": "fast"}},
            "add in any order on cuda. Set train.reproducibility=bitwise",
        ),
    ],
)
def test_what_cannot_be_repeated_bit_for_bit_is_rejected(
    settings: dict[str, Any], message: str
) -> None:
    train = {"corruption_check_every_steps": 5} | settings.get("train", {})
    config = RunConfig.model_validate({"model": MODEL, **settings, "train": train})
    with pytest.raises(ConfigError, match=message):
        require_comparable_gradients(config, torch.device("cuda"))
