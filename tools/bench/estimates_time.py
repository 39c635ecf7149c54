"""Compare published times with `llmsys estimate`: signed errors, coverage of P10 to P90, and a constant utilisation.

Fitted are one factor for each program and class of model, and a spread for each class, which is wider for a program of
few rows. Whole sources are held out: the error of a row is that of a fit without any row of its source, spread and
baseline included.

Invariants:
- A row is priced by its command line alone.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, log, sqrt
from statistics import median
from typing import Literal

from llmsys.estimate.device_profile import Number, load_device_profile
from llmsys.estimate.program_profile import ProgramFit
from llmsys.estimate.residual_model import Z90, PercentileInterval, ResidualModel, build_log_normal_interval
from tools.bench.blind_programs import find_blind_words
from tools.bench.published_row import PublishedRow, run_estimate

TimeClass = Literal["dense", "moe", "run"]
KINDS: tuple[TimeClass, ...] = ("dense", "moe", "run")
# Share of held-out rows that P10 to P90 is widened to hold: between the 80 % it is named for and 90 %.
COVERED = 0.87
# Rows of a typical program that the mean of its class counts for: the variance of a row over that between programs.
PRIOR_ROWS = 2.0


@dataclass(frozen=True)
class TimeRow:
    """A published time with what its command prints."""

    published: PublishedRow

    @property
    def name(self) -> str:
        """Name in tables."""
        return self.published.name

    @property
    def measured(self) -> float:
        """Seconds of a step, or accelerator-hours of a run."""
        return self.published.measured

    def get_option(self, name: str) -> str:
        """Return the value of an option of the command."""
        words = self.published.words
        return words[words.index(name) + 1]

    @property
    def program(self) -> str:
        """Name of the program's profile."""
        return self.get_option("--program")

    @cached_property
    def kind(self) -> TimeClass:
        """The class of constants that the row belongs to."""
        if self.published.kind == "run":
            return "run"
        counts = run_estimate(self.published.words)["parameters"]
        return "dense" if counts["active"]["all"] == counts["total"] else "moe"

    @cached_property
    def length(self) -> int:
        """Tokens of a sequence."""
        found: int = run_estimate(self.published.words)["batch"]["sequence_length"]
        return found

    @cached_property
    def modelled_time(self) -> float:
        """The P50 without the fitted factor of its class. Hours of a run keep that of its steps."""
        result = run_estimate(self.published.words)
        if self.kind == "run":
            hours: float = result["money"]["accelerator_hours"]["p50"]
            return hours / float(result["time"]["run"]["residual_factor"])
        seconds: float = result["time"]["step_seconds"]["p50"]
        return seconds / float(result["time"]["residual_factor"])

    @cached_property
    def printed_interval(self) -> PercentileInterval:
        """The interval that the command prints."""
        result = run_estimate(self.published.words)
        found = result["money"]["accelerator_hours"] if self.kind == "run" else result["time"]["step_seconds"]
        return PercentileInterval(found["p10"], found["p50"], found["p90"])

    @cached_property
    def ideal_time(self) -> float:
        """The time of 6 · N · D FLOPs at the peak, which a constant utilisation divides."""
        result = run_estimate(self.published.words)
        device = load_device_profile(self.get_option("--device"))
        number: Number = "bf16" if "bf16" in device.peak_flops else "fp16"
        tokens = result["run"]["tokens"] if self.kind == "run" else result["batch"]["tokens"]
        seconds = 6 * result["parameters"]["active"]["all"] * tokens / device.get_peak_flops(number)
        return float(seconds / 3600 if self.kind == "run" else seconds / result["time"]["ranks"])

    @property
    def log_ratio(self) -> float:
        """Natural logarithm of measured over modelled."""
        return log(self.measured / self.modelled_time)

    @cached_property
    def blind_log_ratio(self) -> float:
        """The same without constants that were fitted on rows of this model alone."""
        words = find_blind_words(self.name, self.published.words)
        return self.log_ratio if words is None else TimeRow(replace(self.published, words=words)).log_ratio


