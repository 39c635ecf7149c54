"""Distribution of a measured peak around its estimate, and the probability that a rank fits.

Reads `memory_residual.yaml`, pairs of measured and estimated peaks. The model of the error is

    measured = estimated · factor · exp(spread · z),  z standard normal,

because errors grow with what is estimated: by allocator, kernels and layout, not by a constant
number of bytes. `factor` is the mean of the logarithms of measured over estimated. The spread is
that of one further row, so it also holds what n rows leave open about mean and variance:
s² · (1 + 1/n) · (n - 1)/(n - 3), the variance of Student's t that predicts a further value.

Errors are apart by what is known of the run:

- llmsys on one device: its tensors on an H100 (10 rows, ±5 %).
- llmsys on several devices: no GPU measured it. Dry runs of many layouts against the estimate
  (22 rows, ±8 %), and on top of them the spread of the rows on one H100. Tensors of three models
  on that H100 were 0.3 to 4.6 % below their dry runs; three rows do not lower the median.
- another program that has rows: all rows of other programs on which no constant was fitted
  (16 rows, -8 % to +4 %).
- another program without rows: the same, and the variance between the means of programs.

Not part of it: the allocator's share of llmsys, which no many-device run measured; batches whose
experts are less even than `expert_load`; the bytes of driver and NCCL, which count as exact; and
the kind of device: all rows are of NVIDIA GPUs.
"""

from dataclasses import dataclass
from functools import cache
from math import exp, log, sqrt
from pathlib import Path
from statistics import NormalDist, fmean, variance
from typing import TYPE_CHECKING

from llmsys.config.loading.yaml_files import parse_yaml
from llmsys.config.section import Section
from llmsys.estimate.percentile_interval import PercentileInterval, build_log_normal_interval
from llmsys.estimate.program_profile import ProgramProfile

if TYPE_CHECKING:
    from llmsys.estimate.memory_timeline import MemoryTimeline

FILE = Path(__file__).with_name("memory_residual.yaml")
# A peak in GiB as it was measured, and as it was estimated.
Pair = tuple[float, float]


class MeasuredPeaks(Section):
    """Pairs of measured and estimated peaks by row."""

    own_device: dict[str, Pair]
    own_dry_run: dict[str, Pair]
    programs: dict[str, dict[str, Pair]]


@dataclass(frozen=True)
class MemoryResidual:
    """Error of estimated peaks.

    Attributes:
        factor: median of measured over estimated.
        spread: standard deviation of its natural logarithm for one further run.
        num_rows: measured peaks that both were computed from.
    """

    factor: float
    spread: float
    num_rows: int

    def compute_interval(self, memory: "MemoryTimeline") -> PercentileInterval:
        """Compute the bytes that a rank needs of its device.

        Args:
            memory: estimated timeline of the rank.

        Returns:
            P10, P50 and P90 of the peak in bytes, those of driver and communication included.
        """
        peak = build_log_normal_interval(memory.peak_bytes * self.factor, self.spread)
        driver = memory.driver_bytes
        return PercentileInterval(
            p10=peak.p10 + driver, p50=peak.p50 + driver, p90=peak.p90 + driver
        )

    def compute_fit_probability(self, memory: "MemoryTimeline", capacity_bytes: float) -> float:
        """Compute the probability that a rank fits a device.

        Args:
            memory: estimated timeline of the rank.
            capacity_bytes: memory of the device.

        Returns:
            A number from 0 to 1.
        """
        room = capacity_bytes - memory.driver_bytes
        if room <= 0:
            return 0.0
        deviation = log(room / (memory.peak_bytes * self.factor)) / self.spread
        return NormalDist().cdf(deviation)

    def compute_usable_bytes(
        self, driver_bytes: int, capacity_bytes: float, probability: float
    ) -> float:
        """Compute the largest estimated peak that fits with a probability.

        Args:
            driver_bytes: bytes that come on top of the peak.
            capacity_bytes: memory of the device.
            probability: a number between 0 and 1.

        Returns:
            Bytes; `compute_fit_probability` of a peak with so many is `probability`.
        """
        deviation = NormalDist().inv_cdf(probability)
        return (capacity_bytes - driver_bytes) / (self.factor * exp(self.spread * deviation))


def format_fit_probability(probability: float) -> str:
    """Format the probability that a rank fits.

    Args:
        probability: a number from 0 to 1.

    Returns:
        A phrase such as `fits with 97%`; never 0 % or 100 %, which no model of an error gives.
    """
    if probability > 0.99:
        return "fits with over 99%"
    if probability < 0.01:
        return "fits with under 1%"
    return f"fits with {probability:.0%}"


@cache
def load_measured_peaks() -> MeasuredPeaks:
    """Load the pairs of measured and estimated peaks."""
    values, _ = parse_yaml(FILE.read_text(encoding="utf-8"), FILE.name)
    return MeasuredPeaks.model_validate(values)


def get_memory_residual(num_ranks: int, program: ProgramProfile | None = None) -> MemoryResidual:
    """Return the error of estimated peaks by what is known of the run.

    Args:
        num_ranks: devices of the run.
        program: who runs it; None: llmsys.

    Returns:
        Factor and spread of measured over estimated.
    """
    if program is None or program.is_own:
        return _fit_own_residual(is_one_device=num_ranks == 1)
    return _fit_program_residual(program.name)


@cache
def _fit_own_residual(*, is_one_device: bool) -> MemoryResidual:
    peaks = load_measured_peaks()
    device = _fit_rows(peaks.own_device)
    if is_one_device:
        return device
    dry = _fit_rows(peaks.own_dry_run)
    spread = sqrt(dry.spread**2 + device.spread**2)
    return MemoryResidual(dry.factor, spread, dry.num_rows + device.num_rows)


@cache
def _fit_program_residual(name: str) -> MemoryResidual:
    peaks = load_measured_peaks()
    rows = [row for group in peaks.programs.values() for row in group.items()]
    known = _fit_rows(dict(rows))
    if name in peaks.programs:
        return known
    means = [log(_fit_factor(rows)) for rows in peaks.programs.values()]
    spread = sqrt(known.spread**2 + variance(means))
    return MemoryResidual(known.factor, spread, known.num_rows)


def _fit_factor(rows: dict[str, Pair]) -> float:
    return exp(fmean(log(measured / estimated) for measured, estimated in rows.values()))


def _fit_rows(rows: dict[str, Pair]) -> MemoryResidual:
    """Return factor and spread of a further row."""
    count = len(rows)
    logarithms = [log(measured / estimated) for measured, estimated in rows.values()]
    spread = sqrt(variance(logarithms) * (1 + 1 / count) * (count - 1) / (count - 3))
    return MemoryResidual(_fit_factor(rows), spread, count)
