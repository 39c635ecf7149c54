"""Journal of finished tasks, which makes a preparation resumable.

Reads and writes journal/ of a dataset folder. A record holds the key of its task, which is a digest of configuration,
inputs and code version, and the size, time and digest of each output.

Invariants:
    - A task runs again when its key changed or an output is missing or different.
    - An unreadable record counts as none.
    - Records hold file times. Only their bytes and those of events.jsonl differ between equal runs.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from data_pipeline.core.staging import discard_stale, find_output
from llmsys.token_shards import compute_file_digest, write_bytes_atomically

JOURNAL = "journal"


class TaskOutput(BaseModel):
    """One published file. `name` is relative to the dataset folder; `digest` is xxh3_128 in hex."""

    name: str
    size: int
    modified_ns: int
    digest: str


class TaskRecord(BaseModel):
    """One finished task. `result` is the return value of its function."""

    key: str
    outputs: list[TaskOutput]
    result: dict[str, Any]

    @property
    def digests(self) -> list[str]:
        """Digests of the outputs, for the keys of tasks that read them."""
        return [output.digest for output in self.outputs]


class Journal:
    """Task records of one dataset folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._inputs = _read_json(folder / JOURNAL / "inputs.json")

    def find_record(self, name: str, key: str) -> TaskRecord | None:
        """Return the record of a task if its key matches and its outputs are unchanged, else None."""
        try:
            record = TaskRecord.model_validate_json(self._get_record_path(name).read_bytes())
        except (OSError, ValidationError):
            return None
        if record.result.get("again"):  # the storage failed midway; the input may be readable now
            return None
        is_current = record.key == key and all(self._is_unchanged(output) for output in record.outputs)
        return record if is_current else None

    def save_record(self, name: str, key: str, outputs: Iterable[str], result: dict[str, Any]) -> TaskRecord:
        """Record a finished task and the files it published."""
        described = [self._describe_output(output) for output in outputs]
        record = TaskRecord(key=key, outputs=described, result=result)
        write_bytes_atomically(self._get_record_path(name), record.model_dump_json().encode())
        return record

    def get_input_digest(self, path: Path) -> str:
        """Return the digest of an input file, "" if it is unreadable. Unchanged files are not hashed again."""
        try:
            status = path.stat()
            known = self._inputs.get(str(path))
            # The inode reveals a file that was replaced within the resolution of its time.
            stamp = [status.st_size, status.st_mtime_ns, status.st_ino]
            if known and known[:3] == stamp:
                return str(known[3])
            digest = compute_file_digest(path)
        except OSError:
            return ""
        self._inputs[str(path)] = [*stamp, digest]
        write_bytes_atomically(self.folder / JOURNAL / "inputs.json", json.dumps(self._inputs, indent=1).encode())
        return digest

    def remove_stale_records(self, stage: str, names: Iterable[str]) -> None:
        """Remove the records of a stage's tasks that no longer exist."""
        kept = {self._get_record_path(name) for name in names}
        for path in (self.folder / JOURNAL / stage).glob("*.json"):
            if path not in kept:
                path.unlink()

    def _get_record_path(self, name: str) -> Path:
        return self.folder / JOURNAL / f"{name}.json"

    def _describe_output(self, name: str) -> TaskOutput:
        path = find_output(self.folder, name)
        status = path.stat()
        return TaskOutput(
            name=name, size=status.st_size, modified_ns=status.st_mtime_ns, digest=compute_file_digest(path)
        )

    def _is_unchanged(self, output: TaskOutput) -> bool:
        staged, path = find_output(self.folder, output.name), self.folder / output.name
        # After an interrupted rerun the staged or the published file may match the record.
        if staged != path:
            if _is_same(staged, output):
                return True
            discard_stale(self.folder, output.name)  # its task was killed before it wrote a record
        return _is_same(path, output)


def _is_same(path: Path, output: TaskOutput) -> bool:
    """Return whether a file has the size and the time or digest of its record."""
    try:
        status = path.stat()
        if status.st_size != output.size:
            return False
        # Copied folders have other times: compare contents before running the task again.
        return status.st_mtime_ns == output.modified_ns or compute_file_digest(path) == output.digest
    except OSError:
        return False


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def compute_json_digest(*values: Any) -> str:
    """Hash values that JSON can hold.

    Args:
        *values: Plain values. The order of mapping keys does not matter.

    Returns:
        32 hex digits (blake2b, 128 bits).
    """
    text = json.dumps(values, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def remove_partial_files(folder: Path) -> None:
    """Remove the temporary files of killed writers.

    Args:
        folder: Dataset folder. Its lock must be held: another live writer would lose its files.
    """
    for path in folder.rglob(".*.tmp"):
        path.unlink(missing_ok=True)
