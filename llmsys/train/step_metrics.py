"""Measure steps: seconds, tokens per second, utilisation, memory and data stall; the medians of a
run at its end.

Invariants:
- Numbers are those of the slowest or fullest rank, from one small reduction on logged steps and
  none on others.
- Utilisation is a share of a described device's peak; of an unknown device it is None.
"""

import resource
import sys
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from llmsys.config.run import RunConfig
from llmsys.estimate.device_profile import (
    DeviceProfile,
    find_device_by_driver_name,
    load_device_profile,
)
from llmsys.estimate.flops import count_flops
from llmsys.estimate.prediction_error import format_memory_size
from llmsys.log import get_logger
from llmsys.parallel.process_group import all_reduce_max, get_world_size

log = get_logger(__name__)

UNKNOWN = "unknown device"
PEAK_RESET = Path("/proc/self/clear_refs")


def find_device_profile(config: RunConfig, device: torch.device) -> DeviceProfile | None:
    """Find the profile of the device that this rank runs on.

    Args:
        config: `flops.device` names one.
        device: Device of this rank.

    Returns:
        The profile of `flops.device`, else the one whose driver name matches this accelerator,
        else None.

    Raises:
        ConfigError: `flops.device` names no profile.
    """
    if config.flops.device is not None:
        return load_device_profile(config.flops.device)
    return (
        find_device_by_driver_name(torch.cuda.get_device_name(device))
        if device.type == "cuda"
        else None
    )


@dataclass(frozen=True)
class FlopsConvention:
    """Operations per token by a named convention, and the peak of all ranks.

    A window counts as one document, so packed short documents make `causal` an upper bound.
    """

    convention: str
    device: str
    precision: str
    flops_per_token: float
    peak_flops: float | None

    def compute_utilisation(self, tokens_per_second: float) -> float | None:
        """Return the model's operations as a share of the peak; None where the peak is unknown.

        Args:
            tokens_per_second: tokens of all ranks together.
        """
        return (
            None
            if self.peak_flops is None
            else tokens_per_second * self.flops_per_token / self.peak_flops
        )

    def __str__(self) -> str:
        """Return convention, device and dtype."""
        return f"{self.convention}, {self.device}, {self.precision}"


def build_flops_convention(
    config: RunConfig, profile: DeviceProfile | None, ranks: int
) -> FlopsConvention:
    """Return the convention of a run, without a peak where the device is unknown or every step has
    other lengths.

    Args:
        config: the config with its precision resolved.
        profile: profile of the device; None: unknown.
        ranks: number of ranks.

    Returns:
        Operations per token, and the peak of all ranks.
    """
    convention = config.flops.convention
    precision = config.train.resolved_precision
    source, target = config.sequence_lengths
    recompute = config.train.activation_checkpoint
    counted = count_flops(
        config.model, source, 1, convention, target_length=target, recompute=recompute
    )
    whole_windows = config.objective.uses_windows
    peak = profile.peak_flops.get(precision) if profile is not None and whole_windows else None
    name = UNKNOWN if profile is None else profile.name
    return FlopsConvention(
        convention, name, precision, counted.flops_per_token, None if peak is None else peak * ranks
    )


def read_peak_memory(device: torch.device) -> tuple[int, int]:
    """Read the peak memory of this process so far.

    Args:
        device: Device of this rank.

    Returns:
        (peak bytes, bytes of them that tensors used): on accelerators the allocator's reserved
        and allocated bytes; on CPUs the resident set, and 0 because nothing counts tensors
        there.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device), torch.cuda.max_memory_allocated(device)
    return read_resident_memory("VmHWM"), 0


def reset_peak_memory(device: torch.device) -> None:
    """Begin the peak of this process anew, so that it is that of the steps that follow: building a
    model and loading a checkpoint may need more. Warn where a system does not let a process do so,
    as some containers do not.

    Args:
        device: Device of this rank.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif PEAK_RESET.exists():
        # Linux, proc(5): 5 sets VmHWM to the resident set of now. Other systems keep the peak of
        # the whole process.
        try:
            PEAK_RESET.write_text("5")
        except OSError as error:
            log.warning(
                "%s cannot be written (%s): the measured peak of memory has what building the "
                "model and reading a checkpoint needed, and may be above the predicted one",
                PEAK_RESET,
                error,
            )


