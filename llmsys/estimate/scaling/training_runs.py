"""The points of one's own ladder: runs or rows of a table, each with parameters, tokens and the loss it reached."""

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmsys.errors import DataError
from llmsys.estimate.scaling.law import FLOPS_PER_PARAMETER_AND_TOKEN
from llmsys.events import read_latest_events

COLUMNS = ("parameters", "tokens", "loss")


@dataclass(frozen=True)
class TrainingRun:
    """One finished run: all parameters that a token meets, training tokens, held-back loss in nats per token."""

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
        raise DataError(f"{folder} has no events.jsonl: it is not a run folder. Name folders that llmsys train wrote.")
    events = read_latest_events(path)
    start = _get_last_event(events, "start", folder)
    evaluation = _get_last_event(events, "evaluation", folder)
    if not any(event["event"] == "finish" for event in events):
        raise DataError(f"{folder} has not finished, so its schedule was cut short. Finish it, or omit it.")
    parameters = start.get("parameters_active", start.get("parameters"))
    return _parse_run(folder.name, {"parameters": parameters, **evaluation}, folder)


def _get_last_event(events: list[dict[str, Any]], kind: str, folder: Path) -> dict[str, Any]:
    found = [event for event in events if event["event"] == kind]
    if not found:
        raise DataError(f"{folder} has no {kind} event, so nothing was measured. Train it to its end, or omit it.")
    return found[-1]


def _iter_csv_runs(path: Path) -> Iterator[TrainingRun]:
    try:
        with path.open(newline="") as opened:
            rows = list(csv.DictReader(opened))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}. Name a run folder or a CSV file.") from error
    if not rows or not set(COLUMNS) <= rows[0].keys():
        raise DataError(f"{path} needs the columns {', '.join(COLUMNS)}, and at least one row.")
    for number, row in enumerate(rows, 2):
        yield _parse_run(row.get("name") or f"{path.name}:{number}", row, f"{path}:{number}")


def _parse_run(name: str, values: dict[str, Any], where: object) -> TrainingRun:
    try:
        numbers = {column: float(values[column]) for column in COLUMNS}
    except (KeyError, TypeError, ValueError):
        shown = json.dumps({column: values.get(column) for column in COLUMNS})
        raise DataError(f"{where}: {shown} does not give {', '.join(COLUMNS)} as numbers.") from None
    if min(numbers.values()) <= 0:
        raise DataError(f"{where}: {numbers} must all be positive.")
    return TrainingRun(name, **numbers)
