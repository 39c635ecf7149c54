"""The whole matrix on this machine, and the table that a person reads."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from llmsys.doctor.cells import RECOMPUTE, ParityCase
from llmsys.doctor.oracle import Trajectory, compute_reference_trajectory
from llmsys.doctor.parity import TrajectoryDistance, compare_to_reference
from llmsys.doctor.ranks import TaskFailure, run_tasks

TIMEOUT_SECONDS = 120.0
"""How long one cell of a tiny model may take: a hundred times what it does."""

ORACLE_FACTOR = 60.0
"""How many times as long as the oracle a cell may take: ranks share cores, and 16 bits can be slow."""


@dataclass(frozen=True)
class ParityResult:
    """A cell with its distance, or with why there is none."""

    cell: ParityCase
    distance: TrajectoryDistance | None
    failure: str = ""

    @property
    def has_passed(self) -> bool:
        """Whether every number is within its limit."""
        return self.distance is not None and self.distance.passed

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "cell": self.cell.title,
            "passed": self.has_passed,
            "distance": None if self.distance is None else self.distance.to_dict(),
            "failure": self.failure,
        }


def run_parity(cells: Sequence[ParityCase], told: Callable[[ParityResult], None]) -> list[ParityResult]:
    """Every cell on its number of ranks, in order of ranks; `told` hears of each as it is done."""
    began = time.monotonic()
    expected = {cell.parity_model.name: compute_reference_trajectory(cell.parity_model) for cell in {one.parity_model.name: one for one in cells}.values()}
    timeout_seconds = max(TIMEOUT_SECONDS, ORACLE_FACTOR * (time.monotonic() - began) / max(len(expected), 1))
    outcomes = []
    for ranks in sorted({cell.ranks for cell in cells}):
        chosen = [cell for cell in cells if cell.ranks == ranks]
        for outcome in _iter_results(ranks, chosen, expected, timeout_seconds):
            outcomes.append(outcome)
            told(outcome)
    return outcomes


def _iter_results(
    ranks: int, cells: Sequence[ParityCase], expected: dict[str, Trajectory], timeout_seconds: float
) -> Iterator[ParityResult]:
    task = partial(_compare_case, list(cells), expected)
    for number, result in run_tasks(task, range(len(cells)), ranks, timeout_seconds):
        if isinstance(result, TaskFailure):
            yield ParityResult(cells[number], None, str(result))
        else:
            yield ParityResult(cells[number], result)


def _compare_case(cells: list[ParityCase], expected: dict[str, Trajectory], number: int) -> TrajectoryDistance:
    cell = cells[number]
    return compare_to_reference(cell, expected[cell.parity_model.name])


def format_parity_table(outcomes: Sequence[ParityResult]) -> str:
    """A row per ranks, engine and layout; in each column the largest difference of a gradient, or FAIL."""
    rows: dict[str, dict[tuple[str, str], list[ParityResult]]] = defaultdict(lambda: defaultdict(list))
    for one in outcomes:
        rows[one.cell.placement][one.cell.precision, one.cell.recompute].append(one)
    precisions = list(dict.fromkeys(one.cell.precision for one in outcomes))
    columns = [(precision, recompute) for precision in precisions for recompute in RECOMPUTE]
    width = max(len(where) for where in rows) + 2
    head = "".join(f"{f'{precision} {recompute}':>16}" for precision, recompute in columns)
    lines = [f"{'ranks engine layout':<{width}}{head}"]
    for where, cells in rows.items():
        lines.append(f"{where:<{width}}" + "".join(f"{_format_entry(cells.get(column, [])):>16}" for column in columns))
    return "\n".join(lines)


def _format_entry(outcomes: list[ParityResult]) -> str:
    if not outcomes:
        return "–"
    if not all(one.has_passed for one in outcomes):
        return "FAIL"
    return f"{max(one.distance.gradient for one in outcomes if one.distance is not None):.0e}"


def iter_failures(outcomes: Sequence[ParityResult]) -> Iterator[str]:
    """What is wrong with each cell that failed."""
    for one in outcomes:
        if one.distance is None:
            yield f"{one.cell.title}: {one.failure}"
        elif not one.has_passed:
            found = one.distance
            yield (
                f"{one.cell.title}: {found.worst} is off (loss {found.loss:.1e}, norm {found.norm:.1e}, "
                f"gradient {found.gradient:.1e}, weights {found.weights:.1e}, moments {found.moments:.1e})"
            )