def read_resident_memory(field_name: str) -> int:
    """Return the resident memory of this process.

    Args:
        field_name: `VmRSS` for that of now, `VmHWM` for the peak.

    Returns:
        Bytes; the peak where the system has no /proc.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        # macOS counts bytes, other systems KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field_name))


@dataclass
class StepMeter:
    """Seconds and memory of the steps of this rank. On a CPU memory is that of the process, as
    the prediction's is.
    """

    config: RunConfig
    device: torch.device
    flops_convention: FlopsConvention
    seconds: "array[float]" = field(default_factory=lambda: array("d"))
    details: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._peak = (0, 0)
        self._only_steps = True
        self._has_full_length = True

    def record_step(self, number: int, seconds: float) -> None:
        """Record the seconds of one step without its data stall. Steps of smaller or shorter
        batches do not count.
        """
        batch = self.config.batch
        self._has_full_length = batch.get_step_length(number - 1) == batch.sequence_length
        if self._has_full_length and batch.get_step_tokens(number - 1) == batch.tokens_per_step:
            self.seconds.append(seconds)
        if self._only_steps:
            # Peaks never fall, so the last reading before other work is the peak of the steps.
            self._peak = read_peak_memory(self.device)

    def mark_other_work(self) -> None:
        """Stop recording peaks: from here on they may be those of an evaluation or a save."""
        self._only_steps = False

    def compute_step_metrics(self, tokens: int, seconds: float, wait: float) -> dict[str, Any]:
        """Return the numbers of a logged step over all ranks. Collective.

        Keys: seconds, data_wait_seconds, tokens_per_second, utilisation (None: unknown),
        utilisation_of, memory_bytes, and on accelerators memory_allocated_bytes.

        Args:
            tokens: tokens of the step over all ranks.
            seconds: seconds of the step on this rank, with the data stall.
            wait: seconds of the data stall.
        """
        memory, allocated = read_peak_memory(self.device)
        if self.device.type != "cuda":
            memory = read_resident_memory("VmRSS")
        # One reduction for all four: a collective costs more than its few bytes.
        slowest, longest_wait, fullest, most_allocated = self._compute_max_over_ranks(
            seconds, wait, memory, allocated
        )
        speed = tokens / slowest
        # Operations per token are those of full sequences.
        share = self.flops_convention.compute_utilisation(speed) if self._has_full_length else None
        self.details = {} if share is None else {"utilisation": f"{share:.1%}"}
        self.details["memory"] = format_memory_size(fullest)
        return {
            "seconds": slowest,
            "data_wait_seconds": longest_wait,
            "tokens_per_second": speed,
            "utilisation": share,
            "utilisation_of": str(self.flops_convention),
            "memory_bytes": int(fullest),
            **({"memory_allocated_bytes": int(most_allocated)} if most_allocated else {}),
        }

    def compute_run_metrics(self) -> dict[str, Any]:
        """Return the median step seconds and the peak memory over all ranks. Collective.

        Empty without a full-sized step. The first step is left out if there are more: it warms up.
        """
        if not self.seconds:
            return {}
        most, given_out = self._peak
        own = (
            median(self.seconds[1:] or self.seconds),
            most,
            given_out,
        )
        middle, peak, allocated = self._compute_max_over_ranks(*own)
        return {
            "step_seconds": middle,
            "steps": len(self.seconds),
            "peak_bytes": int(peak),
            **({"peak_allocated_bytes": int(allocated)} if allocated else {}),
        }

    def _compute_max_over_ranks(self, *numbers: float) -> list[float]:
        found: list[float] = all_reduce_max(
            torch.tensor(numbers, dtype=torch.float64, device=self.device)
        ).tolist()
        return found


def build_step_meter(
    config: RunConfig, device: torch.device, profile: DeviceProfile | None
) -> StepMeter:
    """Build the meter of this rank's steps.

    Args:
        config: The config with its precision resolved.
        device: Device of this rank.
        profile: Profile of the device. None: utilisations are not known.

    Returns:
        The meter of speed, stalls and memory.
    """
    return StepMeter(config, device, build_flops_convention(config, profile, get_world_size()))
