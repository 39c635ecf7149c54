"""Predict memory and step time before the first step, for the comparison with the measured values.

Writes a `prediction` event, which `llmsys reconcile` reads.
"""

import os
from dataclasses import replace
from typing import Any

import torch

from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError
from llmsys.estimate.activation_memory import IN_EVALUATION, compute_micro_batch
from llmsys.estimate.device_profile import (
    MACHINE_PROFILE,
    NOT_MEASURED,
    DeviceProfile,
    load_machine_profile,
)
from llmsys.estimate.model_tensors import count_parameters
from llmsys.estimate.peak_memory import estimate_peak_memory
from llmsys.estimate.prediction_error import RESERVED, RESIDENT, format_memory_size
from llmsys.estimate.software_profile import MemoryProfile
from llmsys.estimate.state_memory import compute_state_bytes
from llmsys.estimate.step_time import estimate_step_time
from llmsys.log import get_logger
from llmsys.model.cpu_kernels import estimate_code_bytes
from llmsys.parallel.process_group import get_world_size
from llmsys.progress import format_duration
from llmsys.train.metric_logger import MetricLogger
from llmsys.train.step_metrics import read_resident_memory

log = get_logger(__name__)


def build_prediction(
    config: RunConfig, device: torch.device, profile: DeviceProfile | None, step: int = 0
) -> dict[str, Any]:
    """Return the fields of a `prediction` event. The model is built and its state loaded.

    Keys: parameters; memory.{peak_bytes, instant, kind} of a step, of which memory.process_bytes
    are those of the process without the state, and memory.evaluation_bytes;
    device, the profile's name or "unknown"; world_size; step_seconds {p10, p50, p90} with
    modelled_seconds (without the residual) and remaining_seconds of all steps from here, or null
    with why_no_time.

    A device without a profile has that of the machine's probe, where `llmsys train` made one.
    """
    profile = profile or load_machine_profile()
    layout = config.resolve_layout(get_world_size())
    on_gpu = device.type == "cuda"
    everything = estimate_peak_memory(
        config, layout, system=MemoryProfile(device="cuda" if on_gpu else "cpu")
    )
    steps = tuple(one for one in everything.instants if one.name != IN_EVALUATION)
    timeline = replace(everything, instants=steps)  # the measured peak is that of steps
    # Nothing counts tensors on a CPU, so the measured peak is that of the whole process.
    process = 0 if on_gpu else _measure_process_bytes(config, step) + _estimate_code_bytes(config)
    return {
        "parameters": count_parameters(config.model).total,
        "memory": {
            "peak_bytes": timeline.peak_bytes + process,
            "process_bytes": process,
            "instant": timeline.peak_instant,
            "evaluation_bytes": process
            + max(
                (one.bytes for one in everything.instants if one.name == IN_EVALUATION), default=0
            ),
            # Accelerators report what the allocator reserved; CPUs only the resident set.
            "kind": RESERVED if on_gpu else RESIDENT,
        },
        "device": "unknown" if profile is None else profile.name,
        "profile": config.flops.device,
        "world_size": get_world_size(),
        **_build_time_fields(config, profile, step),
    }


def _measure_process_bytes(config: RunConfig, step: int) -> int:
    """Return the resident bytes of this process without the state that it has built: libraries,
    data and the heap of what was computed so far.

    Args:
        config: resolved config of a run.
        step: step that the run is at; from the first on it has loaded the optimizer's moments.
    """
    state = compute_state_bytes(config, config.resolve_layout(get_world_size()))
    built = state.weights + state.masters + (state.moments if step else 0)
    return max(0, read_resident_memory("VmRSS") - built)


def _estimate_code_bytes(config: RunConfig) -> int:
    """Return the memory of code that products of experts generate on a CPU during the run."""
    moe, layout = config.model.moe, config.resolve_layout(get_world_size())
    if moe is None or config.train.resolved_precision != "bf16":
        return 0
    sequences, _ = compute_micro_batch(config, layout)
    tokens = sequences * config.batch.sequence_length * layout.expert
    mean_rows = tokens * moe.num_experts_per_tok / moe.num_experts
    return estimate_code_bytes(mean_rows, (config.model.hidden_size, moe.moe_intermediate_size))


def _build_time_fields(
    config: RunConfig, profile: DeviceProfile | None, step: int
) -> dict[str, Any]:
    if profile is None:
        # --no-probe, or a measurement that failed
        is_refused = os.environ.get(MACHINE_PROFILE) == NOT_MEASURED
        other = "leave out --no-probe" if is_refused else "start again on an idle machine"
        return {
            "step_seconds": None,
            "why_no_time": "the device is unknown. Measure this machine with `llmsys calibrate "
            f"--output mine.yaml` and set flops.device=mine.yaml, or {other}.",
        }
    try:
        time = estimate_step_time(config, config.resolve_layout(get_world_size()), profile)
    except ConfigError as error:  # such as a profile without links; the run needs no prediction
        return {"step_seconds": None, "why_no_time": str(error)}
    interval = time.seconds.model_dump()
    # Steps of a smaller batch take less.
    trained = config.batch.count_tokens_before(step)
    left = config.batch.count_tokens_before(config.num_steps) - trained
    steps = left / config.batch.tokens_per_step
    return {
        "step_seconds": interval,
        "modelled_seconds": time.seconds.p50 / time.factor,
        "remaining_seconds": {name: steps * seconds for name, seconds in interval.items()},
    }


def write_prediction(
    record: MetricLogger,
    step: int,
    config: RunConfig,
    device: torch.device,
    profile: DeviceProfile | None,
) -> None:
    """Write the `prediction` event and log a summary. Rank 0 alone writes."""
    if record.events is None:
        return
    found = build_prediction(config, device, profile, step)
    record.log_event("prediction", step, **found)
    memory = found["memory"]
    seconds = found["step_seconds"]
    own, kind = memory["process_bytes"], memory["kind"]
    if own:
        log.info("this process holds %s", format_memory_size(read_resident_memory("VmRSS")))
    log.info(
        "predicted: %s on the fullest rank, %s%s",
        format_memory_size(memory["peak_bytes"]),
        memory["instant"],
        f", of which {format_memory_size(own)} are the process itself" if own else f", {kind}",
    )
    if memory["evaluation_bytes"] > memory["peak_bytes"]:
        more = format_memory_size(memory["evaluation_bytes"]), config.evaluation_sequences
        log.info(
            "predicted: %s in an evaluation; lower evaluation.micro_sequences=%d if that is too "
            "much",
            *more,
        )
    if seconds is None:
        log.info("predicted: no step time, because %s", found["why_no_time"])
    else:
        interval = seconds["p50"], seconds["p10"], seconds["p90"], found["device"]
        log.info("predicted: a step takes %.3g s (%.3g to %.3g) on %s", *interval)
        left = found["remaining_seconds"]
        log.info(
            "predicted: %s (%s to %s) left for %d steps, without evaluations and saves",
            *(format_duration(left[name]) for name in ("p50", "p10", "p90")),
            config.num_steps - step,
        )
