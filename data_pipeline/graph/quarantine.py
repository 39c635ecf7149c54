"""Quarantine of tasks that failed every attempt.

Reads and writes quarantine/ of a dataset folder: one JSON file per task, with the number of
attempts and the traceback.

Invariants:
    - A task that succeeds later removes its file.
    - A quarantined input is missing from the dataset, counted in the manifest, and tried again by
      the next run.
"""

import json
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from llmsys.data_pipeline.core.document_schema import compute_document_id
from llmsys.data_pipeline.core.funnel import FunnelCounts
from llmsys.data_pipeline.core.task_record import TaskRecord
from llmsys.data_pipeline.executors.base import TaskFailed, select_items
from llmsys.data_pipeline.graph.tasks import Task
from llmsys.data_pipeline.stages.split_inputs import InputBlock
from llmsys.errors import DataError
from llmsys.log import get_logger, redact_secrets
from llmsys.storage.local_files import write_bytes_atomically

QUARANTINE = "quarantine"

_log = get_logger(__name__)


class Quarantine:
    """Quarantined tasks of one dataset folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / QUARANTINE

    def add_task(
        self, task: str, failed: TaskFailed, attempts: int, result: dict[str, Any]
    ) -> None:
        """Record a task that failed every attempt, with the location in the input that its
        fallback result names.
        """
        location = {
            name: skip[name]
            for skip in result.get("skipped", [])[:1]
            for name in ("file", "offset")
        }
        entry = {
            "task": task,
            **location,
            "attempts": attempts,
            "cause": failed.cause,
            "message": failed.message,
        }
        # File names in messages may hold bytes that are not UTF-8.
        text = json.dumps({**entry, "traceback": failed.traceback}, indent=1, ensure_ascii=False)
        write_bytes_atomically(self._get_entry_path(task), (text + "\n").encode("utf-8", "replace"))

    def remove_others(self, stage: str, tasks: Iterable[str]) -> None:
        """Remove the entries of a stage whose tasks are not among `tasks`."""
        kept = {self._get_entry_path(task) for task in tasks}
        for path in self.folder.glob(f"{stage}.*.json"):
            if path not in kept:
                path.unlink()

    def _get_entry_path(self, task: str) -> Path:
        return self.folder / f"{task.replace('/', '.')}.json"


def read_quarantine(folder: Path) -> list[dict[str, Any]]:
    """Read the quarantine entries of a dataset.

    Args:
        folder: Dataset folder.

    Returns:
        One mapping per task (task, attempts, cause, message, traceback, often file and offset),
        sorted by task.
    """
    return [json.loads(path.read_bytes()) for path in sorted((folder / QUARANTINE).glob("*.json"))]


def read_quarantine_rows(folder: Path) -> list[dict[str, Any]]:
    """Read the quarantine entries of a dataset as dropped documents.

    Args:
        folder: Dataset folder.

    Returns:
        Rows of `DROPPED_SCHEMA` with the traceback as text.
    """
    return [_build_dropped_row(entry) for entry in read_quarantine(folder)]


def _build_dropped_row(entry: dict[str, Any]) -> dict[str, Any]:
    stage = "read" if entry["task"].startswith("extract/") else "extract"  # as the funnel counts it
    reason = format_quarantine_reason(entry["message"], entry["attempts"])
    return {
        **dict.fromkeys(("value", "threshold")),
        "id": compute_document_id(entry["task"], "", reason.encode()),
        "url": "",
        "file": entry.get("file", entry["task"]),
        "offset": entry.get("offset", 0),
        **dict.fromkeys(("stage", "rule"), stage),
        "test": reason,
        "reason": f"{reason}; task {entry['task']}",
        "bytes": len(entry["traceback"].encode()),
        "text": entry["traceback"],
    }


def format_quarantine_reason(message: str, attempts: int) -> str:
    """Return one line that says why an input is not in the dataset. It does not depend on the
    executor.
    """
    first = message.splitlines()[0] if message else "no message"
    return f"quarantined after {attempts} {'attempts' if attempts > 1 else 'attempt'}: {first}"


class FailureSummary:
    """The number of tasks that failed for good, and the first of them by name."""

    def __init__(self) -> None:
        self.count = 0
        self.first: tuple[str, TaskFailed] | None = None

    def add(self, task: Task, failed: TaskFailed) -> None:
        """Count a failure and log its traceback."""
        self.count += 1
        if failed.traceback:
            _log.error("task %s failed:\n%s", task.name, failed.traceback)
        if self.first is None or task.name < self.first[0]:
            self.first = task.name, failed

    def build_error(self, stage: str, tasks: int) -> DataError:
        """Return the error that names the first failure."""
        assert self.first is not None
        name, first = self.first
        if tasks == 1 and not first.traceback:
            return DataError(first.message)
        message = first.message if first.message.endswith(".") else f"{first.message}."
        return DataError(
            f"{self.count} of {tasks} tasks of stage {stage} failed, the first is {name}: "
            f"{message} Results of the other tasks are kept: run the same command again to run "
            "only the missing ones."
        )


# --- results of inputs that are not in the dataset ---


def build_empty_extraction(block: InputBlock, reason: str) -> dict[str, Any]:
    """Return the result of a quarantined extraction: one skip at the start of its block.

    Args:
        block: The input block.
        reason: One line, see `format_quarantine_reason`.

    Returns:
        A result as of `extract_file`, without pages.
    """
    skip = {
        "file": redact_secrets(block.source),
        "offset": block.start,
        "reason": reason,
        "count": 1,
    }
    return {"records": 0, "pages": 0, "html_bytes": 0, "skipped": [skip], "noted": []}


def build_empty_filtering(pages: int, html_bytes: int, reason: str) -> dict[str, Any]:
    """Return the result of quarantined filtering: all pages dropped for one reason.

    Args:
        pages: Pages of the block.
        html_bytes: Their bytes before extraction.
        reason: One line, see `format_quarantine_reason`.

    Returns:
        A result as of `apply_rules_to_file`, without documents.
    """
    tally = FunnelCounts()
    tally.add_amounts("extract", documents_in=pages, bytes_in=html_bytes)
    tally.add_drop_count("extract", reason, pages)
    return {"tally": tally.to_dict(), "languages": {}, "kept_batches": [], "dropped_batches": []}


def drop_quarantined(
    records: Sequence[TaskRecord], names: Sequence[str]
) -> tuple[Sequence[TaskRecord], Sequence[str], Sequence[int]]:
    """Remove the records of quarantined tasks.

    Args:
        records: Records of a stage.
        names: Names of their files, in the same order.

    Returns:
        The records that have outputs, their names, and their indices.

    Raises:
        DataError: If no record has outputs.
    """
    # A quarantined task has a record without outputs.
    remaining = array("q", (index for index, record in enumerate(records) if record.outputs))
    if not remaining:
        raise DataError(
            "every input was quarantined. Read the tracebacks in quarantine/ of the dataset "
            "folder, fix the cause, then run the same command again to retry them."
        )
    if len(remaining) == len(records):
        return records, names, range(len(records))
    return select_items(records, remaining), select_items(names, remaining), remaining
