"""Records of finished tasks, and the job that describes what it wrote."""

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.core.staging import find_output
from data_pipeline.executors.base import Job, Report
from llmsys.token_shards import compute_file_digest


@dataclass(frozen=True)
class TaskOutput:
    """One published file. `name` is relative to the dataset folder; `digest` is xxh3_128 in hex."""

    name: str
    size: int
    modified_ns: int
    digest: str


@dataclass(frozen=True)
class TaskRecord:
    """One finished task. `packed` is the return value of its function as compressed JSON."""

    key: str
    outputs: Sequence[TaskOutput]
    packed: bytes

    @classmethod
    def from_result(cls, key: str, outputs: Sequence[TaskOutput], result: dict[str, Any]) -> "TaskRecord":
        """Return the record of a task from the return value of its function."""
        return cls(key, outputs, zlib.compress(json.dumps(result, separators=(",", ":")).encode(), 1))

    @property
    def result(self) -> dict[str, Any]:
        """The return value of the task. It is parsed at each call: a list of records then stays small."""
        content: dict[str, Any] = json.loads(zlib.decompress(self.packed))
        return content

    @property
    def digests(self) -> list[str]:
        """Digests of the outputs, for the keys of tasks that read them."""
        return [output.digest for output in self.outputs]


def describe_output(folder: Path, name: str) -> TaskOutput:
    """Return size, time and digest of an output; its bytes are read.

    Args:
        folder: Dataset folder.
        name: Output, relative to the folder.

    Returns:
        The description that a record holds.
    """
    path = find_output(folder, name)
    status = path.stat()
    return TaskOutput(name, status.st_size, status.st_mtime_ns, compute_file_digest(path))


@dataclass(frozen=True)
class RecordedJob:
    """A job that also describes its outputs: the worker that wrote them hashes them, and the driver reads no output."""

    job: Job
    folder: Path
    outputs: tuple[str, ...]

    def __call__(self, report: Report) -> dict[str, Any]:
        """Run the job and return what `pack_result` returns."""
        result = self.job(report)
        described = [describe_output(self.folder, name) for name in self.outputs]
        return pack_result(result, described)


def pack_result(result: dict[str, Any], outputs: Sequence[TaskOutput]) -> dict[str, Any]:
    """Return what a worker sends of a finished task. The driver stores it without parsing it.

    Args:
        result: Return value of the task's function.
        outputs: The files it published.

    Returns:
        Values that JSON can hold: `packed`, `again` (whether the storage failed midway) and `outputs`.
    """
    packed = b64encode(TaskRecord.from_result("", (), result).packed).decode()
    return {"packed": packed, "again": bool(result.get("again")), "outputs": [vars(output) for output in outputs]}


def unpack_result(key: str, returned: dict[str, Any]) -> TaskRecord:
    """Return the record of a task.

    Args:
        key: Key of the task.
        returned: What `pack_result` returned.

    Returns:
        The record.
    """
    return TaskRecord(key, [TaskOutput(**output) for output in returned["outputs"]], b64decode(returned["packed"]))
