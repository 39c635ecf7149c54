"""A run ends at the first logged step in which a parameter has no gradient, and where replicas
have drifted apart.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.doctor.parity_models import CROWDED, DEEP, EXPERTS, MASKED, ParityModel
from llmsys.doctor.parity_reference import OPTIMIZER, RATE
from llmsys.doctor.parity_rows import build_micro_batches
from llmsys.engine import bitwise_engine
from llmsys.engine.engine import Engine, StepResult
from llmsys.errors import LlmsysError
from llmsys.estimate.pipeline_stages import cut_layers
from llmsys.estimate.state_memory import resolve_planned_layout
from llmsys.events import read_latest_events
from llmsys.model.local_tensor import get_local_tensor
from llmsys.model.transformer import Transformer
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.parallel.fsdp import FsdpModel
from llmsys.parallel.process_group import get_local_device, get_rank, get_world_size
from llmsys.train.build_engine import build_engine
from llmsys.train.build_trainer import build_trainer
from llmsys.train.consistency_check import ConsistencyCheck, _find_different_ranks
from llmsys.train.expert_load import ExpertLoad, update_expert_balance
from tests.helpers.dataset import VOCABULARY, make_dataset
from tests.helpers.ranks import run_ranks
from tests.helpers.steps_around_events import Settings, build_case_config

pytestmark = pytest.mark.distributed

INTERLEAVED: Settings = {"kind": "interleaved", "stages_per_rank": 2}
BITWISE: dict[str, Settings] = {"train": {"reproducibility": "bitwise"}}
UNTIED = ParityModel(
    "four layers, untied",
    DEEP.model.model_copy(update={"tie_word_embeddings": False, "multi_token_prediction": None}),
)
BERT = ParityModel(
    "masked, with a pooler",
    MASKED.model.model_copy(update={"head": MASKED.model.head.model_copy(update={"pooler": True})}),
)
Case = tuple[ParityModel, Settings, dict[str, Settings]]
# Layouts by number of ranks, with whether any two ranks hold the same part of a parameter.
CASES: dict[int, dict[str, tuple[Case, bool]]] = {
    2: {
        "replicas": ((BERT, {"replicate": 2}, {}), True),
        "shards": ((EXPERTS, {}, {}), False),
        "experts": ((CROWDED, {"expert": 2}, {}), False),
        # Which keeps the norms of blocks whole.
        "tensor": ((EXPERTS, {"tensor": 2}, {}), True),
        "ddp": ((CROWDED, {}, {"engine": {"kind": "torch", "data_parallel": "ddp"}}), True),
        "accelerate": ((EXPERTS, {}, {"engine": {"kind": "accelerate"}}), True),
        "zero-0": ((CROWDED, {"expert": 2}, {"engine": {"kind": "deepspeed", "zero_stage": 0}}),
            True),
        "zero-1": ((EXPERTS, {}, {"engine": {"kind": "deepspeed", "zero_stage": 1}}), True),
        "zero-2": ((EXPERTS, {"expert": 2}, {"engine": {"kind": "deepspeed", "zero_stage": 2}}),
            True),
        # Which keeps vectors whole.
        "zero-3": ((EXPERTS, {}, {"engine": {"kind": "deepspeed", "zero_stage": 3}}), True),
        "tied ends of a pipeline": ((DEEP, {"pipeline": 2}, {}), True),
        "bitwise, interleaved": ((UNTIED, {"pipeline": 2, "pipeline_schedule": INTERLEAVED},
            BITWISE), False),
    },
    4: {
        "interleaved": ((DEEP, {"pipeline": 2, "replicate": 2, "pipeline_schedule": INTERLEAVED},
            {}), True),
        "bitwise": ((CROWDED, {"replicate": 2, "expert": 2}, BITWISE), True),
        "tensor and replicas": ((EXPERTS, {"tensor": 2, "replicate": 2}, {}), True),
    },
}  # fmt: skip


class Run:
    """An engine with its check of every step."""

    def __init__(self, case: Case) -> None:
        self.model, layout, sections = case
        config, device = (
            build_case_config(self.model, OPTIMIZER, layout, **sections),
            get_local_device(),
        )
        self.layout: ParallelLayout = resolve_planned_layout(config)
        self.is_bitwise = config.train.reproducibility == "bitwise"
        meshes = build_device_meshes(self.layout, device)
        self.engine: Engine = build_engine(config, meshes, device)
        self.check = ConsistencyCheck(
            1,
            self.engine.module,
            layout=self.layout,
            device=device,
            cut=cut_layers(config.model, self.layout, self.model.length)
            if self.layout.pipeline > 1
            else None,
            expert_rank=0 if meshes.expert is None else meshes.expert.get_local_rank(),
        )

    def take_step(self, step: int, change: Callable[[], None] = lambda: None) -> None:
        """A step, a change of the weights, and both checks."""
        rank, ranks = self.layout.get_data_rank(get_rank()), self.layout.data_parallel_size
        if self.model.has_windows:
            rows = build_micro_batches(
                self.model, step, rank=0, ranks=1, micro=1, is_bitwise=False
            )[rank::ranks]
        result: StepResult = self.engine.train_step(rows, RATE)
        load = update_expert_balance(self.engine.module)
        change()
        assert self.check.check_gradients(step + 1, result.absent, load) == []
        self.check.check_replicas(step + 1)

    def drift(self) -> None:
        """Change the last bit of one weight on the last rank."""
        if get_rank() != get_world_size() - 1:
            return
        is_tied = self.model.model.tie_word_embeddings
        name = "embed.weight" if self.layout.pipeline > 1 and is_tied else "norm.weight"
        if self.layout.tensor > 1:
            name = "blocks.0.attention_norm.weight"
        local = get_local_tensor(self.engine.module.get_parameter(name).detach()).view(-1)
        local[:1].view(torch.int32).bitwise_xor_(1)


def describe_error(action: Callable[[], object]) -> str:
    try:
        action()
    except LlmsysError as error:
        return str(error)
    return ""


def run_cases(rank: int) -> dict[str, tuple[bool, str, str]]:
    """Whether there are replicas, the error of undisturbed steps, and that of a step with a
    drift.
    """
    found = {}
    for name, (case, _) in CASES[get_world_size()].items():
        run = Run(case)
        calm = describe_error(partial(run.take_step, 0)) or describe_error(
            partial(run.take_step, 1)
        )
        drifted = describe_error(partial(run.take_step, 2, run.drift))
        found[name] = (run.check.has_replicas, calm, drifted)
    return found


@pytest.mark.parametrize("ranks", CASES)
def test_undisturbed_steps_pass_and_a_changed_bit_of_a_replica_is_named(ranks: int) -> None:
    for found in run_ranks(run_cases, ranks):
        for name, (_, has_replicas) in CASES[ranks].items():
            assert found[name][:2] == (has_replicas, ""), name
            if has_replicas:
                message = found[name][2]
                assert "hold the same parts with different bits" in message, name
                assert any(f"{one} (1 of " in message for one in ("embed", "norm", "blocks.0")), (
                    message
                )
            else:
                assert not found[name][2], name


def enter_as_if_one_stage(self: FsdpModel, *, last: bool, stage: int | None = None) -> Any:
    """The reduction between replicas in the last backward of a rank: here that of its first
    stage.
    """
    for units in self._units_by_stage.values():
        for unit in units:
            unit.set_requires_all_reduce(last and stage in (0, 1), recurse=False)
    return contextlib.nullcontext()


def train_with_unreduced_stages(rank: int, folder: Path) -> str:
    """The error of a run of the trainer."""
    model = UNTIED.model.model_copy(update={"vocab_size": VOCABULARY})
    sections: dict[str, Settings] = {
        "run": {"folder": str(folder / "run")},
        "data": {"kind": "crawl", "folder": str(folder / "data")},
        "tokenizer": {"kind": "sentencepiece", "vocab_size": VOCABULARY},
        "evaluation": {"micro_sequences": 8, "max_tokens": 500},
    }
    layout = {"pipeline": 2, "replicate": 2, "pipeline_schedule": INTERLEAVED}
    config = build_case_config(ParityModel("run", model), OPTIMIZER, layout, **sections)
    with (
        patch.object(FsdpModel, "enter_micro_batch", enter_as_if_one_stage),
        contextlib.ExitStack() as stack,
    ):
        trainer = build_trainer(config, stack, lambda *_: [])
        with pytest.raises(LlmsysError) as raised:
            trainer.train()
    assert raised.value.exit_status == 2
    return str(raised.value)


def test_stages_that_are_not_reduced_end_a_run_at_its_first_logged_step(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data")
    for message in run_ranks(train_with_unreduced_stages, 4, tmp_path):
        assert message.startswith("step 1: parameters without a gradient, which would only decay: ")
        assert "stage 2: blocks.2 (" in message
        assert "stage 3: blocks.3 (" in message
        assert "stage 0" not in message
        assert "train.consistency_check_every_steps=0" in message
    events = read_latest_events(tmp_path / "run" / "events.jsonl")
    assert [event["step"] for event in events if event["event"] == "step"] == [1]
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def evaluate_without_sharding_again(rank: int) -> str:
    """The error of bitwise mode where an evaluation leaves the root gathered."""

    def enter(module: Transformer) -> None:
        module.train()

    run = Run((EXPERTS, {}, BITWISE))
    [batch] = build_micro_batches(EXPERTS, 0, rank=0, ranks=1, micro=8, is_bitwise=False)
    run.engine.compute_logits(batch)
    with patch.object(bitwise_engine, "enter_training", enter):
        return describe_error(lambda: run.take_step(0))


@pytest.mark.parametrize("ranks", [1, 2])
def test_bitwise_mode_ends_with_one_message_where_its_gradients_would_be_lost(ranks: int) -> None:
    for message in run_ranks(evaluate_without_sharding_again, ranks):
        assert message.startswith("train.reproducibility=bitwise: 3 parameters (")
        assert all(name in message for name in ("embed.weight", "norm.weight", "head.weight"))
        assert "No weight was changed" in message


def check_idle_experts(rank: int) -> tuple[list[str], str]:
    run = Run((EXPERTS, {}, {}))
    absent = ["blocks.0.feed_forward.router.weight", "blocks.0.feed_forward.experts.up_proj"]
    sums_LS = torch.ones(2, 2 * 4 + 3, dtype=torch.float64)
    reached = describe_error(lambda: run.check.check_gradients(1, absent, ExpertLoad(sums_LS)))
    sums_LS[0, :4] = 0
    return run.check.check_gradients(1, absent, ExpertLoad(sums_LS)), reached


def test_routers_and_experts_that_no_token_reached_need_no_gradient() -> None:
    [(idle, reached)] = run_ranks(check_idle_experts, 1)
    assert idle == ["blocks.0.feed_forward.router.weight", "blocks.0.feed_forward.experts.up_proj"]
    assert "blocks.0 (2 of " in reached


def test_two_ranks_differ_where_they_hold_the_same_with_other_bits_whichever_is_larger() -> None:
    for bits in (4, 6):
        assert _find_different_ranks([[[1, 5], [2, 0]], [[3, 9], [0, 0]], [[1, bits], [0, 0]]]) == (
            0,
            2,
        )
    assert _find_different_ranks([[[1, 5], [2, 8]], [[2, 8], [1, 5]], [[3, 6], [0, 0]]]) is None
