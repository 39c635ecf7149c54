"""Probe this machine as a run uses it, with its processes and threads, in about ten seconds.

Every process measures its kernels while the others do, so that cores, caches and memory are
shared as in the run, then the links between them, and at last training steps of a small dense
model and of small experts, which fit the residuals of the profile.
"""

import datetime
import time
from dataclasses import replace
from pathlib import Path

import torch

from llmsys.calibrate.benchmarks import BenchmarkSizes
from llmsys.calibrate.calibration import calibrate_device
from llmsys.calibrate.machine_probe import QUICK, SIZE_SPREAD, STEP_MODEL
from llmsys.calibrate.probe_cache import BUSY, describe_machine
from llmsys.calibrate.training_steps import StepRate, measure_step_rate
from llmsys.config.loading.load import read_config
from llmsys.config.run import RunConfig
from llmsys.estimate.device_profile import DeviceProfile, ModelClass, RunResidual
from llmsys.estimate.step_time import estimate_step_time
from llmsys.parallel.process_group import (
    all_reduce_max,
    get_local_device,
    get_rank,
    get_world_size,
    init_process_group,
)
from llmsys.train.precision import choose_native_precision

# A message of a small model's gradients too: latency and bandwidth are told apart by two sizes.
QUICK_PROCESSOR = replace(QUICK, gathered_bytes=(1 << 16, 1 << 21), budget_seconds=0.15)
QUICK_ACCELERATOR = BenchmarkSizes(
    matmul_shapes=((4096, 1024, 4096), (8192, 4096, 4096), (8192, 4096, 14336)),
    grouped_matmul_shapes=(16, 1024, 2048, 1024),
    attention=(2, 16, 2048, 128),
    memory_elements=1 << 26,
    gathered_bytes=(1 << 20, 1 << 26),
    dtypes=("bf16", "fp16", "fp32"),
    budget_seconds=0.1,
)
# Fewer rows than processes are no batch; each process has one micro-batch of this many.
ROWS = 4
STEP_EXPERTS = (
    "model.hidden_size=192",
    "model.num_hidden_layers=3",
    "model.num_attention_heads=3",
    "model.num_key_value_heads=3",
    "model.vocab_size=4096",
    "model.moe.moe_intermediate_size=192",
    "batch.sequence_length=256",
)
# What an accelerator computes longer than its host needs to launch it.
ACCELERATOR_SIZES = (
    "model.hidden_size=2048",
    "model.num_attention_heads=16",
    "model.num_key_value_heads=16",
    "model.head_dim=128",
    "batch.sequence_length=2048",
)
STEP_SECONDS = 1.5
# Share of the time that a process may wait for a core. Beside other work it waits for more than
# half of it, and a step takes several times as long.
MAX_WAIT_SHARE = 0.1
SCHEDULE = Path("/proc/self/schedstat")


def measure_run_machine(threads: int) -> DeviceProfile | None:
    """Measure this machine with the processes of the launcher's group. Collective; joins the group.

    Args:
        threads: CPU threads of each process.

    Returns:
        The profile of one process's device; None on ranks other than 0.
    """
    torch.set_num_threads(threads)
    device = get_local_device()
    is_processor = device.type == "cpu"
    with init_process_group():
        began, waited = time.monotonic(), read_wait_seconds()
        sizes = QUICK_PROCESSOR if is_processor else QUICK_ACCELERATOR
        measured = calibrate_device(sizes, device)
        rates = {
            kind: (config, measure_step_rate(config, STEP_SECONDS))
            for kind, config in _build_step_configs(threads, is_processor=is_processor).items()
        }
        share = (read_wait_seconds() - waited) / (time.monotonic() - began)
        longest = float(all_reduce_max(torch.tensor(share, dtype=torch.float64, device=device)))
        ranks, rank = get_world_size(), get_rank()
    if rank:
        return None
    shared = measured.memory_bytes / ranks if is_processor else measured.memory_bytes
    profile = measured.model_copy(update={"memory_bytes": shared})
    precision = choose_native_precision(device)
    residuals: dict[ModelClass, RunResidual] = {
        kind: _fit_residual(config.resolve_precision(precision), rate, profile, ranks)
        for kind, (config, rate) in rates.items()
    }
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    found = {
        "probed": today,
        "machine": describe_machine(),
        "residual": f"training steps of a small decoder and of small experts on {ranks} "
        f"process{'es' if ranks > 1 else ''} of {threads} threads",
    }
    if longest > MAX_WAIT_SHARE:
        found[BUSY] = f"a process waited for a core for {longest:.0%} of the time"
    return profile.model_copy(update={"residual": residuals, "sources": profile.sources | found})


def read_wait_seconds() -> float:
    """Return how long this process has been ready to run and had no core.

    Returns:
        Seconds of its first thread, by Linux's second number of schedstat; 0 where the system
        does not count it.
    """
    if not SCHEDULE.exists():
        return 0.0
    return int(SCHEDULE.read_text().split()[1]) / 1e9


def _build_step_configs(threads: int, *, is_processor: bool) -> dict[ModelClass, RunConfig]:
    """Return the runs whose steps are measured, by class of model."""
    ranks = get_world_size()
    # auto keeps whole weights where experts are not divided, as these are
    engine = "plain" if ranks == 1 else "fsdp"
    shared = (
        f"batch.sequences={ROWS * ranks}",
        f"engine.data_parallel={engine}",
        f"train.threads_per_process={threads}",
    )
    larger = () if is_processor else ACCELERATOR_SIZES
    dense = [*(one for one in STEP_MODEL if not one.startswith(("batch.sequences", "engine.")))]
    return {
        "dense": read_config("model/llama3.2-1b", [*dense, *larger, *shared]).run,
        "moe": read_config("model/demo-moe", [*STEP_EXPERTS, *larger, *shared]).run,
    }


def _fit_residual(
    config: RunConfig, rate: StepRate, profile: DeviceProfile, ranks: int
) -> RunResidual:
    """Return the residual with which the profile gives the measured time of a step."""
    modelled = estimate_step_time(config, config.resolve_layout(ranks), profile)
    ratio = rate.seconds * modelled.factor / modelled.seconds.p50
    return RunResidual(
        factor=ratio, spread=max(SIZE_SPREAD, rate.spread), runs={"the probe's step": ratio}
    )
