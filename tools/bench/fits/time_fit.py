"""Fit published times, and compare rows that a fit does not know with their intervals and with a
constant utilisation.

Fitted are one factor for each program and class of model, a spread of rows around it, and a
variance between programs, which is what is not known of a program without rows. Whole reports are
held out: the error of a row is that of a fit without any row of its report, spread and baseline
included.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import exp, log, sqrt
from statistics import median

import numpy as np

from llmsys.estimate.percentile_interval import Z90, PercentileInterval, build_log_normal_interval
from llmsys.estimate.program_profile import UNKNOWN_PROGRAM, ProgramFit, load_program_profile
from llmsys.estimate.residual_model import ResidualModel
from tools.bench.fits.time_rows import (
    KINDS,
    TimeClass,
    TimeRow,
    get_family,
    get_model,
    get_report,
    get_source,
)

# Share of held-out rows that P10 to P90 is widened to hold: the middle of the 80 % it is named for
# and 90 %.
COVERED = 0.85
# Rows of a typical program that the mean of its class counts for: the variance of a row over that
# between programs. It is fitted for steps, from this first guess and between these bounds: few
# families of programs tell it.
PRIOR_ROWS = 2.0
PRIOR_BOUNDS = (0.5, 8.0)
ROUNDS = 3
# Programs of the class of llmsys, whose copies and hooks are counted one by one as its own are.
OWN_PROGRAMS = ("llmsys", "llmsys-eager")


@dataclass(frozen=True)
class ProgramFactor:
    """The factor of measured over modelled times of a program, and what it is known from."""

    factor: float
    # rows that it was fitted on, those of one source counted by their square root
    weight: float = 0.0
    # the variance of a row over that between programs
    prior_rows: float = PRIOR_ROWS

    @property
    def between(self) -> float:
        """Standard deviation of what is not known of the program over that of a row: all of the
        variance between programs without rows, and less with each.
        """
        return sqrt(1 / (self.prior_rows + self.weight))

    @property
    def widening(self) -> float:
        """Standard deviation of the next row over that of a row around a program whose factor is
        known exactly: the predictive variance where factors are drawn towards the mean.
        """
        return sqrt(1 + self.between**2)


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
    """Fit the constants of a class.

    The spread is that of reports, and of models, which the fit does not know; the variance between
    programs is what families of programs that it does not know add to it. Rows of a report of n
    rows count as √n.

    Args:
        rows: rows of one class.

    Returns:
        The fit.
    """
    if rows[0].kind == "run":
        spread = _compute_spread(rows, (get_source, get_model), PRIOR_ROWS, is_weighted=False)
        return ClassFit(*fit_factors(rows), spread)
    prior_rows = PRIOR_ROWS
    for _ in range(ROUNDS):
        spread = _compute_spread(rows, (get_report, get_model), prior_rows)
        errors = list(_iter_left_out_errors(rows, get_family, prior_rows))
        unknown = _compute_weighted_quantile([(abs(e), w) for e, w, _ in errors]) / Z90
        between = max(unknown**2 - spread**2, 1e-9)
        low, high = PRIOR_BOUNDS
        prior_rows = min(max(spread**2 / between, low), high)
    return ClassFit(*fit_factors(rows, prior_rows), spread)


def _compute_spread(
    rows: Sequence[TimeRow],
    groups: Sequence[Callable[[TimeRow], str]],
    prior_rows: float,
    *,
    is_weighted: bool = True,
) -> float:
    """Return the standard deviation of a row around a known factor, so that COVERED of the rows
    that are left out lie between P10 and P90.
    """
    errors = [
        (abs(error) / widening, weight if is_weighted else 1.0)
        for get_group in groups
        for error, weight, widening in _iter_left_out_errors(rows, get_group, prior_rows)
    ]
    if not is_weighted:
        return float(np.quantile([error for error, _ in errors], COVERED)) / Z90
    return _compute_weighted_quantile(errors) / Z90


def _iter_left_out_errors(
    rows: Sequence[TimeRow], get_group: Callable[[TimeRow], str], prior_rows: float
) -> Iterator[tuple[float, float, float]]:
    """Yield the logarithmic error of each row by a fit without its group, the row's weight, and
    how much wider than the spread of rows its interval is.
    """
    sizes = _count_report_rows(rows)
    for name in sorted({get_group(row) for row in rows}):
        others = [row for row in rows if get_group(row) != name]
        if not others:
            continue
        mean, known = fit_factors(others, prior_rows)
        for row in rows:
            if get_group(row) == name:
                is_model = get_group is get_model
                ratio = row.blind_log_ratio if is_model else row.report_blind_log_ratio
                found = known.get(row.program, mean)
                weight = 1 / sqrt(sizes[get_report(row)])
                yield ratio - log(found.factor), weight, found.widening


def _count_report_rows(rows: Sequence[TimeRow]) -> dict[str, int]:
    sizes: dict[str, int] = defaultdict(int)
    for row in rows:
        sizes[get_report(row)] += 1
    return sizes


def _compute_weighted_quantile(values: Sequence[tuple[float, float]]) -> float:
    """Return the value below which COVERED of the weights lie, between neighbours in proportion."""
    ordered = sorted(values)
    weights = np.array([weight for _, weight in ordered])
    reached = (np.cumsum(weights) - weights / 2) / weights.sum()
    return float(np.interp(COVERED, reached, [value for value, _ in ordered]))


def fit_factors(
    rows: Sequence[TimeRow], prior_rows: float = PRIOR_ROWS
) -> tuple[ProgramFactor, dict[str, ProgramFactor]]:
    """Return the typical factor of measured over modelled times, and that of each program, drawn
    towards it.

    A source of n rows counts as √n: rows of one table share its errors.

    Args:
        rows: rows of one class.
        prior_rows: the variance of a row over that between programs.

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
    weight: dict[str, float] = defaultdict(float)
    total: dict[str, float] = defaultdict(float)
    for row, w, e, ratio in zip(rows, weights, errors, ratios, strict=True):
        # A row out of line is of another program than it was taken for, or wrong: it tells nothing
        # of this one.
        counted = w if e == ratio else 0.0
        weight[row.program] += counted
        total[row.program] += counted * e
    for program in weight.keys() - {UNKNOWN_PROGRAM}:
        drawn = prior_rows * mean + total[program]
        factor = exp(drawn / (prior_rows + weight[program]))
        found[program] = ProgramFactor(factor, weight[program], prior_rows)
    return ProgramFactor(exp(mean), 0.0, prior_rows), found


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
        get_group: what is left out together; None: the rows of a report.

    Returns:
        Predictions in the order of the rows.
    """
    group = get_group or (get_source if rows[0].kind == "run" else get_report)
    return list(_hold_out(tuple(rows), tuple(peers), group))


@cache  # each table asks for the same ones
def _hold_out(
    rows: tuple[TimeRow, ...], peers: tuple[TimeRow, ...], group: Callable[[TimeRow], str]
) -> tuple[HeldOutRow, ...]:
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
    return tuple(found)


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
        found[kind] = ResidualModel(
            factor=round(fit.other.factor, 3),
            spread=round(fit.spread * fit.other.widening, 3),
            between=0.0 if kind == "run" else round(fit.spread * fit.other.between, 3),
            rows=names,
        )
    return found


def fit_own_factor(rows: Sequence[TimeRow], fit: ClassFit) -> tuple[ProgramFactor, list[TimeRow]]:
    """Fit the factor of llmsys, of whose steps no report tells.

    The factor of all programs holds the copies and hooks of those for which nothing counts them.
    llmsys counts its own one by one, so its factor is that of programs for which they are counted.

    Args:
        rows: rows of one class.
        fit: fit of the class.

    Returns:
        The factor, as uncertain as that of a program without rows, and the rows that it is from.
    """
    counted = [row for row in rows if load_program_profile(row.program).time.counts_wrapper]
    mean, _ = fit_factors(counted, fit.other.prior_rows)
    return ProgramFactor(mean.factor, 0.0, fit.other.prior_rows), counted


def build_program_fits(rows: Sequence[TimeRow]) -> dict[str, dict[str, ProgramFit]]:
    """Return the `fit` section of every program with published steps, and of llmsys."""
    found: dict[str, dict[str, ProgramFit]] = defaultdict(dict)
    for kind in KINDS[:2]:
        own = [row for row in rows if row.kind == kind]
        fit, held = fit_class(own), list_held_out_rows(own, own)
        for program, one_fit in sorted(fit.programs.items()):
            group = [one for one in held if one.row.program == program]
            found[program][kind] = ProgramFit(
                factor=round(one_fit.factor, 3),
                spread=round(fit.spread * one_fit.widening, 3),
                between=round(fit.spread * one_fit.between, 3),
                rows=tuple(one.row.name for one in group),
                held_out_error=round(median(abs(one.error) for one in group), 3),
                held_out_coverage=round(sum(one.is_covered for one in group) / len(group), 3),
            )
        if kind == "dense":
            factor, counted = fit_own_factor(own, fit)
            for program in OWN_PROGRAMS:
                found[program][kind] = ProgramFit(
                    factor=round(factor.factor, 3),
                    spread=round(fit.spread * factor.widening, 3),
                    between=round(fit.spread * factor.between, 3),
                    rows=tuple(row.name for row in counted),
                )
    return found
