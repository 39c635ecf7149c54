"""Published times against the estimate: signed errors, coverage of P10 to P90, and a constant utilisation beside it.

Every second row of a table calibrates: they give the factors and spreads in llmsys/estimate/residual.yaml, and the
constant of the baseline. Everything that is reported as an error is of the other rows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, log, sqrt
from statistics import NormalDist, mean, median, quantiles, stdev

from llmsys.estimate.cluster import Cluster
from llmsys.estimate.device import Number, read_device
from llmsys.estimate.goodput import goodput
from llmsys.estimate.interval import Z90, Interval
from llmsys.estimate.parameters import count_parameters
from llmsys.estimate.residual import Residual, residuals
from llmsys.estimate.time import step_time
from tools.bench.published_setup import Setup

KINDS = ("dense", "moe", "run")
# The rows come from a dozen programs, and the next row from yet another: their spread is taken wider than one sample's.
COVERED = 0.87


@dataclass(frozen=True)
class TimeRow:
    """One measured time and what is modelled for it, before the residual; seconds of a step, or hours of a run."""

    setup: Setup
    calibrates: bool

    @property
    def kind(self) -> str:
        """The class of residuals that it belongs to."""
        return "run" if self.setup.kind == "run" else "dense" if self.setup.config.model.moe is None else "moe"

    @cached_property
    def modelled(self) -> float:
        """Without the residual's factor."""
        setup = self.setup
        device = read_device(setup.device)
        step = step_time(
            setup.config, setup.layout, device,
            pipeline=setup.pipeline, interleave=setup.interleave, software=setup.software,
        )  # fmt: skip
        plain = sum(step.parts.values()) / step.factor
        if setup.kind == "step":
            return plain
        return plain * setup.config.steps * setup.ranks / 3600 / goodput(Cluster(), setup.ranks).fraction

    @cached_property
    def ideal(self) -> float:
        """6 · N · D operations at the peak: what a constant utilisation divides."""
        setup, config = self.setup, self.setup.config
        number: Number = "bf16" if "bf16" in read_device(setup.device).peak_flops else "fp16"
        step = 6 * count_parameters(config.model).active.all * config.batch.tokens_per_step
        seconds = step / (setup.ranks * read_device(setup.device).peak(number))
        return seconds if setup.kind == "step" else seconds * config.steps * setup.ranks / 3600

    def log_error(self, modelled: float) -> float:
        """Natural logarithm of modelled over measured."""
        return log(modelled / self.setup.measured)


def time_rows(setups: Iterable[Setup]) -> list[TimeRow]:
    """Every second row of each table and kind calibrates, the first one included."""
    seen: dict[str, int] = {}
    rows = []
    for setup in setups:
        key = f"{setup.table} {setup.kind}"
        seen[key] = seen.get(key, 0) + 1
        rows.append(TimeRow(setup, seen[key] % 2 == 1))
    return rows


def fit(rows: Sequence[TimeRow]) -> dict[str, Residual]:
    """Factor and spread of each class from those rows."""
    return {kind: fit_one([row for row in rows if row.kind == kind]) for kind in KINDS}


def fit_one(rows: Sequence[TimeRow], covered: float = COVERED) -> Residual:
    """The mean of the logarithm of measured over modelled, and the spread with which the next row is predicted.

    P10 to P90 of that spread hold the next row with probability `covered`, by Student's t for as few rows as there are.
    What lies outside Tukey's outer fences (three quartile distances) counts as if it lay on them: rows out of line are
    reported, and neither bent to nor forgotten.
    """
    errors = [-row.log_error(row.modelled) for row in rows]
    low, _, high = quantiles(errors, n=4, method="inclusive")
    reach = 3 * (high - low)
    kept = [min(max(error, low - reach), high + reach) for error in errors]
    spread = stdev(kept) * sqrt(1 + 1 / len(kept)) * student((1 + covered) / 2, len(kept) - 1) / Z90
    names = tuple(row.setup.name for row in rows)
    return Residual(factor=round(exp(mean(kept)), 3), spread=round(spread, 3), rows=names)


def student(probability: float, freedom: int) -> float:
    """Quantile of Student's t, by its expansion around the normal one (Abramowitz and Stegun, 26.7.5)."""
    z = NormalDist().inv_cdf(probability)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def utilisation(rows: Sequence[TimeRow], *, run: bool) -> float:
    """The constant of the baseline: the median of the calibration rows, one for steps and one for whole runs."""
    return median(row.ideal / row.setup.measured for row in rows if (row.kind == "run") == run)


def interval(row: TimeRow, fitted: dict[str, Residual]) -> Interval:
    """What is predicted for a row."""
    return fitted[row.kind].around(row.modelled)


def shipped() -> dict[str, Residual]:
    """The residuals that the estimate uses."""
    found = residuals()
    return {"dense": found.dense, "moe": found.moe, "run": found.run}
