"""Laws of profiles: chosen steps alone are recorded, a signal asks for one, and shares are those
of the kernels.
"""

import gzip
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from llmsys.config.train import ProfileConfig
from llmsys.train.step_profiler import StepProfiler, classify_kernel, summarize_events
from llmsys.train.stop_request import PROFILE_SIGNAL

CPU = torch.device("cpu")


def run_step(profiler: StepProfiler, number: int) -> None:
    with profiler.record_step(number):
        torch.ones(256, 256) @ torch.ones(256, 256)


def list_traces(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("profile/*"))


def test_chosen_steps_of_chosen_ranks_are_recorded(tmp_path: Path) -> None:
    config = ProfileConfig(steps=(2,), ranks=(1,), memory=True)
    for rank in (0, 1):
        profiler = StepProfiler(config, tmp_path, rank, CPU)
        for number in (1, 2, 3):
            run_step(profiler, number)
            summary = profiler.pop_summary()
            assert (summary is not None) == (rank == 1 and number == 2)
            assert profiler.pop_summary() is None, "a summary is logged once"
    assert list_traces(tmp_path) == ["step-00000002-rank-1.trace.json.gz"]
    trace = json.loads(
        gzip.decompress((tmp_path / "profile" / "step-00000002-rank-1.trace.json.gz").read_bytes())
    )
    assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])
    assert any(event.get("name") == "[memory]" for event in trace["traceEvents"])


def test_a_signal_records_the_next_step_and_no_other(tmp_path: Path) -> None:
    profiler = StepProfiler(ProfileConfig(), tmp_path, 0, CPU)
    with profiler.handle_signal():
        run_step(profiler, 1)
        os.kill(os.getpid(), PROFILE_SIGNAL)
        run_step(profiler, 2)
        run_step(profiler, 3)
    assert list_traces(tmp_path) == ["step-00000002-rank-0.trace.json.gz"]


def test_shares_are_those_of_the_kernels_and_add_up(tmp_path: Path) -> None:
    profiler = StepProfiler(ProfileConfig(steps=(1,)), tmp_path, 0, CPU)
    with profiler.record_step(1):
        big = torch.ones(1500, 1500)
        for _ in range(4):
            big @ big
    summary = profiler.pop_summary()
    assert summary is not None
    assert next(iter(summary["shares"])) == "matmul"
    assert summary["kernels"][0][:2] == ["aten::mm", 4]
    assert sum(summary["shares"].values()) == pytest.approx(1)


def test_waits_of_the_host_are_no_kernels() -> None:
    """Events as a GPU gives them: kernels on the device, calls of the runtime on the host."""

    def make_event(name: str, device: DeviceType, microseconds: float) -> SimpleNamespace:
        span = SimpleNamespace(elapsed_us=lambda: microseconds)
        return SimpleNamespace(
            name=name, device_type=device, time_range=span, self_cpu_time_total=microseconds
        )

    summary = summarize_events(
        [
            make_event("nvjet_tst_128x256", DeviceType.CUDA, 3e6),
            make_event("ncclDevKernel_AllGather", DeviceType.CUDA, 1e6),
            make_event("aten::mm", DeviceType.CPU, 5e6),
            make_event("cudaStreamSynchronize", DeviceType.CPU, 2e6),
            make_event("cudaDeviceSynchronize", DeviceType.CPU, 4e6),
        ]
    )
    assert summary["shares"] == {"matmul": 0.75, "communication": 0.25}
    assert (summary["seconds"], summary["host_wait_seconds"]) == (4.0, 2.0)


def test_a_folder_that_cannot_be_written_loses_the_profile_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profile").write_text("a file where the folder belongs")
    profiler = StepProfiler(ProfileConfig(steps=(1,)), tmp_path, 0, CPU)
    run_step(profiler, 1)
    assert profiler.pop_summary() is None
    assert "the profile of step 1 was not written" in caplog.text


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matmul"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "matmul"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("ncclDevKernel_AllGather_RING_LL", "communication"),
        ("gloo:all_reduce", "communication"),
        ("_LinearCrossEntropy", "loss"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("aten::silu", "other"),
    ],
)
def test_kernels_have_the_kind_of_their_names(name: str, kind: str) -> None:
    assert classify_kernel(name) == kind


def test_steps_are_counted_from_one() -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        ProfileConfig(steps=(0,))
