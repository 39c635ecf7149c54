"""Records of finished tasks, and lists of files, kept in Arrow files so that they do not grow in
memory.

Records of finished tasks, and the job that describes what it wrote.

Lists of files that tasks read, kept in a file of their own.

A task that reads every file of a stage is pickled with the name of the list, and millions of tasks
and files take no memory in the driver.

Reads and writes uncompressed Arrow files, which are mapped. Names are relative to the folder of the
dataset.
"""

import filecmp
import json
import os
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa

from llmsys.data_pipeline.core.staging import JOURNAL, LISTS, find_output
from llmsys.data_pipeline.executors.base import Job, Report
from llmsys.dataset.token_shards import compute_file_digest
from llmsys.storage.arrow_file import ArrowFileWriter, map_file, open_arrow

ROWS_PER_BATCH = 4_096
LIST_FOLDER = f"{JOURNAL}/{LISTS}"
_NAMES = pa.schema([("name", pa.binary())])  # file names may hold bytes that are not UTF-8


class FileRows(Sequence[dict[str, Any]]):
    """Rows of a list; picklable by name. One batch of them is in memory."""

    def __init__(self, path: Path) -> None:
        """Read the list that `write_rows` wrote."""
        self.path = path
        self._latest: tuple[int, list[dict[str, Any]]] = (-1, [])

    @cached_property
    def _arrow(self) -> pa.RecordBatchFileReader:
        return open_arrow(self.path, map_file(self.path))

    @cached_property
    def _length(self) -> int:
        batches = self._arrow.num_record_batches
        return (
            (batches - 1) * ROWS_PER_BATCH + self._arrow.get_batch(batches - 1).num_rows
            if batches
            else 0
        )

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._length

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        """Return one row, or a list of them."""
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._length))]
        batch, row = divmod(range(self._length)[index], ROWS_PER_BATCH)
        if self._latest[0] != batch:
            self._latest = batch, self._arrow.get_batch(batch).to_pylist()
        return self._latest[1][row]

    def read_numbers(self, column: str) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return a column of numbers, (rows,) int64."""
        batches = [self._arrow.get_batch(index) for index in range(self._arrow.num_record_batches)]
        return np.concatenate(
            [np.zeros(0, np.int64), *(batch.column(column).to_numpy() for batch in batches)]
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the name alone."""
        return {"path": self.path, "_latest": (-1, [])}


class FileList(Sequence[Path]):
    """Paths of the files of a stage; picklable by the name of the list."""

    def __init__(self, folder: Path, rows: FileRows) -> None:
        """List the files that the column `name` names, relative to `folder`."""
        self._folder, self._rows = folder, rows

    @property
    def name(self) -> str:
        """The name of the list."""
        return self._rows.path.stem

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Path: ...
    @overload
    def __getitem__(self, index: slice) -> list[Path]: ...
    def __getitem__(self, index: int | slice) -> Path | list[Path]:
        """Return one path, or a list of them."""
        if isinstance(index, slice):
            return [self._folder / os.fsdecode(row["name"]) for row in self._rows[index]]
        return self._folder / os.fsdecode(self._rows[index]["name"])


def write_rows(path: Path, schema: pa.Schema, rows: Iterable[dict[str, Any]]) -> FileRows:
    """Write a list.

    Args:
        path: The file to write.
        schema: Columns of the list.
        rows: Values by column; they are taken one by one.

    Returns:
        The list, which reads the file.
    """
    aside = path.with_name(f".{path.name}.new.tmp")
    with ArrowFileWriter(aside, schema) as writer:
        waiting: list[dict[str, Any]] = []
        for row in rows:
            waiting.append(row)
            if len(waiting) == ROWS_PER_BATCH:
                writer.write(pa.RecordBatch.from_pylist(waiting, schema))
                waiting = []
        if waiting:
            writer.write(pa.RecordBatch.from_pylist(waiting, schema))
    if path.exists() and filecmp.cmp(aside, path, shallow=False):
        aside.unlink()  # a run that changes nothing leaves every file as it is
    else:
        aside.replace(path)
    return FileRows(path)


def write_file_list(folder: Path, name: str, files: Iterable[str]) -> FileList:
    """Write the list of files that the tasks of a stage read.

    Args:
        folder: Dataset folder.
        name: Name of the list, unique among the stages.
        files: Names, relative to the folder.

    Returns:
        The paths.
    """
    rows = ({"name": os.fsencode(file)} for file in files)
    return FileList(folder, write_rows(folder / LIST_FOLDER / f"{name}.arrow", _NAMES, rows))


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
    def from_result(
        cls, key: str, outputs: Sequence[TaskOutput], result: dict[str, Any]
    ) -> "TaskRecord":
        """Return the record of a task from the return value of its function."""
        return cls(
            key, outputs, zlib.compress(json.dumps(result, separators=(",", ":")).encode(), 1)
        )

    @property
    def result(self) -> dict[str, Any]:
        """The return value of the task. It is parsed at each call: a list of records then stays
        small.
        """
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
    """A job that also describes its outputs: the worker that wrote them hashes them, and the
    driver reads no output.
    """

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
        Values that JSON can hold: `packed`, `is_provisional` (whether the storage failed midway)
        and `outputs`.
    """
    packed = b64encode(TaskRecord.from_result("", (), result).packed).decode()
    return {
        "packed": packed,
        "is_provisional": bool(result.get("is_provisional")),
        "outputs": [vars(output) for output in outputs],
    }


def unpack_result(key: str, returned: dict[str, Any]) -> TaskRecord:
    """Return the record of a task.

    Args:
        key: Key of the task.
        returned: What `pack_result` returned.

    Returns:
        The record.
    """
    return TaskRecord(
        key, [TaskOutput(**output) for output in returned["outputs"]], b64decode(returned["packed"])
    )
