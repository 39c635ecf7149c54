"""A machine without a profile is measured once before a run, as the run uses it, and never in its
way.
"""

import logging
import sys
from pathlib import Path

import pytest
import torch

from llmsys.calibrate import run_probe as machine_run_probe
from llmsys.calibrate.probe_cache import BUSY, write_probe
from llmsys.calibrate.run_probe import read_wait_seconds
from llmsys.config.loading.load import load_run_config
from llmsys.config.run import RunConfig
from llmsys.estimate.device_profile import MACHINE_PROFILE, DeviceProfile
from llmsys.launch.launchers import run_probe
from llmsys.launch.launchers.run_probe import build_probe_command, find_machine_profile
from tests.helpers.device_profile import write_abacus
from tests.llmsys.calibrate.test_machine_probe import MEASURED

TODAY = MEASURED.model_copy(update={"sources": {"efficiency": "a test", "probed": "2999-01-01"}})


def load_config(*words: str) -> RunConfig:
    return load_run_config("train/demo", ["train.precision=bf16", *words])


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that measured, on a machine where that writes `MEASURED`."""
    monkeypatch.setenv("LLMSYS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(MACHINE_PROFILE)
    monkeypatch.setattr("llmsys.calibrate.probe_cache.MAX_AGE_DAYS", 10**6)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked: list[list[str]] = []

    def build(path: Path, processes: int, threads: int) -> list[str]:
        asked.append([path.name, str(processes), str(threads)])
        write_probe(path, _probe_now())
        return [sys.executable, "-c", ""]

    monkeypatch.setattr(run_probe, "build_probe_command", build)
    return asked


def _probe_now() -> DeviceProfile:
    return MEASURED.model_copy(update={"sources": {"efficiency": "a test", "probed": "2026-01-01"}})


def test_a_machine_is_measured_once_for_each_number_of_processes(
    commands: list[list[str]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    with caplog.at_level(logging.INFO):
        first = find_machine_profile(load_config(), 2, {})
        again = find_machine_profile(load_config(), 2, {})
        alone = find_machine_profile(load_config(), 1, {})
        threads = find_machine_profile(load_config("train.threads_per_process=3"), 1, {})
    assert first is not None
    assert first == again
    assert len({first, alone, threads}) == 3
    assert [one[1:] for one in commands] == [["2", "4"], ["1", "8"], ["1", "3"]]
    assert "measuring it for about ten seconds" in caplog.text
    assert "`llmsys train --no-probe` measures nothing" in caplog.text
    assert "bf16 60 GFLOP/s in products, 10 GB/s of memory" in caplog.text


def test_a_measurement_beside_other_work_is_said_and_used_for_one_run(
    commands: list[list[str]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = _probe_now()
    busy.sources[BUSY] = "a process waited for a core for 60% of the time"
    monkeypatch.setattr(f"{__name__}._probe_now", lambda: busy)
    first = find_machine_profile(load_config(), 1, {})
    assert first is not None
    assert first.is_file()
    assert "a process waited for a core for 60% of the time" in caplog.text
    assert "the next run measures again" in caplog.text
    assert find_machine_profile(load_config(), 1, {}) == first
    assert len(commands) == 2


def test_time_without_a_core_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_run_probe, "SCHEDULE", tmp_path / "schedstat")
    assert read_wait_seconds() == 0
    (tmp_path / "schedstat").write_text("8000000000 2500000000 71\n")
    assert read_wait_seconds() == 2.5


def test_nothing_is_measured_where_a_device_is_named_or_it_is_switched_off(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = load_config(f"flops.device={write_abacus(tmp_path / 'mine.yaml')}")
    assert find_machine_profile(named, 2, {}) is None
    monkeypatch.setenv(MACHINE_PROFILE, "none")
    assert find_machine_profile(load_config(), 2, {}) is None
    assert commands == []


@pytest.mark.parametrize(("name", "is_measured"), [("NVIDIA H200", False), ("NVIDIA H201", True)])
def test_an_accelerator_is_measured_where_it_has_no_profile(
    commands: list[list[str]],
    name: str,
    is_measured: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{name}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (find_machine_profile(load_config(), 1, {}) is not None) == is_measured
    assert bool(commands) == is_measured


def test_a_failed_measurement_is_said_and_the_run_goes_on(
    commands: list[list[str]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = [sys.executable, "-c", "import sys; print('no memory'); sys.exit(7)"]
    monkeypatch.setattr(run_probe, "build_probe_command", lambda *_: fail)
    assert find_machine_profile(load_config(), 1, {}) is None
    assert "no time is predicted: status 7, no memory" in caplog.text
    hang = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(run_probe, "build_probe_command", lambda *_: hang)
    monkeypatch.setattr(run_probe, "MAX_SECONDS", 0.01)
    assert find_machine_profile(load_config(), 1, {}) is None
    assert "no result after 0 s" in caplog.text


def test_several_processes_measure_under_torchrun(tmp_path: Path) -> None:
    alone = build_probe_command(tmp_path / "p.yaml", 1, 8)
    assert alone[1:] == ["-m", "llmsys.launch.launchers.run_probe", str(tmp_path / "p.yaml"), "8"]
    several = build_probe_command(tmp_path / "p.yaml", 4, 2)
    assert several[1:5] == [
        "-m",
        "llmsys.launch.launchers.torchrun",
        "--nnodes=1",
        "--nproc-per-node=4",
    ]
    assert several[-4:-1] == ["-m", "llmsys.launch.launchers.run_probe", str(tmp_path / "p.yaml")]
