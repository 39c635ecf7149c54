"""Steps are measured as a run takes them, and their mean counts slow ones."""

import itertools
import math

import pytest

from llmsys.calibrate import training_steps
from llmsys.calibrate.training_steps import (
    MIN_STEPS,
    StepRate,
    measure_fastest_rate,
    measure_step_rate,
    summarize_steps,
)
from llmsys.config.loading.load import read_config
from llmsys.config.run import RunConfig
from llmsys.parallel.process_group import init_process_group

TINY = [
    "model.vocab_size=64",
    "model.hidden_size=32",
    "model.intermediate_size=32",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=2",
    "model.head_dim=16",
    "batch.sequence_length=16",
    "batch.sequences=2",
]


def test_the_mean_counts_slow_steps_and_quarters_give_its_error() -> None:
    rate = summarize_steps([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 3.0])
    assert (rate.seconds, rate.steps) == (1.5, 8)
    # the quarters' means are 1, 1, 1 and 3: deviation √0.75, of which four make half an error
    assert rate.spread == pytest.approx(0.75**0.5 / 1.5 / 2)


def test_steps_are_taken_until_the_budget_is_used() -> None:
    config = read_config("model/llama3.2-1b", TINY).run
    ticks = itertools.count(0.0, 0.5)
    with init_process_group():
        rate = measure_step_rate(config, 3.0, clock=lambda: next(ticks))
        least = measure_step_rate(config, 0.0, clock=lambda: next(ticks))
    assert (rate.seconds, rate.spread, rate.steps) == (0.5, 0.0, 6)
    assert least.steps == MIN_STEPS


def test_the_fastest_number_of_threads_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config("model/llama3.2-1b", TINY).run
    asked = []

    def measure(one: RunConfig, seconds: float, *, give_up_seconds: float) -> StepRate:
        threads = one.train.threads_per_process
        asked.append((threads, give_up_seconds))
        return StepRate({1: 0.2, 4: 0.1, 8: 0.3}[threads], 0.0, 4, threads)

    monkeypatch.setattr(training_steps, "measure_step_rate", measure)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert measure_fastest_rate(config, 3.0).threads == 4
    # slower ones end in the warm-up
    assert asked == [(1, math.inf), (4, pytest.approx(0.3)), (8, pytest.approx(0.15))]


def test_steps_that_are_too_slow_end_in_the_warm_up() -> None:
    config = read_config("model/llama3.2-1b", TINY).run
    ticks = itertools.count(0.0, 0.5)
    with init_process_group():
        rate = measure_step_rate(config, 3.0, clock=lambda: next(ticks), give_up_seconds=0.4)
    assert (rate.seconds, rate.steps) == (0.5, 1)
