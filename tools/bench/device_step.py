"""Measure the training step of a config on the accelerators of this machine: time, MFU, memory and
kernels.

    python -m tools.bench.device_step model/llama3.1-8b model.num_hidden_layers=4
    batch.sequence_length=8192 \\
        batch.sequences=2 batch.micro_sequences=1 train.precision=bf16 --kernels 20

Random tokens in documents of random lengths, as in `llmsys doctor device`. Under torchrun every
rank takes part. Where the device has a profile, `llmsys estimate`'s time of the same words is
printed next to the measured one.
"""

import argparse
import json
import time
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from llmsys.calibrate.training_steps import build_step_engine, draw_batches, run_step
from llmsys.config.loading.load import read_config
from llmsys.config.run import RunConfig
from llmsys.doctor.device_check import find_profile_name
from llmsys.estimate.device_profile import load_device_profile
from llmsys.estimate.step_time import estimate_step_time
from llmsys.parallel.device_setup import trim_allocator
from llmsys.parallel.process_group import (
    all_reduce_max,
    get_local_device,
    get_rank,
    get_world_size,
    init_process_group,
)
from llmsys.train.step_metrics import build_flops_convention

WARM_UP_STEPS = 2


def main() -> None:
    """Measure, and print one line of JSON and a table of kernels on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="shipped config, config file or model")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument(
        "--steps", type=int, default=4, help="measured steps, after two for warming up (default: 4)"
    )
    parser.add_argument(
        "--kernels", type=int, default=0, help="kernels to print with their time in one more step"
    )
    arguments = parser.parse_args()
    config = read_config(arguments.config, arguments.overrides).run
    with init_process_group():
        found, kernels = measure(config, arguments.steps, arguments.kernels)
        if get_rank() == 0:
            print(json.dumps(found))
            for name, count, milliseconds in kernels:
                print(f"{milliseconds:>10.2f} ms {count:>6} x {name[:100]}")


def measure(
    config: RunConfig, steps: int, num_kernels: int
) -> tuple[dict[str, Any], list[tuple[str, int, float]]]:
    """Train steps and compare them with the estimate. Collective.

    Args:
        config: with its precision resolved.
        steps: measured steps.
        num_kernels: rows of the table of kernels; 0 profiles nothing.

    Returns:
        Numbers of the slowest and fullest rank, and (kernel, count, milliseconds) of one step of
        this rank.
    """
    device = get_local_device()
    engine, batches = build_step_engine(config, device), draw_batches(config)
    losses, seconds = [], []
    for step in range(WARM_UP_STEPS + steps):
        if step == WARM_UP_STEPS and device.type == "cuda":
            trim_allocator(device)
            torch.cuda.reset_peak_memory_stats(device)
        began = time.perf_counter()
        losses.append(run_step(engine, batches))
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    measured = torch.tensor([median(seconds[WARM_UP_STEPS:]), peak], dtype=torch.float64)
    slowest, fullest = all_reduce_max(measured).tolist()
    found = {"step_ms": 1e3 * slowest, "peak_gib": fullest / 2**30, "losses": losses}
    found |= {
        "tokens_per_second": config.batch.tokens_per_step / slowest,
        **compare_with_estimate(config, slowest),
    }
    if not num_kernels:
        return found, []
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        run_step(engine, batches)
    return found, list_kernels(profiler, device)[:num_kernels]


def compare_with_estimate(config: RunConfig, seconds: float) -> dict[str, Any]:
    """Return MFU and the estimate's interval in milliseconds; nothing for a device without a
    profile.
    """
    name = find_profile_name()
    if name is None:
        return {}
    known, ranks = load_device_profile(name), get_world_size()
    expected = estimate_step_time(config, config.resolve_layout(ranks), known).seconds
    convention = build_flops_convention(config, known, ranks)
    return {
        "mfu": convention.compute_utilisation(config.batch.tokens_per_step / seconds),
        "estimate_ms": [1e3 * one for one in (expected.p10, expected.p50, expected.p90)],
    }


def list_kernels(profiler: profile, device: torch.device) -> list[tuple[str, int, float]]:
    """Return (name, count, milliseconds) of kernels, the longest first; on a CPU of torch's
    operators.
    """
    kind = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    rows = [
        (
            one.key,
            one.count,
            (one.self_device_time_total if kind == DeviceType.CUDA else one.self_cpu_time_total)
            / 1e3,
        )
        for one in profiler.key_averages()
        # Annotations cover the kernels that they name.
        if one.device_type == kind
        and not one.key.startswith(("FSDP::", "Optimizer.", "ProfilerStep"))
    ]
    return sorted(rows, key=lambda row: -row[2])


if __name__ == "__main__":
    main()
