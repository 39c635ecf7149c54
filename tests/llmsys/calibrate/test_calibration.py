"""A machine is measured into a profile that the estimate reads, and nothing in it comes from
another device.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from llmsys.calibrate.benchmarks import BenchmarkSizes, KernelMeasurements, fit_interconnect
from llmsys.calibrate.calibration import build_device_profile, measure_machine
from llmsys.config.loading.yaml_files import dump_yaml
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError
from llmsys.estimate.device_profile import DeviceProfile, Number, load_device_profile
from llmsys.estimate.step_time import estimate_step_time
from llmsys.launch.main import main
from tests.helpers.ranks import run_ranks

TINY = BenchmarkSizes(
    matmul_shapes=((64, 32, 64), (128, 64, 64)),
    grouped_matmul_shapes=(2, 32, 32, 32),
    attention=(1, 2, 32, 16),
    memory_elements=1 << 12,
    gathered_bytes=(1 << 12, 1 << 16),
    dtypes=("fp32", "bf16"),
    budget_seconds=0.01,
)
CPU = torch.device("cpu")
Rows = dict[Number, list[tuple[float, float, float]]]


def measured(products: Rows) -> KernelMeasurements:
    """A machine that was seen at 50 GB/s and half of its products' rate in attention."""
    return KernelMeasurements(products, 4e9, 5e9, 5e9, 50e9, 40e9, 20e9, 0.0, 0.0)


def test_a_measured_profile_prices_a_step_after_a_round_trip(tmp_path: Path) -> None:
    device = measure_machine(sizes=TINY, watts=50)
    assert device is not None
    (tmp_path / "mine.yaml").write_text(dump_yaml(device.model_dump(mode="json")))
    assert load_device_profile(str(tmp_path / "mine.yaml")) == device
    assert estimate_step_time(RunConfig(), ParallelLayout(shard=1), device).seconds.p50 > 0


def test_one_process_measures_no_links_and_layouts_that_need_them_are_refused() -> None:
    device = measure_machine(sizes=TINY)
    assert device is not None
    assert (device.node, device.network, device.watts) == (None, None, None)
    with pytest.raises(
        ConfigError,
        match=r"has no node link, but this layout communicates between devices of one machine",
    ):
        estimate_step_time(RunConfig(), ParallelLayout(shard=1, replicate=1, tensor=1, context=2),
            device.model_copy(
            update={"node_devices": 8}))  # fmt: skip


def test_peak_and_efficiency_give_back_the_rates_that_were_seen() -> None:
    rows: Rows = {
        "fp32": [(1e9, 0.0, 1.0), (4e9, 0.0, 2.0)],
        "bf16": [(6e9, 0.0, 1.0), (8e9, 0.0, 1.0), (10e9, 0.0, 1.0)],
    }
    device = build_device_profile(measured(rows), None, CPU)
    assert device.get_peak_flops("bf16") == 10e9
    assert device.get_peak_flops("bf16") * device.efficiency.products == pytest.approx(8e9)
    assert device.get_peak_flops("fp32") * device.efficiency.products == pytest.approx(1.5e9)
    assert device.get_peak_flops("bf16") * device.efficiency.attention == pytest.approx(5e9)
    assert device.memory_bandwidth * device.efficiency.memory == pytest.approx(40e9)


def test_rates_are_of_fp32_where_bf16_is_emulated() -> None:
    rows: Rows = {"fp32": [(8e9, 0.0, 1.0), (10e9, 0.0, 1.0)], "bf16": [(1e9, 0.0, 1.0)]}
    device = build_device_profile(measured(rows), None, CPU)
    assert device.get_peak_flops("fp32") == 10e9
    assert device.get_peak_flops("fp32") * device.efficiency.attention == pytest.approx(5e9)
    assert device.get_peak_flops("bf16") * device.efficiency.products == pytest.approx(1e9)


def test_a_base_gives_the_boards_own_figures_and_no_efficiency() -> None:
    base = load_device_profile("a100-80gb")
    device = build_device_profile(measured({"bf16": [(156e12, 0.0, 1.0)]}), None, CPU, base=base)
    assert (device.peak_flops, device.network, device.watts) == (
        base.peak_flops,
        base.network,
        base.watts,
    )
    assert device.efficiency.products == pytest.approx(0.5)
    assert "A100" in device.sources["peak_flops"]
    assert "measured here" in device.sources["efficiency"]


def test_links_are_the_largest_transfers_and_what_is_left_of_the_smallest() -> None:
    rows = [(sent, hops, hops * 1e-3 + sent / 1e9) for sent in (1e3, 1e12) for hops in (1.0, 3.0)]
    link = fit_interconnect(rows)
    assert link.bandwidth == pytest.approx(1e9, rel=1e-3)
    assert link.latency_seconds == pytest.approx(1e-3, rel=1e-3)


def _on_two(rank: int) -> DeviceProfile | None:
    return measure_machine(sizes=TINY) if dist.is_initialized() else None


@pytest.mark.distributed
def test_two_processes_measure_their_link_and_one_of_them_writes() -> None:
    first, second = run_ranks(_on_two, 2)
    assert second is None
    assert first.node_devices == 2
    assert first.node.bandwidth > 0


def test_calibrate_refuses_what_it_cannot_write_or_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "--output", str(tmp_path / "none" / "mine.yaml")]) == 2
    assert "is not a folder. Make it, or choose another --output." in capsys.readouterr().err
    assert main(["calibrate", "--processes", "0"]) == 2
    assert "--processes 0 is not a number of processes. Use 1 or more." in capsys.readouterr().err
    assert main(["calibrate", "--base", "a101", "--output", str(tmp_path / "mine.yaml")]) == 2
    assert "'a101' has no device profile" in capsys.readouterr().err
