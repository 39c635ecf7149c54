"""Compare published times with the estimate: signed errors, coverage of P10 to P90, and a constant-utilisation
baseline.

Every second row of a table calibrates: these rows give the factors and spreads in llmsys/estimate/residual.yaml, and
the constant of the baseline.

Invariants:
- Reported errors are of the other rows only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, log, sqrt
from statistics import NormalDist, mean, median, quantiles, stdev

from llmsys.estimate.cluster_costs import ClusterCosts
from llmsys.estimate.device_profile import Number, load_device_profile
from llmsys.estimate.model_tensors import count_parameters
from llmsys.estimate.residual_model import Z90, PercentileInterval, ResidualModel, load_residuals
from llmsys.estimate.run_cost import estimate_goodput
from llmsys.estimate.step_time import estimate_step_time
from tools.bench.published_setup import Setup

KINDS = ("dense", "moe", "run")
# The rows come from a dozen programs, and the next row from yet another: their spread is taken wider than one sample's.
COVERED = 0.87


@dataclass(frozen=True)
class TimeRow:
    """One measured time and its modelled time without residual; seconds per step, or hours of a run."""

    setup: Setup
    calibrates: bool

    @property
    def kind(self) -> str:
        """The class of residuals that the row belongs to."""
        return "run" if self.setup.kind == "run" else "dense" if self.setup.config.model.moe is None else "moe"

    @cached_property
    def modelled_time(self) -> float:
        """The modelled time without the residual's factor."""
        setup = self.setup
        device = load_device_profile(setup.device)
        step = estimate_step_time(
            setup.config, setup.layout, device,
            pipeline=setup.pipeline, interleave=setup.interleave, software=setup.software,
        )  # fmt: skip
        plain = sum(step.parts.values()) / step.factor
        if setup.kind == "step":
            return plain
        return (
            plain
            * setup.config.num_steps
            * setup.num_ranks
            / 3600
            / estimate_goodput(ClusterCosts(), setup.num_ranks).fraction
        )

    @cached_property
    def ideal_time(self) -> float:
        """The time of 6 · N · D FLOPs at the peak, which a constant utilisation divides."""
        setup, config = self.setup, self.setup.config
        number: Number = "bf16" if "bf16" in load_device_profile(setup.device).peak_flops else "fp16"
        step = 6 * count_parameters(config.model).active.all * config.batch.tokens_per_step
        seconds = step / (setup.num_ranks * load_device_profile(setup.device).get_peak_flops(number))
        return seconds if setup.kind == "step" else seconds * config.num_steps * setup.num_ranks / 3600

    def compute_log_error(self, modelled: float) -> float:
        """Return the natural logarithm of modelled over measured."""
        return log(modelled / self.setup.measured)


def build_time_rows(setups: Iterable[Setup]) -> list[TimeRow]:
    """Return a row for each setup. The first, third, … of each table and kind calibrate."""
    seen: dict[str, int] = {}
    rows = []
    for setup in setups:
        key = f"{setup.table} {setup.kind}"
        seen[key] = seen.get(key, 0) + 1
        rows.append(TimeRow(setup, seen[key] % 2 == 1))
    return rows


def fit_residuals(rows: Sequence[TimeRow]) -> dict[str, ResidualModel]:
    """Return factor and spread of each class from those rows."""
    return {kind: fit_residual([row for row in rows if row.kind == kind]) for kind in KINDS}


def fit_residual(rows: Sequence[TimeRow], covered: float = COVERED) -> ResidualModel:
    """Return the mean log of measured over modelled, and the spread for predicting the next row.

    P10 to P90 of that spread hold the next row with probability `covered`, by Student's t for the number of rows.
    Values
    outside Tukey's outer fences (three quartile distances) count as if on the fence: outliers are reported, but neither
    dominate the fit nor are dropped.
    """
    errors = [-row.compute_log_error(row.modelled_time) for row in rows]
    low, _, high = quantiles(errors, n=4, method="inclusive")
    reach = 3 * (high - low)
    kept = [min(max(error, low - reach), high + reach) for error in errors]
    spread = stdev(kept) * sqrt(1 + 1 / len(kept)) * compute_student_quantile((1 + covered) / 2, len(kept) - 1) / Z90
    names = tuple(row.setup.name for row in rows)
    return ResidualModel(factor=round(exp(mean(kept)), 3), spread=round(spread, 3), rows=names)


def compute_student_quantile(probability: float, freedom: int) -> float:
    """Return a quantile of Student's t, by its expansion around the normal one (Abramowitz and Stegun, 26.7.5)."""
    z = NormalDist().inv_cdf(probability)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def compute_utilisation(rows: Sequence[TimeRow], *, run: bool) -> float:
    """Return the baseline's constant: the median of the calibration rows, one for steps and one for whole runs."""
    return median(row.ideal_time / row.setup.measured for row in rows if (row.kind == "run") == run)


def predict_interval(row: TimeRow, fitted: dict[str, ResidualModel]) -> PercentileInterval:
    """Return the predicted interval of a row."""
    return fitted[row.kind].compute_interval(row.modelled_time)


def get_shipped_residuals() -> dict[str, ResidualModel]:
    """Return the residuals that the estimate uses."""
    found = load_residuals()
    return {"dense": found.dense, "moe": found.moe, "run": found.run}