def build_time_rows(rows: Iterable[PublishedRow]) -> list[TimeRow]:
    """Return the times among published rows."""
    return [TimeRow(row) for row in rows if row.kind != "memory"]


@dataclass(frozen=True)
class ProgramFactor:
    """The factor of measured over modelled times of a program, and what it is known from."""

    factor: float
    weight: float = 0.0  # rows that it was fitted on, those of one source counted by their square root

    @property
    def widening(self) -> float:
        """Standard deviation of the next row over that of a row around a program whose factor is known exactly.

        The predictive deviation of the model that draws factors towards the mean: 1 + 1 / (PRIOR_ROWS + weight) variances.
        """
        return sqrt(1 + 1 / (PRIOR_ROWS + self.weight))


@dataclass(frozen=True)
class ClassFit:
    """Constants of one class: a factor for each program, one for all others, and the spread around a known factor."""

    other: ProgramFactor
    programs: Mapping[str, ProgramFactor]
    spread: float

    def predict_interval(self, row: TimeRow) -> PercentileInterval:
        """Return the interval of a row."""
        found = self.programs.get(row.program, self.other)
        return build_log_normal_interval(row.modelled_time * found.factor, self.spread * found.widening)


def get_source(row: TimeRow) -> str:
    """Return the report that a row is from."""
    return row.published.source


def get_model(row: TimeRow) -> str:
    """Return CONFIG and the overrides of its sizes: all words before those of the batch."""
    words = row.published.words
    return " ".join(words[1 : next(i for i, word in enumerate(words) if word.startswith("batch."))])


def fit_class(rows: Sequence[TimeRow]) -> ClassFit:
    """Fit the constants of a class; the spread is that of sources, and of models, which the fit does not know.

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
    return ClassFit(other, programs, compute_quantile(errors, COVERED) / Z90)


def fit_factors(rows: Sequence[TimeRow]) -> tuple[ProgramFactor, dict[str, ProgramFactor]]:
    """Return the mean factor of measured over modelled times, and that of each program, drawn towards the mean.

    A source of n rows counts as √n: rows of one table share its errors.

    Args:
        rows: rows of one class.

    Returns:
        Two kinds of factors. Whole runs have one only: programs of most of them are guesses.
    """
    sizes: dict[str, int] = defaultdict(int)
    for row in rows:
        sizes[row.published.source] += 1
    weights = [1 / sqrt(sizes[row.published.source]) for row in rows]
    errors = clip_outliers([row.log_ratio for row in rows])
    mean = sum(w * e for w, e in zip(weights, errors, strict=True)) / sum(weights)
    found = {}
    for program in {row.program for row in rows if row.kind != "run"}:
        own = [(w, e) for row, w, e in zip(rows, weights, errors, strict=True) if row.program == program]
        weight = sum(w for w, _ in own)
        total = PRIOR_ROWS * mean + sum(w * e for w, e in own)
        found[program] = ProgramFactor(exp(total / (PRIOR_ROWS + weight)), weight)
    return ProgramFactor(exp(mean)), found


def clip_outliers(values: Sequence[float]) -> list[float]:
    """Return values with those beyond Tukey's outer fences (three quartile distances) on the fence."""
    low, high = compute_quantile(values, 0.25), compute_quantile(values, 0.75)
    reach = 3 * (high - low)
    return [min(max(value, low - reach), high + reach) for value in values]


def compute_quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile, linear between the values."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


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
    rows: Sequence[TimeRow], peers: Sequence[TimeRow], get_group: Callable[[TimeRow], str] | None = None
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
        fits[name] = fit, median(row.ideal_time / row.measured for row in peers if group(row) != name)
    found = []
    for row in rows:
        fit, utilisation = fits[group(row)]
        found.append(HeldOutRow(row, fit.predict_interval(row), row.ideal_time / utilisation))
    return found


def list_printed_rows(rows: Sequence[TimeRow], known: Sequence[TimeRow]) -> list[HeldOutRow]:
    """Return rows of another file with the intervals that their commands print, and the baseline of the known rows."""
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
        found[kind] = ResidualModel(factor=round(fit.other.factor, 3), spread=round(spread, 3), rows=names)
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
