"""Fit published times, and compare rows that a fit does not know with their intervals and with a
constant utilisation.

Fitted are one factor for each program and class of model, and a spread for each class, which is
wider for a program of few rows. Whole sources are held out: the error of a row is that of a fit
without any row of its source, spread and baseline included.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, log, sqrt
from statistics import median

import numpy as np

from llmsys.estimate.percentile_interval import Z90, PercentileInterval, build_log_normal_interval
from llmsys.estimate.program_profile import ProgramFit
from llmsys.estimate.residual_model import ResidualModel
from tools.bench.fits.time_rows import KINDS, TimeClass, TimeRow, get_model, get_source

# Share of held-out rows that P10 to P90 is widened to hold: the middle of the 80 % it is named for
# and 90 %.
COVERED = 0.85
# Rows of a typical program that the mean of its class counts for: the variance of a row over that
# between programs.
PRIOR_ROWS = 2.0


@dataclass(frozen=True)
class ProgramFactor:
    """The factor of measured over modelled times of a program, and what it is known from."""

    factor: float
    # rows that it was fitted on, those of one source counted by their square root
    weight: float = 0.0

    @property
    def widening(self) -> float:
        """Standard deviation of the next row over that of a row around a program whose factor is
        known exactly.

        The predictive variance where factors are drawn towards the mean: 1 + 1 / (PRIOR_ROWS +
        weight) of a row's own.
        """
        return sqrt(1 + 1 / (PRIOR_ROWS + self.weight))


@dataclass(frozen=True)
class ClassFit:
    """Constants of one class: a factor for each program, one for all others, and the spread
    around a known factor.
    """

    other: ProgramFactor
    programs: Mapping[str, ProgramFactor]
    spread: float

    def predict_interval(self, row: TimeRow) -> PercentileInterval:
        """Return the interval of a row."""
        found = self.programs.get(row.program, self.other)
        return build_log_normal_interval(
            row.modelled_time * found.factor, self.spread * found.widening
        )


def fit_class(rows: Sequence[TimeRow]) -> ClassFit:
    """Fit the constants of a class; the spread is that of sources, and of models, which the fit
    does not know.

    Args:
        rows: rows of one class.

    Returns:
        The fit.
    """
    other, programs = fit_factors(rows)
    errors = []
    for get_group in (get_source, get_model):
        for name in {get_group(row) for row in rows}:
            others = [row for row in rows if get_group(row) != name]
            if not others:
                continue
            mean, known = fit_factors(others)
            for row in rows:
                if get_group(row) == name:
                    ratio = row.blind_log_ratio if get_group is get_model else row.log_ratio
                    found = known.get(row.program, mean)
                    errors.append(abs(ratio - log(found.factor)) / found.widening)
    return ClassFit(other, programs, float(np.quantile(errors, COVERED)) / Z90)


def fit_factors(rows: Sequence[TimeRow]) -> tuple[ProgramFactor, dict[str, ProgramFactor]]:
    """Return the typical factor of measured over modelled times, and that of each program, drawn
    towards it.

    A source of n rows counts as √n: rows of one table share its errors.

    Args:
        rows: rows of one class.

    Returns:
        The mean of steps and the factors of their programs. Whole runs have one factor, their
        median: programs of most of them are guesses, and what is lost outside of steps has no upper
        bound.
    """
    sizes: dict[str, int] = defaultdict(int)
    for row in rows:
        sizes[row.published.source] += 1
    weights = [1 / sqrt(sizes[row.published.source]) for row in rows]
    ratios = [row.log_ratio for row in rows]
    errors = clip_outliers(ratios)
    if rows[0].kind == "run":
        return ProgramFactor(exp(compute_weighted_median(ratios, weights))), {}
    mean = sum(w * e for w, e in zip(weights, errors, strict=True)) / sum(weights)
    found = {}
    for program in {row.program for row in rows}:
        # A row out of line is of another program than it was taken for, or wrong: it tells nothing
        # of this one.
        own = [
            (w, e)
            for row, w, e, ratio in zip(rows, weights, errors, ratios, strict=True)
            if row.program == program and e == ratio
        ]
        weight = sum(w for w, _ in own)
        total = PRIOR_ROWS * mean + sum(w * e for w, e in own)
        found[program] = ProgramFactor(exp(total / (PRIOR_ROWS + weight)), weight)
    return ProgramFactor(exp(mean)), found


def compute_weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the first value up to which half of the weights lie."""
    ordered = sorted(zip(values, weights, strict=True))
    reached = accumulate(weight for _, weight in ordered)
    return next(
        value for (value, _), sum_ in zip(ordered, reached, strict=True) if sum_ >= sum(weights) / 2
    )


