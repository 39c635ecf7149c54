"""A probe gives the time of the step that it measured, and is kept for the machine it is of."""

import datetime
import json
from pathlib import Path

import pytest
import torch

from llmsys.calibrate import machine_probe, probe_cache
from llmsys.calibrate.machine_probe import (
    STEP_MODEL,
    find_machine_device,
    get_machine_profile,
    measure_processor,
)
from llmsys.calibrate.probe_cache import MAX_AGE_DAYS, describe_machine, get_cache_file
from llmsys.calibrate.training_steps import StepRate
from llmsys.config.loading.load import read_config
from llmsys.estimate.cluster_costs import ClusterCosts
from llmsys.estimate.device_profile import DeviceProfile, KernelEfficiency, load_device_profile
from llmsys.estimate.step_time import estimate_step_time
from llmsys.launch.main import main
from llmsys.storage.paths import parse_local_path
from llmsys.train.precision import choose_native_precision

MEASURED = DeviceProfile(
    name="two threads",
    peak_flops={"fp32": 5e10, "bf16": 6e10},
    memory_bytes=8e9,
    memory_bandwidth=1e10,
    efficiency=KernelEfficiency(
        products=0.8,
        grouped=0.5,
        attention=0.3,
        attention_backward=0.3,
        memory=0.8,
        links=1.0,
        launch_seconds=1e-6,
        host_seconds=1e-6,
    ),
    sources={"efficiency": "a test"},
)


@pytest.fixture(autouse=True)
def probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose kernels are `MEASURED` and whose step takes half a second."""
    monkeypatch.setenv("LLMSYS_CACHE", str(tmp_path))
    monkeypatch.setattr(machine_probe, "calibrate_device", lambda *_: MEASURED)
    monkeypatch.setattr(machine_probe, "measure_fastest_rate", lambda *_: StepRate(0.5, 0.01, 9))


def test_the_profile_gives_the_measured_time_of_the_measured_step() -> None:
    profile = measure_processor()
    precision = choose_native_precision(torch.device("cpu"))
    config = read_config("model/llama3.2-1b", list(STEP_MODEL)).run.resolve_precision(precision)
    step = estimate_step_time(config, config.resolve_layout(1), profile)
    assert step.seconds.p50 == pytest.approx(0.5)
    assert step.seconds.p90 > 1.15 * step.seconds.p50


def test_a_probe_is_kept_until_it_is_old_or_of_another_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = get_machine_profile()
    faster = MEASURED.model_copy(update={"memory_bandwidth": 2e10})
    monkeypatch.setattr(machine_probe, "calibrate_device", lambda *_: faster)
    assert get_machine_profile() == first
    assert get_machine_profile(renew=True).memory_bandwidth == 2e10
    file = get_cache_file()
    today = datetime.datetime.now(datetime.UTC).date()
    old = today - datetime.timedelta(days=MAX_AGE_DAYS + 1)
    file.write_text(file.read_text().replace(today.isoformat(), old.isoformat()))
    monkeypatch.setattr(machine_probe, "calibrate_device", lambda *_: MEASURED)
    assert get_machine_profile().memory_bandwidth == 1e10
    monkeypatch.setattr(probe_cache, "_read_processor_name", lambda: "another")
    assert not get_cache_file().exists()


def test_a_file_that_is_no_probe_is_measured_again() -> None:
    get_cache_file().write_text("name: [")
    assert get_machine_profile().sources["machine"] == describe_machine()
    assert load_device_profile(str(get_cache_file())).residual["dense"].runs


def test_this_machine_is_a_device_of_estimate_and_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    device, count = find_machine_device()
    assert (parse_local_path(device), count) == (get_cache_file(), 1)
    assert main(["estimate", "train/decoder-tiny", "--my-machine", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["time"]["ranks"] == 1
    assert main(["plan", "train/decoder-tiny", "--my-machine", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["device"] == "two threads"
    # Nobody rents their own machine.
    assert planned["run"]["price_per_hour"] == 0
    # a named device wins
    named = ["--my-machine", "device=h100-sxm", "gpus=1"]
    assert main(["plan", "train/decoder-tiny", *named, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["device"] == "H100 SXM 80GB"
    assert planned["run"]["price_per_hour"] == ClusterCosts().price_per_hour
    assert main(["plan", "train/decoder-tiny", *named]) == 0
    assert "at 2.5 USD an hour for each device" in capsys.readouterr().out
