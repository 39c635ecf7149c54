"""A scaling law of one's own: E + A / N^alpha + B / D^beta through a ladder of runs, with honest
intervals.

The fit is Hoffmann 2022, D.2: a Huber loss on log L, from a grid of starts. Intervals come from
fitting resampled runs again (Efron 1979), so they hold what the choice of runs leaves open, and
nothing else.

The points are runs or rows of a table, each with parameters, tokens and the loss it reached.
"""

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmsys.errors import DataError
from llmsys.estimate.scaling.chinchilla import ParametricLaw
from llmsys.estimate.scaling.json_output import FittedInterval, FittedOptimum
from llmsys.estimate.scaling.law import (
    FLOPS_PER_PARAMETER_AND_TOKEN,
    Axis,
    BudgetRequest,
    FittedRange,
    LawSource,
    Optimum,
)
from llmsys.events import read_latest_events

COLUMNS = ("parameters", "tokens", "loss")


@dataclass(frozen=True)
class TrainingRun:
    """One finished run: all parameters that a token meets, training tokens, held-back loss in
    nats per token.
    """

    name: str
    parameters: float
    tokens: float
    loss: float

    @property
    def flops(self) -> float:
        """6 N D, forward and backward."""
        return FLOPS_PER_PARAMETER_AND_TOKEN * self.parameters * self.tokens


def load_training_runs(sources: Iterable[Path]) -> list[TrainingRun]:
    """Load points for a fit from run folders and CSV files.

    Args:
        sources: run folders, or CSV files with the columns parameters, tokens and loss.

    Returns:
        One point per run.

    Raises:
        DataError: a source lacks something, with its name.
    """
    points: list[TrainingRun] = []
    for source in sources:
        points += [_load_run_folder(source)] if source.is_dir() else _iter_csv_runs(source)
    return points


def _load_run_folder(folder: Path) -> TrainingRun:
    path = folder / "events.jsonl"
    if not path.exists():
        raise DataError(
            f"{folder} has no events.jsonl: it is not a run folder. Name folders that llmsys "
            "train wrote."
        )
    events = read_latest_events(path)
    start = _get_last_event(events, "start", folder)
    evaluation = _get_last_event(events, "evaluation", folder)
    if not any(event["event"] == "finish" for event in events):
        raise DataError(
            f"{folder} has not finished, so its schedule was cut short. Finish it, or omit it."
        )
    parameters = start.get("parameters_active", start.get("parameters"))
    return _parse_run(folder.name, {"parameters": parameters, **evaluation}, folder)


def _get_last_event(events: list[dict[str, Any]], kind: str, folder: Path) -> dict[str, Any]:
    found = [event for event in events if event["event"] == kind]
    if not found:
        raise DataError(
            f"{folder} has no {kind} event, so nothing was measured. Train it to its end, or omit "
            "it."
        )
    return found[-1]


def _iter_csv_runs(path: Path) -> Iterator[TrainingRun]:
    try:
        with path.open(newline="") as opened:
            rows = list(csv.DictReader(opened))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"{path} cannot be read: {error}. Name a run folder or a CSV file."
        ) from error
    if not rows or not set(COLUMNS) <= rows[0].keys():
        raise DataError(
            f"{path} needs the columns {', '.join(COLUMNS)}, and at least one row. Write names in "
            "line 1."
        )
    for number, row in enumerate(rows, 2):
        yield _parse_run(row.get("name") or f"{path.name}:{number}", row, f"{path}:{number}")


def _parse_run(name: str, values: dict[str, Any], where: object) -> TrainingRun:
    try:
        numbers = {column: float(values[column]) for column in COLUMNS}
    except (KeyError, TypeError, ValueError):
        shown = json.dumps({column: values.get(column) for column in COLUMNS})
        raise DataError(
            f"{where}: {shown} does not give {', '.join(COLUMNS)} as numbers."
        ) from None
    if min(numbers.values()) <= 0:
        raise DataError(f"{where}: {numbers} must all be positive.")
    return TrainingRun(name, **numbers)


# Residuals of log L above it count linearly, so that one bad run does not bend the law (Hoffmann
# 2022, D.2).
HUBER_WIDTH = 1e-3

UNKNOWNS = ("E", "A", "B", "alpha", "beta")
RESAMPLES = 200
# log E, log A, log B, alpha, beta of each start.
STARTS = tuple(
    product((-1.0, 0.0, 0.7), (2.0, 6.0, 10.0), (2.0, 6.0, 10.0), (0.2, 0.4, 0.7), (0.2, 0.4, 0.7))
)

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class LawFit:
    """The law, an interval of 5 to 95 % for each of its constants, and the constants of every
    resampling.
    """

    law: ParametricLaw
    intervals: dict[str, tuple[float, float]]
    resampled: tuple[ParametricLaw, ...]
    residuals: tuple[float, ...]
    """log(measured / fitted) of each point."""

    def compute_interval(self, of: Callable[[ParametricLaw], float]) -> tuple[float, float]:
        """5 to 95 % of any number that follows from the law, such as the best size for a budget."""
        values = [of(law) for law in self.resampled]
        low, high = np.percentile(values, (5, 95))
        return float(low), float(high)

    @property
    def largest_flops(self) -> float:
        """FLOPs of the largest run."""
        return self.law.origin.spans[2].high

    def find_optimum(self, flops: float) -> FittedOptimum:
        """The best size and tokens for a budget, with intervals."""
        best = self.law.find_optimum(BudgetRequest(flops))

        def build_interval(
            value: float | None, of: Callable[[ParametricLaw], float]
        ) -> FittedInterval:
            low, high = self.compute_interval(of)
            return FittedInterval(best=value or 0.0, low=low, high=high)

        def find_best(law: ParametricLaw) -> Optimum:
            return law.find_optimum(BudgetRequest(flops))

        return FittedOptimum(
            flops=flops,
            parameters=build_interval(
                best.parameters, lambda law: law.compute_best_parameters(flops)
            ),
            tokens=build_interval(best.tokens, lambda law: find_best(law).tokens),
            loss=build_interval(best.loss, lambda law: find_best(law).loss or 0.0),
            times_beyond=max(1.0, flops / self.largest_flops),
        )


