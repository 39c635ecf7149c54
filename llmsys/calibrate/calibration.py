"""Turn measurements into a device profile: `llmsys calibrate` on one process or several.

Invariants:
- Every number is measured here or given by the user: the power limit, and with `base` the peak,
  memory and interconnect of an existing profile of the same device.
- Other fields stay empty, and the estimate rejects by name what would need them.
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import psutil
import torch
import torch.distributed as dist

from llmsys.calibrate.benchmarks import (
    LARGE,
    SMALL,
    BenchmarkSizes,
    KernelMeasurements,
    fit_interconnect,
    measure_attention_rates,
    measure_bandwidths,
    measure_grouped_matmul_rate,
    measure_host_bandwidth,
    measure_launch_seconds,
    measure_link_seconds,
    measure_matmuls,
)
from llmsys.estimate.device_profile import DeviceProfile, Interconnect, KernelEfficiency, Number
from llmsys.parallel.rendezvous import bind_rendezvous
from llmsys.progress import Progress

HERE = "measured here by llmsys calibrate"


def calibrate_device(
    sizes: BenchmarkSizes,
    device: torch.device,
    *,
    watts: float | None = None,
    base: DeviceProfile | None = None,
) -> DeviceProfile:
    """Measure this process's device, and the links between processes where there are several.

    Args:
        sizes: Shapes and repetitions.
        device: The device.
        watts: Power of the device; None reads its driver.
        base: Profile from which what cannot be measured is copied.

    Returns:
        The profile.
    """
    with Progress("calibrate", len(sizes.dtypes) + 5, "measurement") as progress:
        measured = _measure_kernels(sizes, device, progress)
        link = _measure_interconnect(sizes, device)
        progress.advance()
    return build_device_profile(measured, link, device, watts=watts, base=base)


def build_device_profile(
    measured: KernelMeasurements,
    link: Interconnect | None,
    device: torch.device,
    *,
    watts: float | None = None,
    base: DeviceProfile | None = None,
) -> DeviceProfile:
    """Build the profile of a device from its measurements.

    Args:
        measured: Rates and seconds of kernels.
        link: Bandwidth and latency between processes; None with one process.
        device: The device.
        watts: Power of the device; None: unknown, so there is no energy.
        base: Profile from which peak, memory and interconnect are copied; None: nothing is
            copied.

    Returns:
        The profile.
    """
    bandwidth = max(measured.copy_bandwidth, measured.elementwise_bandwidth)
    if base is not None:
        bandwidth = base.memory_bandwidth
    rates = {
        number: _compute_rates(rows, bandwidth, measured.launch_seconds)
        for number, rows in measured.matmuls.items()
    }
    main = find_main_number(measured.matmuls)
    best = _compute_best_rate(measured.matmuls[main])
    products = _compute_share(median(rates[main]), best)
    # One efficiency serves all number types: their peaks are such that it gives the rate that was
    # seen.
    peaks = {number: median(found) / products for number, found in rates.items()} | {main: best}
    if base is not None:
        peaks |= base.peak_flops
        products = _compute_share(median(rates[main]), peaks[main])
    elementwise = max(measured.elementwise_bandwidth, measured.copy_bandwidth)
    return DeviceProfile(
        name=get_device_name(device),
        peak_flops=peaks,
        memory_bytes=float(base.memory_bytes if base else get_device_memory(device)),
        memory_bandwidth=bandwidth,
        node_devices=base.node_devices if base else _count_ranks(),
        node=link or (base.node if base else None),
        network=base.network if base else None,
        host_bandwidth=measured.host_bandwidth,
        watts=watts or read_power_limit(device) or (base.watts if base else None),
        efficiency=KernelEfficiency(
            products=products,
            products_fp8=base.efficiency.products_fp8 if base else 1.0,
            grouped=_compute_share(measured.grouped_rate, peaks[main]),
            attention=_compute_share(measured.attention_rate, peaks[main]),
            attention_backward=_compute_share(measured.attention_backward_rate, peaks[main]),
            memory=_compute_share(
                elementwise if base else measured.elementwise_bandwidth, bandwidth
            ),
            links=1.0 if link or base is None else base.efficiency.links,
            launch_seconds=measured.launch_seconds,
            host_seconds=measured.host_seconds,
        ),
        sources=dict(_iter_sources(link, watts, base)),
    )


def _measure_kernels(
    sizes: BenchmarkSizes, device: torch.device, progress: Progress
) -> KernelMeasurements:
    products: dict[Number, list[tuple[float, float, float]]] = {}
    for number in sizes.dtypes:
        products[number] = list(measure_matmuls(sizes, number, device))
        progress.advance(products=number)
    main = find_main_number(products)
    grouped = measure_grouped_matmul_rate(sizes, main, device)
    progress.advance(done="experts")
    forward, backward = measure_attention_rates(sizes, main, device)
    progress.advance(done="attention")
    copied, summed = measure_bandwidths(sizes, device)
    host_bytes = measure_host_bandwidth(sizes, device)
    progress.advance(done="memory")
    launch, host = measure_launch_seconds(device)
    progress.advance(done="starts")
    return KernelMeasurements(
        products, grouped, forward, backward, copied, summed, host_bytes, launch, host
    )


def find_main_number(matmuls: Mapping[Number, Sequence[tuple[float, float, float]]]) -> Number:
    """Find the dtype that rates of attention and experts are measured in: of bf16 and fp32 the one
    with the faster products. A processor without instructions for bf16 takes ten times as long for
    it, and trains in fp32.

    Args:
        matmuls: FLOPs, bytes and seconds of measured products by dtype.

    Returns:
        "bf16" or "fp32".
    """
    numbers: tuple[Number, ...] = ("bf16", "fp32")
    return max(
        (one for one in numbers if one in matmuls), key=lambda one: _compute_best_rate(matmuls[one])
    )


def _compute_best_rate(rows: Sequence[tuple[float, float, float]]) -> float:
    return max(operations / seconds for operations, _, seconds in rows)


def _compute_rates(
    rows: list[tuple[float, float, float]], bandwidth: float, launch: float
) -> list[float]:
    """Return FLOP/s of each matmul, after subtracting the time of its launch and of its bytes.

    At most three tenths are subtracted, because bytes that stay in caches never go through memory.
    """
    return [
        operations / max(seconds - moved / bandwidth - launch, 0.7 * seconds)
        for operations, moved, seconds in rows
    ]


def _compute_share(rate: float, peak: float) -> float:
    return min(1.0, rate / peak)


def _measure_interconnect(sizes: BenchmarkSizes, device: torch.device) -> Interconnect | None:
    if _count_ranks() == 1:
        return None
    return fit_interconnect(measure_link_seconds(sizes.gathered_bytes, device))


def _count_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def get_device_name(device: torch.device) -> str:
    """Return the name of a device.

    Args:
        device: The device.

    Returns:
        The name that its driver, or for a CPU the operating system, reports.
    """
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{torch.get_num_threads()} threads of {platform.processor() or platform.machine()}"


def get_device_memory(device: torch.device) -> int:
    """Return the memory of a device.

    Args:
        device: The device.

    Returns:
        Bytes that a program can allocate.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return int(psutil.virtual_memory().total)


