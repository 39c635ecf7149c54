"""A run with `train.fit_minutes` ends on time on a machine of any speed, and again after a stop."""

import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from llmsys.config.run import RunConfig
from llmsys.config.train import EVALUATED_COST
from llmsys.doctor.toy_dataset import LENGTH, build_toy_config, write_toy_dataset
from llmsys.errors import StopRequested
from llmsys.events import read_latest_events
from llmsys.optim.lr_schedule import compute_learning_rate
from llmsys.report.run_record import read_run
from llmsys.train.budget_fit import MAX_GROWTH, BudgetFit
from llmsys.train.build_trainer import train_run
from llmsys.train.recorded_changes import load_recorded_changes, set_recorded_changes

STEP_TOKENS = 64
MINUTES = 10.0
EVALUATED_TOKENS = 3_200
PLANNED = 1_000


def build_config(steps: int = PLANNED) -> RunConfig:
    return RunConfig.model_validate(
        {
            "batch": {"sequence_length": 8, "sequences": 8},
            "schedule": {"kind": "linear", "warmup_tokens": STEP_TOKENS, "min_lr_factor": 0.0},
            "train": {"tokens": steps * STEP_TOKENS, "fit_minutes": MINUTES},
        }
    )


class Machine:
    """A machine whose step takes `cost(seconds so far)` seconds, and a run on it."""

    def __init__(self, cost: Any, now: float = 0.0) -> None:
        self.cost, self.now = cost, now

    def train(
        self, config: RunConfig, first: int = 0, record: Any = None, last: int = 10**9
    ) -> tuple[RunConfig, int, dict[str, Any], list[float]]:
        """Train to the end or to step `last`; return the config, steps, record and rates."""
        fit = BudgetFit(MINUTES, EVALUATED_TOKENS, record or {}, clock=lambda: self.now)
        fit.begin(config, first)
        step, rates = first, []
        while step < min(config.num_steps, last):
            step += 1
            rates.append(float(compute_learning_rate(config, step)))
            self.now += self.cost(self.now)
            config = fit.find_budget(config, step, 0.5) or config
        saved = fit.build_record(config)
        if step == config.num_steps:
            share = EVALUATED_COST * EVALUATED_TOKENS / STEP_TOKENS
            self.now += 0.5 + share * self.cost(self.now)
        return config, step, saved, rates


SPEEDS = {
    "as planned": lambda now: 0.6,
    "twice as slow": lambda now: 1.2,
    "twice as fast": lambda now: 0.3,
    "slower in the middle": lambda now: 0.6 if now < 200 else 1.5,
    "faster at the end": lambda now: 1.0 if now < 400 else 0.4,
    "a load that comes and goes": lambda now: 0.5 if now % 60 < 30 else 1.0,
    "a slow first step": lambda now: 20.0 if now == 0 else 0.6,
    "starved at first": lambda now: 24.0 if now < 120 else 0.5,
    "slower in the last minute": lambda now: 0.6 if now < 540 else 1.2,
}


@pytest.mark.parametrize("name", SPEEDS)
def test_the_run_ends_on_time(name: str) -> None:
    machine = Machine(SPEEDS[name])
    config, steps, _, rates = machine.train(build_config())
    assert machine.now / 60 == pytest.approx(MINUTES, rel=0.03)
    assert steps == config.num_steps
    # The schedule still ends at its end, and no step has a rate of another sign or above the peak.
    assert rates[-1] == pytest.approx(0.0, abs=0.02 * config.optimizer.learning_rate)
    assert all(0 <= rate <= config.optimizer.learning_rate for rate in rates)


def test_a_budget_grows_no_further_than_sixteen_times_the_planned_one() -> None:
    machine = Machine(lambda now: 0.002)
    config, steps, _, _ = machine.train(build_config())
    assert steps == MAX_GROWTH * PLANNED
    assert machine.now < 60
    assert config.train.tokens == PLANNED * STEP_TOKENS


def test_a_run_that_is_late_takes_one_more_step() -> None:
    machine = Machine(lambda now: 100.0)
    _, steps, _, _ = machine.train(build_config())
    assert steps <= 8