def fit_law(points: Sequence[TrainingRun], resamples: int = RESAMPLES, seed: int = 0) -> LawFit:
    """Fit a parametric law to training runs.

    Args:
        points: runs with parameters, tokens and loss.
        resamples: bootstrap samples for the intervals.
        seed: seed of the bootstrap.

    Returns:
        The law with its intervals.

    Raises:
        DataError: the points cannot tell its five constants apart.
    """
    _require_enough_runs(points)
    sizes, tokens, losses = (
        np.array([getattr(p, key) for p in points]) for key in ("parameters", "tokens", "loss")
    )
    best = _fit_constants(sizes, tokens, losses, STARTS)
    generator = np.random.default_rng(seed)
    again: list[Vector] = []
    while len(again) < resamples:
        chosen = generator.integers(len(points), size=len(points))
        # Fewer different runs would not determine the constants.
        if len({(sizes[i], tokens[i]) for i in chosen}) > len(UNKNOWNS):
            again.append(
                _fit_constants(sizes[chosen], tokens[chosen], losses[chosen], [tuple(best)])
            )
    law, laws = _build_law(best, points), tuple(_build_law(one, points) for one in again)
    columns = np.array([_list_constants(one) for one in laws])
    low, high = np.percentile(columns, (5, 95), axis=0)
    intervals = {name: (float(a), float(b)) for name, a, b in zip(UNKNOWNS, low, high, strict=True)}
    residuals = np.log(losses) - _predict_log_losses(best, sizes, tokens)[0]
    return LawFit(law, intervals, laws, tuple(map(float, residuals)))


def _require_enough_runs(points: Sequence[TrainingRun]) -> None:
    distinct = len({(point.parameters, point.tokens) for point in points})
    for what, count, least in (
        ("runs of different size or length", distinct, len(UNKNOWNS) + 2),
        ("sizes", len({point.parameters for point in points}), 3),
        ("token counts", len({point.tokens for point in points}), 3),
    ):
        if count < least:
            raise DataError(
                f"{count} {what} cannot determine the {len(UNKNOWNS)} constants of a law. Use at "
                f"least {least}: train every size for several numbers of tokens, each to the end "
                "of its schedule."
            )


def _fit_constants(
    sizes: Vector, tokens: Vector, losses: Vector, starts: Sequence[tuple[float, ...]]
) -> Vector:
    """The constants with the smallest Huber loss over all starts."""
    minimize = _load_minimizer()
    target = np.log(losses)

    def compute_objective(constants: Vector) -> tuple[float, Vector]:
        log_loss, slopes = _predict_log_losses(constants, sizes, tokens)
        residual = log_loss - target
        clipped = np.clip(residual, -HUBER_WIDTH, HUBER_WIDTH)
        # Scaled by 1 / width², so that the optimizer's tolerances fit.
        value = (clipped * (residual - clipped / 2)).sum() / HUBER_WIDTH**2
        return float(value), slopes.T @ clipped / HUBER_WIDTH**2

    bounds = [(-10, 5), (-10, 40), (-10, 40), (0.01, 2), (0.01, 2)]
    results = [
        minimize(
            compute_objective,
            np.array(start),
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            options={"maxiter": 2000},
        )
        for start in starts
    ]
    found: Vector = min(results, key=lambda result: result.fun).x
    return found


def _load_minimizer() -> Any:
    """Load scipy's optimizer with one thread of its BLAS, which reads the variable as it is loaded.

    Its matrices have a few rows: on two cores threads took eleven times the CPU time.
    """
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ.setdefault(name, "1")
    try:
        from scipy.optimize import minimize  # nothing else of the estimate needs it
    finally:
        if before is None:
            del os.environ[name]
    return minimize


def _predict_log_losses(constants: Vector, sizes: Vector, tokens: Vector) -> tuple[Vector, Vector]:
    """log L of each point, and its slopes along log E, log A, log B, alpha and beta: (points,),
    (points, 5).
    """
    log_e, log_a, log_b, alpha, beta = constants
    log_n, log_d = np.log(sizes), np.log(tokens)
    terms = np.stack([np.full_like(log_n, log_e), log_a - alpha * log_n, log_b - beta * log_d])
    log_loss = np.logaddexp.reduce(terms, axis=0)
    # The slopes of a log-sum-exp are the softmax of its terms.
    of_e, of_a, of_b = np.exp(terms - log_loss)
    return log_loss, np.stack([of_e, of_a, of_b, -of_a * log_n, -of_b * log_d], axis=1)


def _build_law(constants: Vector, points: Sequence[TrainingRun]) -> ParametricLaw:
    e, a, b = (float(value) for value in np.exp(constants[:3]))
    seen: dict[Axis, list[float]] = {
        "parameters": [point.parameters for point in points],
        "tokens": [point.tokens for point in points],
        "FLOPs": [point.flops for point in points],
    }
    spans = tuple(FittedRange(axis, min(values), max(values)) for axis, values in seen.items())
    origin = LawSource(f"your {len(points)} runs", "active parameters", spans)
    return ParametricLaw("yours", origin, e, a, b, float(constants[3]), float(constants[4]))


def _list_constants(law: ParametricLaw) -> tuple[float, ...]:
    return law.irreducible, law.parameter_factor, law.token_factor, law.alpha, law.beta
