"""Bad steps: refused on their numbers alone, left out of the trajectory, and remembered across
resumes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from llmsys.config.attention import MultiHeadAttentionConfig
from llmsys.config.loading.load import load_run_config
from llmsys.config.run import RunConfig
from llmsys.config.train import TrainConfig
from llmsys.data.batch import Batch
from llmsys.engine.engine import Accept, EngineState, StepResult, accept_all
from llmsys.errors import LlmsysError, StopRequested
from llmsys.events import EventWriter, read_latest_events
from llmsys.train.build_objective import build_step_batches
from llmsys.train.checkpoint_load import find_newest_checkpoint
from llmsys.train.checkpoint_saver import CheckpointSaver
from llmsys.train.evaluator import TargetEvaluation
from llmsys.train.initial_state import resume_from_checkpoint
from llmsys.train.metric_logger import MetricLogger
from llmsys.train.run_data import open_first_source
from llmsys.train.step_guard import StepGuard, describe_step_contents
from llmsys.train.step_metrics import build_step_meter
from llmsys.train.stop_request import StopRequest
from llmsys.train.trainer import Trainer
from llmsys.train.trainer_components import (
    Checkpointing,
    Evaluation,
    Observability,
    RunControl,
    TrainingData,
)
from llmsys.train.watchdog import Watchdog
from tests.helpers.dataset import VOCABULARY, make_dataset

STEPS = 12


def judge(**settings: Any) -> StepGuard:
    return StepGuard(TrainConfig.model_validate(settings))


def take(one: StepGuard, step: int, loss: float, norm: float) -> bool:
    accepted = one.accept_step(loss, norm)
    result = StepResult(loss, norm, 1, accepted)
    one.record_accepted(step, result) if accepted else one.record_skipped(step)
    return accepted


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (2.0, math.inf), (math.inf, math.nan)])
def test_a_step_that_is_not_finite_is_bad(loss: float, norm: float) -> None:
    one = judge()
    assert not one.accept_step(loss, norm)
    assert "Both must be finite" in one.problem


def test_a_spike_is_judged_by_the_median_of_the_steps_that_were_taken() -> None:
    one = judge(
        spike_detection={"max_grad_norm_ratio": 4, "max_loss_ratio": 1.5, "window_steps": 3}
    )
    # no window yet
    assert all(take(one, step, 2.0, norm) for step, norm in ((1, 1.0), (2, 900.0), (3, 1.2)))
    assert not take(one, 4, 2.0, 4.9)
    assert one.problem.startswith("gradient norm 4.9, and the median of the last 3 steps is 1.2.")
    assert take(one, 5, 2.0, 4.7)  # the refused step did not count: the median is still 1.2
    assert not take(one, 6, 3.1, 1.0)
    assert "train.spike_detection.max_loss_ratio allows 1.5 times that" in one.problem
    assert one.skipped_steps == {4, 6}


def test_a_run_of_bad_steps_ends_and_so_does_the_first_one_under_stop() -> None:
    one = judge(max_consecutive_bad_steps=2)
    assert [take(one, step, math.nan, 1.0) for step in (1, 2)] == [False, False]
    assert take(one, 3, 1.0, 1.0)
    assert [take(one, step, math.nan, 1.0) for step in (4, 5)] == [False, False]
    with pytest.raises(
        LlmsysError,
        match=r"step 6: loss nan.*consecutive bad step 3; train.max_consecutive_bad_steps=2",
    ):
        take(one, 6, math.nan, 1.0)
    with pytest.raises(LlmsysError, match=r"step 1: .*skip such steps with train.on_bad_step=skip"):
        take(judge(on_bad_step="stop"), 1, math.nan, 1.0)


class NoExperts(torch.nn.Module):
    num_moe_layers, recurrence, encoder = 0, None, None
    config = SimpleNamespace(attention=MultiHeadAttentionConfig())
    shapes_elsewhere: dict[str, tuple[int, ...]] = {}  # noqa: RUF012

    def list_moe_layers(self) -> list[Any]:
        return []


class CountingEngine:
    """A step adds its number to a weight, and to a hash of the order; some steps have numbers
    out of order.
    """

    device = torch.device("cpu")
    module = NoExperts()

    def __init__(self, bad: Callable[[int], bool]) -> None:
        self.weights = {
            "parameter/sum": torch.zeros(1),
            "parameter/order": torch.zeros(1, dtype=torch.float64),
        }
        self.updates, self.tried, self.bad = 0, [], bad  # type: ignore[var-annotated]

    def train_step(
        self,
        batches: Sequence[Batch],
        learning_rate: float,
        accept: Accept = accept_all,
        extras: Sequence[float] = (),
    ) -> StepResult:
        step = int(batches[0].tokens_BT[0, 0])
        self.tried.append(step)
        norm = math.nan if self.bad(step) else 1.0
        if applied := accept(2.0, norm):
            self.updates += 1
            self.weights["parameter/sum"] += step
            self.weights["parameter/order"].mul_(1.1).add_(step)
        return StepResult(2.0, norm, 1, applied, tuple(extras))

    def compute_logits(self, batch: Batch) -> torch.Tensor:
        return torch.zeros(1)

    def get_state(self) -> EngineState:
        return EngineState(dict(self.weights), self.updates)

    def load_state(self, state: EngineState) -> None:
        self.updates = state.steps


class Numbers:
    """A loader whose batch of a step is the step's number."""

    wait_seconds = 0.0

    def iter_steps(self, start: int, stop: int) -> Iterator[tuple[int, list[Batch]]]:
        for step in range(start, stop):
            yield step, [Batch(torch.tensor([[step + 1]]), torch.tensor([[0]]), None)]

    def get_step_metrics(self, step: int) -> dict[str, Any]:
        return {}