def test_a_stopped_run_keeps_its_end_and_its_rates() -> None:
    """The time between is not its own; the rates of earlier steps are those of its plans then."""
    machine = Machine(lambda now: 0.9)
    config, step, record, rates = machine.train(build_config(), last=300)
    began = machine.now
    assert record["budget_fit"]["seconds"] == pytest.approx(began)
    machine.now += 5_000
    again = set_recorded_changes(build_config(), record)
    assert again == config
    assert [float(compute_learning_rate(again, one)) for one in range(1, step + 1)] == rates
    resumed = Machine(lambda now: 0.9)
    resumed.now = machine.now
    resumed.train(again, step, record)
    assert (began + resumed.now - machine.now) / 60 == pytest.approx(MINUTES, rel=0.03)


def test_without_minutes_nothing_is_planned() -> None:
    fit = BudgetFit()
    config = build_config()
    fit.begin(config, 0)
    assert fit.find_budget(config, 900, 0.0) is None
    assert fit.build_record(config) == {}
    kept = config.model_copy(update={"train": config.train.model_copy(update={"fit_minutes": 0})})
    assert set_recorded_changes(kept, {"budget_fit": {"budgets": [{"x": 1}]}}) is kept


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"fit_minutes": 5, "reproducibility": "bitwise"}, "no run repeats bit for bit"),
        ({"fit_minutes": 5, "branch_from": "runs/a@5"}, "to those of parent and branch"),
        ({"fitted_budgets": [{"after_step": 5, "tokens": 9}]}, "another run fitted to its minutes"),
        ({"fit_minutes": -1}, "greater than or equal to 0"),
    ],
)
def test_what_follows_no_clock_is_refused(train: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate({"train": train})


def test_a_real_run_trains_what_fits_and_records_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps are counted by a clock of the test, and it is stopped and resumed on the way."""
    write_toy_dataset(tmp_path / "data")
    config = build_toy_config(
        tmp_path,
        data={"folder": tmp_path / "data"},
        train={
            "tokens": 400 * 4 * LENGTH,
            "fit_minutes": 1.0,
            "reproducibility": "fast",
            "hang_timeout_seconds": 600,
            "log_every_steps": 1,
        },
        batch={"sequences": 4},
        checkpoint={"every_steps": 10},
        schedule={"kind": "linear", "warmup_tokens": 0, "min_lr_factor": 0.0},
    )
    ticks = iter(range(10**6))
    # One call at the construction, one at the start, and some in each step: about a second.
    monkeypatch.setattr(
        "llmsys.train.budget_fit.BudgetFit.__init__.__defaults__",
        (*BudgetFit.__init__.__defaults__[:3], lambda: 0.9 * next(ticks)),
    )
    monkeypatch.setattr(
        "llmsys.train.stop_request.StopRequest.to_flag", make_stop_flag(after=20, reason="a test")
    )
    with pytest.raises(StopRequested, match="saved after step"):
        train_run(config, lambda *_: [])
    stopped = load_recorded_changes(config)
    assert stopped.train.fitted_budgets
    monkeypatch.undo()
    monkeypatch.setattr(
        "llmsys.train.budget_fit.BudgetFit.__init__.__defaults__",
        (*BudgetFit.__init__.__defaults__[:3], lambda: 0.9 * next(ticks)),
    )
    train_run(config, lambda *_: [])
    events = list(read_latest_events(config.run.folder / "events.jsonl"))
    ended = load_recorded_changes(config)
    finish = next(event for event in events if event["event"] == "finish")
    assert finish["step"] == ended.num_steps < 100
    assert ended.train.fitted_budgets[: len(stopped.train.fitted_budgets)] == (
        stopped.train.fitted_budgets
    )
    assert read_run(config.run.folder).get_start_value("steps") == ended.num_steps
    for event in events:
        if event["event"] == "step":
            wanted = float(compute_learning_rate(ended, event["step"]))
            assert math.isclose(event["learning_rate"], wanted, abs_tol=1e-12)


def make_stop_flag(after: int, reason: str) -> Any:
    """Return a StopRequest.to_flag that asks to stop in call number `after`."""
    calls = iter(range(10**6))

    def to_flag(self: Any) -> float:
        if next(calls) >= after:
            self.reason = reason
        return float(bool(self.reason))

    return to_flag
