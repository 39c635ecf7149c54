"""What steps cost: of the slowest and fullest rank, with no reduction on a step that is not
logged.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmsys.config.loading.load import load_run_config
from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError
from llmsys.estimate.activation_memory import IN_EVALUATION
from llmsys.estimate.device_profile import (
    MACHINE_PROFILE,
    NOT_MEASURED,
    find_device_by_driver_name,
    list_device_names,
    load_device_profile,
)
from llmsys.estimate.flops import count_flops
from llmsys.estimate.peak_memory import estimate_peak_memory
from llmsys.estimate.software_profile import MemoryProfile
from llmsys.estimate.state_memory import compute_state_bytes
from llmsys.estimate.step_time import estimate_step_time
from llmsys.train import run_prediction, step_metrics
from llmsys.train.run_prediction import build_prediction
from llmsys.train.step_metrics import (
    PEAK_RESET,
    StepMeter,
    build_flops_convention,
    build_step_meter,
    find_device_profile,
    read_peak_memory,
    reset_peak_memory,
)
from tests.helpers.device_profile import NAME, build_abacus, write_abacus
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")


def load_config(*words: str) -> RunConfig:
    return load_run_config("train/demo", ["layout.expert=1", "train.precision=bf16", *words])


def test_an_accelerator_finds_its_own_profile_and_no_other() -> None:
    assert find_device_by_driver_name("NVIDIA H200") == load_device_profile("h200")
    assert find_device_by_driver_name("NVIDIA H20") is None
    names = [
        name for file in list_device_names() for name in load_device_profile(file).driver_names
    ]
    assert len(names) == len(set(names))


def test_utilisation_names_convention_device_and_number_type(tmp_path: Path) -> None:
    one = load_config(
        f"flops.device={write_abacus(tmp_path / 'mine.yaml')}", "flops.convention=full"
    )
    found = build_flops_convention(one, find_device_profile(one, CPU), ranks=2)
    length = one.batch.sequence_length
    assert str(found) == f"full, {NAME}, bf16"
    counted = count_flops(one.model, length, 3, "full").forward_backward
    assert found.compute_utilisation(3 * length) == pytest.approx(
        counted / (2 * build_abacus().get_peak_flops("bf16"))
    )


def test_an_unknown_device_has_no_utilisation_and_says_how_to_get_one() -> None:
    assert find_device_profile(load_config(), CPU) is None
    found = build_flops_convention(load_config(), None, ranks=1)
    assert found.compute_utilisation(1e6) is None
    assert str(found) == "causal, unknown device, bf16"
    told = build_prediction(load_config(), CPU, None)
    assert told["step_seconds"] is None
    assert "set flops.device=mine.yaml" in told["why_no_time"]
    with pytest.raises(ConfigError, match="'h201' has no device profile"):
        find_device_profile(load_config("flops.device=h201"), CPU)


@pytest.mark.parametrize(
    ("measured", "advice"),
    [(NOT_MEASURED, "leave out --no-probe"), (None, "start again on an idle machine")],
    ids=["refused", "failed"],
)
def test_a_run_without_a_time_is_told_what_it_can_do(
    measured: str | None, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(MACHINE_PROFILE, raising=False)
    if measured is not None:
        monkeypatch.setenv(MACHINE_PROFILE, measured)
    assert build_prediction(load_config(), CPU, None)["why_no_time"].endswith(f"or {advice}.")


def test_a_forecast_is_the_estimate_and_a_gap_in_a_profile_is_said(tmp_path: Path) -> None:
    told = build_prediction(load_config(), CPU, build_abacus())
    assert told["step_seconds"]["p10"] < told["step_seconds"]["p50"] < told["step_seconds"]["p90"]
    memory = told["memory"]
    assert memory["peak_bytes"] - memory["process_bytes"] > 4 * told["parameters"]
    gap = build_prediction(
        load_config("train.precision=fp32"), CPU, build_abacus(peak_flops={"bf16": 1e9})
    )
    assert gap["step_seconds"] is None
    assert "no peak for fp32" in gap["why_no_time"]


def test_a_forecast_on_a_cpu_has_the_process_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    resident, config = 700 << 20, load_config()
    monkeypatch.setattr(run_prediction, "read_resident_memory", lambda name: resident)
    fresh, resumed = (build_prediction(config, CPU, None, step)["memory"] for step in (0, 7))
    state = compute_state_bytes(config, config.resolve_layout(1))
    # oneDNN's code for 4 × 512 rows in steps of 32, of three products, as both widths are 256
    code = 64 * 3 * 650_000
    assert fresh["process_bytes"] == resident - state.weights - state.masters + code
    # a checkpoint brings the moments of the optimizer, which the tensors' peak has too
    assert fresh["process_bytes"] - resumed["process_bytes"] == state.moments
    tensors = estimate_peak_memory(config, config.resolve_layout(1), system=MemoryProfile("cpu"))
    steps = max(one.bytes for one in tensors.instants if one.name != IN_EVALUATION)
    assert fresh["peak_bytes"] == steps + fresh["process_bytes"]
    monkeypatch.setattr(run_prediction, "read_resident_memory", lambda name: 1)
    assert build_prediction(config, CPU, None)["memory"]["process_bytes"] == code
    exact = load_config("train.precision=fp32")
    assert build_prediction(exact, CPU, None)["memory"]["process_bytes"] == 0


def test_a_run_predicts_its_remaining_time_by_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config()
    assert build_prediction(config, torch.device("cpu"), None)["step_seconds"] is None
    monkeypatch.setenv(MACHINE_PROFILE, str(write_abacus(tmp_path / "probe.yaml")))
    told = build_prediction(config, torch.device("cpu"), None)
    assert told["device"] == NAME
    step = estimate_step_time(config, config.resolve_layout(1), build_abacus()).seconds
    assert told["step_seconds"]["p50"] == pytest.approx(step.p50)
    # 850,000 tokens in steps of 4 sequences of 512
    assert told["remaining_seconds"]["p90"] == pytest.approx(416 * step.p90)
    later = build_prediction(config, torch.device("cpu"), None, 400)
    assert later["remaining_seconds"]["p50"] == pytest.approx(16 * step.p50)
    # a named device wins
    other = build_abacus(memory_bandwidth=1.0)
    assert build_prediction(config, torch.device("cpu"), other)["step_seconds"]["p50"] > step.p50


def build_meter(monkeypatch: pytest.MonkeyPatch, peaks: list[int], *words: str) -> StepMeter:
    remaining = iter(peaks)
    monkeypatch.setattr(step_metrics, "read_resident_memory", lambda name: 100)
    monkeypatch.setattr(step_metrics, "read_peak_memory", lambda device: (next(remaining), 0))
    return build_step_meter(load_config(*words), CPU, None)


def test_peaks_of_evaluation_are_not_a_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    one = build_meter(monkeypatch, [130, 150, 990])
    assert one.compute_run_metrics() == {}
    for number, seconds in enumerate((9.0, 2.0, 3.0, 4.0), start=1):
        one.record_step(number, seconds)
        if number == 2:
            one.mark_other_work()
    # the first step warms up
    assert one.compute_run_metrics() == {"step_seconds": 3.0, "steps": 4, "peak_bytes": 150}


@pytest.mark.skipif(not PEAK_RESET.exists(), reason="only Linux begins a peak anew")
def test_the_peak_of_steps_has_nothing_of_what_came_before_them() -> None:
    initial_values = torch.ones(1 << 25)  # 128 MiB, as a checkpoint that is read
    before, _ = read_peak_memory(CPU)
    del initial_values
    reset_peak_memory(CPU)
    after, _ = read_peak_memory(CPU)
    assert before - after > 100 << 20


def test_a_run_goes_on_where_its_peak_cannot_begin_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # A folder is written by nobody, root included.
    monkeypatch.setattr(step_metrics, "PEAK_RESET", tmp_path)
    reset_peak_memory(CPU)
    assert "the measured peak of memory has what building the model" in caplog.text


def test_steps_of_a_growing_batch_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    one = build_meter(
        monkeypatch, [100] * 99, "batch.ramp={start_tokens: 1024, ramp_tokens: 16384}"
    )
    small = [
        number
        for number in range(1, 60)
        if one.config.batch.get_step_tokens(number - 1) < one.config.batch.tokens_per_step
    ]
    assert small
    for number in small:
        one.record_step(number, 0.1)
    assert one.compute_run_metrics() == {}
    one.record_step(small[-1] + 1, 1.0)
    assert one.compute_run_metrics()["step_seconds"] == 1.0


def on_rank(rank: int) -> dict[str, Any]:
    calls: list[Any] = []
    plain = dist.all_reduce
    dist.all_reduce = lambda *words, **more: (calls.append(words), plain(*words, **more))[1]
    one = build_step_meter(load_config(), CPU, build_abacus())
    for number, seconds in enumerate((9.0, 1.0 + rank, 2.0 - rank, 1.5 + rank), start=1):
        one.record_step(number, seconds)
    unlogged = len(calls)
    fields = one.compute_step_metrics(tokens=100, seconds=1.0 + rank, wait=0.5 - 0.5 * rank)
    return {
        "unlogged": unlogged,
        "logged": len(calls),
        "fields": fields,
        "measured": one.compute_run_metrics(),
    }


@pytest.mark.distributed
def test_the_slowest_and_fullest_rank_is_told_in_one_reduction() -> None:
    first, second = run_ranks(on_rank, 2)
    assert first == second
    assert (first["unlogged"], first["logged"]) == (0, 1)
    fields = first["fields"]
    assert (fields["seconds"], fields["data_wait_seconds"], fields["tokens_per_second"]) == (
        2.0,
        0.5,
        50.0,
    )
    assert fields["memory_bytes"] > 2**20
    assert first["measured"]["step_seconds"] == 2.0  # medians 1.5 and 2
    assert fields["utilisation"] == pytest.approx(
        build_flops_convention(load_config(), build_abacus(), 2).compute_utilisation(50.0)
    )