class NoEvaluation:
    def evaluate(self, compute_logits: Any, device: Any) -> TargetEvaluation:
        return TargetEvaluation(2.0, 7.4, 0.5, 1)


def load_config(folder: Path, **settings: str) -> RunConfig:
    words = {"run.folder": str(folder), "train.tokens": str(STEPS * 64),
        "batch.sequence_length": "64",
             "batch.sequences": "1", "checkpoint.every_steps": "4", "train.log_every_steps": "1",
             "schedule": "{kind: constant}", "train.precision": "fp32",
             "train.hang_timeout_seconds": "0", "layout.expert": "1"}  # fmt: skip
    return load_run_config(
        "train/demo", [f"{key}={value}" for key, value in (words | settings).items()]
    )


def build_trainer(
    one: RunConfig, bad: Callable[[int], bool], wish: StopRequest | None = None
) -> Trainer:
    """A trainer around the counting engine, resumed if its folder holds a checkpoint."""
    engine, judged, folder = (
        CountingEngine(bad),
        StepGuard(one.train),
        one.run.folder / "checkpoints",
    )
    steps, newest = 0, find_newest_checkpoint(folder)
    if newest is not None:
        steps = resume_from_checkpoint(cast(Any, engine), newest, one, {}, judged)
    logger = MetricLogger(EventWriter(one.run.folder / "events.jsonl"), None)
    loader: Any = Numbers()
    run: Any = engine
    return Trainer(
        config=one,
        engine=run,
        data=TrainingData(loader, lambda step: {}, lambda config: loader),
        evaluation=Evaluation(NoEvaluation(), list),
        checkpointing=Checkpointing(CheckpointSaver(folder, one.checkpoint), {}),
        control=RunControl(
            judged, wish or StopRequest(environment={}), Watchdog(one.run.folder, 0)
        ),
        observability=Observability(logger, build_step_meter(one, torch.device("cpu"), None)),
        steps_done=steps,
    )


def get_weights(one: Trainer) -> dict[str, float]:
    engine: Any = one.engine
    return {name: value.item() for name, value in engine.weights.items()}


def compute_weights_without(*left_out: int) -> dict[str, float]:
    total, order = 0, 0.0
    for step in range(1, STEPS + 1):
        if step not in left_out:
            total, order = total + step, order * 1.1 + step
    return {"parameter/sum": float(total), "parameter/order": order}


