"""What was given up after every try: one file per task that names it, how often it was tried, and the traceback.

Writes quarantine/ of a dataset folder; gives what stands there. Promises: a task that succeeds later takes its file
away; whatever stands there is missing from the dataset, is counted in its manifest, and is tried again by the next run.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data_pipeline.core.document_schema import compute_document_id
from data_pipeline.core.funnel import FunnelCounts
from data_pipeline.core.journal import TaskRecord
from data_pipeline.executors.base import TaskFailed
from data_pipeline.stages.split_inputs import InputBlock
from llmsys.atomic_write import write_bytes_atomically
from llmsys.errors import DataError
from llmsys.redact import redact_secrets

QUARANTINE = "quarantine"


class Quarantine:
    """The given-up tasks of one dataset folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / QUARANTINE

    def add_task(self, task: str, failed: TaskFailed, tries: int, result: dict[str, Any]) -> None:
        """Note a task that was given up, and the place that its result without an input names."""
        place = {name: skip[name] for skip in result.get("skipped", [])[:1] for name in ("file", "offset")}
        entry = {"task": task, **place, "tries": tries, "cause": failed.cause, "message": failed.message}
        text = json.dumps({**entry, "traceback": failed.traceback}, indent=1, ensure_ascii=False)
        write_bytes_atomically(self._get_entry_path(task), (text + "\n").encode("utf-8", "replace"))

    def remove_others(self, stage: str, tasks: Iterable[str]) -> None:
        """Forget the tasks of a stage that are not among these."""
        kept = {self._get_entry_path(task) for task in tasks}
        for path in self.folder.glob(f"{stage}.*.json"):
            if path not in kept:
                path.unlink()

    def _get_entry_path(self, task: str) -> Path:
        return self.folder / f"{task.replace('/', '.')}.json"


def read_quarantine(folder: Path) -> list[dict[str, Any]]:
    """Return what was given up in a dataset folder, in the order of the tasks."""
    return [json.loads(path.read_bytes()) for path in sorted((folder / QUARANTINE).glob("*.json"))]


def read_quarantine_rows(folder: Path) -> list[dict[str, Any]]:
    """Return what was given up as rows of dropped documents, each with its traceback in place of a text."""
    return [_build_dropped_row(entry) for entry in read_quarantine(folder)]


def _build_dropped_row(entry: dict[str, Any]) -> dict[str, Any]:
    stage = "read" if entry["task"].startswith("extract/") else "extract"  # as the funnel counts it
    reason = format_quarantine_reason(entry["message"], entry["tries"])
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


def format_quarantine_reason(message: str, tries: int) -> str:
    """Say in one line why an input is not in the dataset: the same words whoever tried."""
    first = message.splitlines()[0] if message else "no message"
    return f"quarantined after {tries} {'tries' if tries > 1 else 'try'}: {first}"


# --- what stands in a dataset for an input that is not there ---


def build_empty_extraction(block: InputBlock, reason: str) -> dict[str, Any]:
    """Return the result of an extraction that was given up: one skip, at the beginning of the block."""
    skip = {"file": redact_secrets(block.source), "offset": block.start, "reason": reason, "count": 1}
    return {"records": 0, "pages": 0, "html_bytes": 0, "skipped": [skip], "noted": []}


def build_empty_judgement(pages: int, html_bytes: int, reason: str) -> dict[str, Any]:
    """Return the result of judging pages that was given up: all of them dropped, for this reason."""
    tally = FunnelCounts()
    tally.add_amounts("extract", documents_in=pages, bytes_in=html_bytes)
    tally.add_drop_count("extract", reason, pages)
    return {"tally": tally.to_dict(), "languages": {}, "kept_batches": [], "dropped_batches": []}


def drop_quarantined(records: list[TaskRecord], names: list[str]) -> tuple[list[TaskRecord], list[str]]:
    """Return the records that have outputs, with their names; DataError when none has."""
    whole = [(record, name) for record, name in zip(records, names, strict=True) if record.outputs]
    if not whole:
        raise DataError(
            "every input was quarantined, so that nothing is left. Read what quarantine/ of the dataset folder says "
            "about each, mend the cause, then run the same command again: it tries them again."
        )
    return [record for record, _ in whole], [name for _, name in whole]
