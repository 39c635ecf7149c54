"""A probe of a run's processes gives the steps that it measured, and is kept while it is fresh."""

from pathlib import Path

import pytest
import torch

from llmsys.calibrate import run_probe
from llmsys.calibrate.probe_cache import BUSY, load_cached_probe, write_probe
from llmsys.calibrate.run_probe import measure_run_machine
from llmsys.calibrate.training_steps import StepRate
from llmsys.config.run import RunConfig
from llmsys.estimate.device_profile import load_device_profile
from llmsys.estimate.step_time import estimate_step_time
from llmsys.train.precision import find_bf16_support
from tests.llmsys.calibrate.test_machine_probe import MEASURED


def test_the_probe_gives_the_measured_times_of_both_kinds_of_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_probe, "calibrate_device", lambda *_: MEASURED)
    measured: list[RunConfig] = []

    def measure(config: RunConfig, budget: float) -> StepRate:
        measured.append(config)
        return StepRate(0.25 * len(measured), 0.01, 9)

    monkeypatch.setattr(run_probe, "measure_step_rate", measure)
    profile = measure_run_machine(1)
    assert profile is not None
    assert [config.model.moe is None for config in measured] == [True, False]
    for number, config in enumerate(measured, start=1):
        one = config.resolve_precision("bf16" if _multiplies_bf16() else "fp32")
        step = estimate_step_time(one, one.resolve_layout(1), profile)
        assert step.seconds.p50 == pytest.approx(0.25 * number)


@pytest.mark.parametrize(("waited", "is_busy"), [(0.0, False), (1e6, True)])
def test_a_process_that_waited_for_a_core_was_beside_other_work(
    waited: float, is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_probe, "calibrate_device", lambda *_: MEASURED)
    monkeypatch.setattr(run_probe, "measure_step_rate", lambda *_: StepRate(0.25, 0.01, 9))
    seconds = iter((0.0, waited))
    monkeypatch.setattr(run_probe, "read_wait_seconds", lambda: next(seconds))
    profile = measure_run_machine(1)
    assert profile is not None
    assert (BUSY in profile.sources) == is_busy


def _multiplies_bf16() -> bool:
    return find_bf16_support(torch.device("cpu")).is_native


def test_a_probe_that_is_old_is_measured_again(tmp_path: Path) -> None:
    probe = MEASURED.model_copy(
        update={"sources": {"efficiency": "a test", "probed": "2026-01-01"}}
    )
    write_probe(tmp_path / "old.yaml", probe)
    assert load_cached_probe(tmp_path / "old.yaml") is None
    assert load_device_profile(str(tmp_path / "old.yaml")).name == MEASURED.name