@pytest.mark.parametrize("policy", ["skip", "rewind"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_trajectory_is_the_one_without_the_bad_steps(
    tmp_path: Path, policy: str, mode: str
) -> None:
    one = build_trainer(
        load_config(tmp_path, **{"train.on_bad_step": policy, "checkpoint.mode": mode}),
        bad=lambda step: step in (6, 7, 11),
    )
    one.train()
    assert get_weights(one) == pytest.approx(compute_weights_without(6, 7, 11))
    assert one.engine.get_state().steps == STEPS - 3
    events = read_latest_events(tmp_path / "events.jsonl")
    assert [event["step"] for event in events if event["event"] == "bad_step"] == [6, 7, 11]
    assert all(event["policy"] == policy for event in events if event["event"] == "bad_step")
    tried: list[int] = one.engine.tried  # type: ignore[attr-defined]
    assert tried.count(5) == (3 if policy == "rewind" else 1)
    assert tried.count(6) == tried.count(11) == 1


def test_a_rewind_heals_weights_that_were_damaged_in_memory(tmp_path: Path) -> None:
    damaged: list[Any] = []

    def is_bad(step: int) -> bool:
        total: torch.Tensor = one.engine.weights["parameter/sum"]  # type: ignore[attr-defined]
        if step == 6 and not damaged:
            damaged.append(total.fill_(math.nan))
        return bool(total.isnan())

    one = build_trainer(load_config(tmp_path, **{"train.on_bad_step": "rewind"}), is_bad)
    one.train()
    assert get_weights(one) == pytest.approx(compute_weights_without(6))
    damaged.clear()
    one = build_trainer(
        load_config(tmp_path / "skip", **{"train.max_consecutive_bad_steps": "2"}), is_bad
    )
    # nothing that is skipped would help
    with pytest.raises(LlmsysError, match="consecutive bad step 3"):
        one.train()


def test_a_bad_first_step_finds_something_to_go_back_to(tmp_path: Path) -> None:
    one = build_trainer(
        load_config(tmp_path, **{"train.on_bad_step": "rewind"}), lambda step: step == 1
    )
    one.train()
    assert get_weights(one) == pytest.approx(compute_weights_without(1))


def test_experts_are_not_balanced_by_a_step_that_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied: list[bool] = []
    monkeypatch.setattr(
        "llmsys.train.trainer.update_expert_balance", lambda module, one: applied.append(one)
    )
    build_trainer(load_config(tmp_path), lambda step: step == 3).train()
    assert applied == [step != 3 for step in range(1, STEPS + 1)]


def test_a_stopped_run_saves_after_the_step_and_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    one, wish = load_config(tmp_path, **{"checkpoint.mode": "async"}), StopRequest(environment={})

    def stop_in_step_six(step: int) -> bool:
        if step == 6:
            wish.reason = "SIGTERM came"
        return step == 3

    with pytest.raises(
        StopRequested,
        match=r"SIGTERM came: saved after step 7 of 12 into .* Run the same command again",
    ):
        build_trainer(one, stop_in_step_six, wish).train()
    again = build_trainer(one, lambda step: False)
    assert again.steps_done == 7
    assert again.control.step_guard.skipped_steps == {3}
    again.train()
    assert get_weights(again) == pytest.approx(compute_weights_without(3))
    [stopped] = [
        event
        for event in read_latest_events(tmp_path / "events.jsonl")
        if event["event"] == "stopped"
    ]
    assert (stopped["step"], stopped["reason"]) == (7, "SIGTERM came")


def test_the_count_of_bad_steps_in_a_row_survives_a_rewind(tmp_path: Path) -> None:
    one = build_trainer(
        load_config(
            tmp_path, **{"train.on_bad_step": "rewind", "train.max_consecutive_bad_steps": "3"}
        ),
        lambda s: s > 5,
    )
    with pytest.raises(LlmsysError, match=r"step 9: .*consecutive bad step 4"):
        one.train()


def test_an_overflow_behind_a_bad_step_is_still_an_overflow(tmp_path: Path) -> None:
    class Overflowing(CountingEngine):
        def train_step(self, batches: Sequence[Batch], *rest: Any) -> StepResult:
            if int(batches[0].tokens_BT[0, 0]) != 4:
                return super().train_step(batches, *rest)
            return StepResult(
                2.0, math.inf, 1, False, (0.0, 0.0)
            )  # as under fp16: nobody was asked

    one = build_trainer(load_config(tmp_path), lambda step: False)
    one.engine = Overflowing(lambda step: step == 3)  # type: ignore[assignment]
    one.train()
    events = read_latest_events(tmp_path / "events.jsonl")
    found = [
        (event["event"], event["step"])
        for event in events
        if event["event"] in ("bad_step", "overflow")
    ]
    assert found == [("bad_step", 3), ("overflow", 4)]


class FallingThenRising:
    """Evaluations whose third is the best."""

    asked = 0

    def evaluate(self, compute_logits: Any, device: Any) -> TargetEvaluation:
        self.asked += 1
        return TargetEvaluation(2.0 + abs(self.asked - 3), 7.4, 0.5, 1)


def test_the_best_evaluation_of_the_loop_stays_with_the_last(tmp_path: Path) -> None:
    settings = {"checkpoint.every_steps": "2", "evaluation.every_steps": "2",
        "checkpoint.keep_best": "1",
                "checkpoint.keep_last": "1"}  # fmt: skip
    one = build_trainer(load_config(tmp_path, **settings), lambda step: False)
    one.evaluation.evaluator = FallingThenRising()
    one.train()
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step-00000006", f"step-{STEPS:08d}"]


def test_the_record_of_a_bad_step_names_its_documents(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data")
    settings = {"data.folder": str(tmp_path / "data"), "tokenizer.vocab_size": str(VOCABULARY),
        "batch.sequences": "4",
                "model.vocab_size": str(VOCABULARY), "train.tokens": str(256 * 40)}  # fmt: skip
    one = load_config(tmp_path, **settings)
    shards, tokenizer = open_first_source(one, "train")
    by_rank = [build_step_batches(one, 2, rank) for rank in range(2)]
    found = describe_step_contents(by_rank[0], [shards], 5)
    assert found == describe_step_contents(by_rank[1], [shards], 5)
    assert found["sequences"] == [20, 23]
    rows = [
        row.tolist()
        for steps in by_rank
        for batch in steps.get_micro_batches(5)
        for row in batch.tokens_BT
    ]
    end = f" {tokenizer.eos_id} "
    lines = [f" {' '.join(map(str, row))} ".replace(end, " | ") for row in rows]
    pieces = [f" {piece.strip()} " for line in lines for piece in line.split("|") if piece.strip()]
    texts = [
        f" {' '.join(map(str, shards.get_tokens(int(one, 16)).tolist()))} "
        for one in found["documents"]
    ]
    assert all(any(piece in text for text in texts) for piece in pieces)
    strangers = [text for text in texts if not any(piece in text for piece in pieces)]
    # of a row's last document perhaps only its first token is in, as a target
    assert len(strangers) <= len(rows)
    assert found["num_documents"] == len(set(texts))