def read_power_limit(device: torch.device) -> float | None:
    """Read the power limit of a device from its driver.

    Args:
        device: The device.

    Returns:
        Watts; None where it reports none.
    """
    tool = shutil.which("nvidia-smi")
    if device.type != "cuda" or tool is None:
        return None
    asked = [
        tool,
        f"--id={device.index or 0}",
        "--query-gpu=power.limit",
        "--format=csv,noheader,nounits",
    ]
    said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return float(said) if said.replace(".", "", 1).isdigit() else None


def _iter_sources(
    link: Interconnect | None, watts: float | None, base: DeviceProfile | None
) -> Iterator[tuple[str, str]]:
    yield "efficiency", HERE
    board = HERE if base is None else f"the board's own figures, from the profile {base.name}"
    yield from ((name, board) for name in ("peak_flops", "memory_bandwidth", "memory_bytes"))
    yield "node", HERE if link else "not measured: one process" if base is None else board
    yield "watts", "given by hand" if watts else "the driver's power limit, if it reports one"


def measure_machine(
    *,
    sizes: BenchmarkSizes | None = None,
    watts: float | None = None,
    base: DeviceProfile | None = None,
) -> DeviceProfile | None:
    """Measure this machine. Collective where the environment names a process group, which it joins.

    Args:
        sizes: Shapes to measure. Default: by the kind of device.
        watts: Power limit of one device, in watts. Default: from its driver.
        base: Profile of the same device, whose peak, memory and interconnect are copied.

    Returns:
        The profile; None on ranks other than 0.
    """
    device = _choose_device()
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    if several:
        bind_rendezvous()
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        found = calibrate_device(
            sizes or (LARGE if device.type == "cuda" else SMALL), device, watts=watts, base=base
        )
        return found if not dist.is_initialized() or dist.get_rank() == 0 else None
    finally:
        if several:
            dist.destroy_process_group()


def _choose_device() -> torch.device:
    """Return this rank's accelerator, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
