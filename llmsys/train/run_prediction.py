"""Predict memory and step time before the first step, for the comparison with the measured values.

Writes a `prediction` event, which `llmsys reconcile` reads.
"""

from dataclasses import replace
from typing import Any

import torch

from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError
from llmsys.estimate.activation_memory import IN_EVALUATION
from llmsys.estimate.device_profile import DeviceProfile
from llmsys.estimate.model_tensors import count_parameters
from llmsys.estimate.peak_memory import estimate_peak_memory
from llmsys.estimate.prediction_error import format_memory_size
from llmsys.estimate.software_profile import MemoryProfile
from llmsys.estimate.step_time import estimate_step_time
from llmsys.log import get_logger
from llmsys.parallel.process_group import get_world_size
from llmsys.train.metric_logger import MetricLogger

log = get_logger(__name__)


def build_prediction(
    config: RunConfig, device: torch.device, profile: DeviceProfile | None
) -> dict[str, Any]:
    """Return the fields of a `prediction` event.

    Keys: parameters; memory.{peak_bytes, instant, kind} of a step and memory.evaluation_bytes;
    device, the profile's name or "unknown"; world_size; step_seconds {p10, p50, p90} with
    modelled_seconds (without the residual), or null with why_no_time.
    """
    layout = config.resolve_layout(get_world_size())
    on_gpu = device.type == "cuda"
    everything = estimate_peak_memory(
        config, layout, system=MemoryProfile(device="cuda" if on_gpu else "cpu")
    )
    steps = tuple(one for one in everything.instants if one.name != IN_EVALUATION)
    timeline = replace(everything, instants=steps)  # the measured peak is that of steps
    return {
        "parameters": count_parameters(config.model).total,
        "memory": {
            "peak_bytes": timeline.peak_bytes,
            "instant": timeline.peak_instant,
            "evaluation_bytes": max(
                (one.bytes for one in everything.instants if one.name == IN_EVALUATION), default=0
            ),
            # Accelerators report what the allocator reserved; CPUs only the resident set.
            "kind": "reserved by the allocator" if on_gpu else "resident, above the start",
        },
        "device": "unknown" if profile is None else profile.name,
        "profile": config.flops.device,
        "world_size": get_world_size(),
        **_build_time_fields(config, profile),
    }


def _build_time_fields(config: RunConfig, profile: DeviceProfile | None) -> dict[str, Any]:
    if profile is None:
        return {
            "step_seconds": None,
            "why_no_time": "the device is unknown. Measure this machine with `llmsys calibrate "
            "--output mine.yaml` and set flops.device=mine.yaml.",
        }
    try:
        time = estimate_step_time(config, config.resolve_layout(get_world_size()), profile)
    except ConfigError as error:  # such as a profile without links; the run needs no prediction
        return {"step_seconds": None, "why_no_time": str(error)}
    return {
        "step_seconds": time.seconds.model_dump(),
        "modelled_seconds": time.seconds.p50 / time.factor,
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
    found = build_prediction(config, device, profile)
    record.log_event("prediction", step, **found)
    memory = found["memory"]
    seconds = found["step_seconds"]
    log.info(
        "predicted: %s on the fullest rank, %s",
        format_memory_size(memory["peak_bytes"]),
        memory["instant"],
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