def clip_outliers(values: Sequence[float]) -> list[float]:
    """Return values with those beyond Tukey's outer fences (three quartile distances) on the
    fence.
    """
    low, high = np.quantile(values, [0.25, 0.75]).tolist()
    reach = 3 * (high - low)
    return [min(max(value, low - reach), high + reach) for value in values]


@dataclass(frozen=True)
class HeldOutRow:
    """A row, the interval of a fit without its source, and the baseline of the same fit."""

    row: TimeRow
    interval: PercentileInterval
    baseline: float

    @property
    def error(self) -> float:
        """Signed relative error of P50."""
        return self.interval.p50 / self.row.measured - 1

    @property
    def baseline_error(self) -> float:
        """The same of a constant utilisation."""
        return self.baseline / self.row.measured - 1

    @property
    def is_covered(self) -> bool:
        """True where the measurement is between P10 and P90."""
        return self.interval.contains(self.row.measured)


def list_held_out_rows(
    rows: Sequence[TimeRow],
    peers: Sequence[TimeRow],
    get_group: Callable[[TimeRow], str] | None = None,
) -> list[HeldOutRow]:
    """Predict every row of a class by a fit without its source.

    Args:
        rows: rows of one class.
        peers: rows whose median utilisation is the baseline; those of the source are left out.
        get_group: what is left out together; None: the rows of a source.

    Returns:
        Predictions in the order of the rows.
    """
    group = get_group or get_source
    fits: dict[str, tuple[ClassFit, float]] = {}
    for name in {group(row) for row in rows}:
        fit = fit_class([row for row in rows if group(row) != name])
        fits[name] = (
            fit,
            median(row.ideal_time / row.measured for row in peers if group(row) != name),
        )
    found = []
    for row in rows:
        fit, utilisation = fits[group(row)]
        found.append(HeldOutRow(row, fit.predict_interval(row), row.ideal_time / utilisation))
    return found


def list_printed_rows(rows: Sequence[TimeRow], known: Sequence[TimeRow]) -> list[HeldOutRow]:
    """Return rows of another file with the intervals that their commands print, and the baseline
    of the known rows.
    """
    found = []
    for row in rows:
        utilisation = median(one.ideal_time / one.measured for one in select_peers(row.kind, known))
        found.append(HeldOutRow(row, row.printed_interval, row.ideal_time / utilisation))
    return found


def select_peers(kind: TimeClass, rows: Sequence[TimeRow]) -> list[TimeRow]:
    """Return the rows that share the constant of the baseline: all steps, or all runs."""
    return [row for row in rows if (row.kind == "run") == (kind == "run")]


def build_residuals(rows: Sequence[TimeRow]) -> dict[TimeClass, ResidualModel]:
    """Return what residual.yaml has: factor and spread of every class, fitted on all rows."""
    found: dict[TimeClass, ResidualModel] = {}
    for kind in KINDS:
        own = [row for row in rows if row.kind == kind]
        fit, names = fit_class(own), tuple(row.name for row in own)
        spread = fit.spread * fit.other.widening
        found[kind] = ResidualModel(
            factor=round(fit.other.factor, 3), spread=round(spread, 3), rows=names
        )
    return found


def build_program_fits(rows: Sequence[TimeRow]) -> dict[str, dict[str, ProgramFit]]:
    """Return the `fit` section of every program with published steps."""
    found: dict[str, dict[str, ProgramFit]] = defaultdict(dict)
    for kind in KINDS[:2]:
        own = [row for row in rows if row.kind == kind]
        fit, held = fit_class(own), list_held_out_rows(own, own)
        for program, one_fit in sorted(fit.programs.items()):
            group = [one for one in held if one.row.program == program]
            found[program][kind] = ProgramFit(
                factor=round(one_fit.factor, 3),
                spread=round(fit.spread * one_fit.widening, 3),
                rows=tuple(one.row.name for one in group),
                held_out_error=round(median(abs(one.error) for one in group), 3),
                held_out_coverage=round(sum(one.is_covered for one in group) / len(group), 3),
            )
    return found
