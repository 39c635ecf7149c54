"""Records of finished tasks, and lists of files, kept in Arrow files so that they do not grow in
memory.

A task that reads every file of a stage is pickled with the name of the list, and millions of tasks
and files take no memory in the driver.

Reads and writes uncompressed Arrow files, which are mapped. Names are relative to the folder of the
dataset.
"""

import filecmp
import json
import os
import pickle
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa

from llmsys.data_pipeline.core.staging import JOURNAL, LISTS, find_output
from llmsys.data_pipeline.executors.base import Item, Job, Report, StageReport
from llmsys.dataset.token_shards import compute_file_digest
from llmsys.storage.arrow_file import ArrowFileWriter, map_file, open_arrow
from llmsys.storage.pack_files import find_packed_file, is_packed_name, take_written_part

ROWS_PER_BATCH = 4_096
# Without the search for white space around the value, which takes as long as a short one.
_parse_json = json.JSONDecoder().raw_decode
LIST_FOLDER = f"{JOURNAL}/{LISTS}"
# The list of the files of extracted texts.
EXTRACTED = "extracted"
_NAMES = pa.schema([("name", pa.binary())])  # file names may hold bytes that are not UTF-8


class FileRows(Sequence[dict[str, Any]]):
    """Rows of a list; picklable by name. One batch of them is in memory."""

    def __init__(self, path: Path, columns: Sequence[str] = ()) -> None:
        """Read the list that `write_rows` wrote: some columns of it, or all."""
        self.path = path
        self._columns = list(columns)
        self._latest: tuple[int, list[dict[str, Any]]] = (-1, [])

    @cached_property
    def _arrow(self) -> pa.RecordBatchFileReader:
        return open_arrow(self.path, map_file(self.path))

    @cached_property
    def _length(self) -> int:
        last = self._arrow.num_record_batches - 1
        return last * ROWS_PER_BATCH + self._arrow.get_batch(last).num_rows if last >= 0 else 0

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
            content = self._arrow.get_batch(batch)
            self._latest = batch, content.select(self._columns or content.schema.names).to_pylist()
        return self._latest[1][row]

    def read_numbers(self, column: str) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return a column of numbers, (rows,) int64."""
        batches = [self._arrow.get_batch(index) for index in range(self._arrow.num_record_batches)]
        return np.concatenate(
            [np.zeros(0, np.int64), *(batch.column(column).to_numpy() for batch in batches)]
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the name alone."""
        return {"path": self.path, "_columns": self._columns, "_latest": (-1, [])}


class FileList(Sequence[Path]):
    """Paths of the files of a stage; picklable by the name of the list."""

    def __init__(self, folder: Path, rows: FileRows, column: str = "name") -> None:
        """List the files that a column names, relative to `folder`."""
        self._folder = folder
        self._rows = FileRows(rows.path, [column])
        self._column = column

    @property
    def name(self) -> str:
        """The name of the list, and of its column if it has several."""
        stem = self._rows.path.stem
        return stem if self._column == "name" else f"{stem}.{self._column}"

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
            return [self._folder / os.fsdecode(row[self._column]) for row in self._rows[index]]
        return self._folder / os.fsdecode(self._rows[index][self._column])


@dataclass(frozen=True)
class ItemRange(Sequence[Item]):
    """Consecutive items of a list in a file; a worker that gets it reads no more than these."""

    items: Sequence[Item]
    start: int
    stop: int

    def __len__(self) -> int:
        """Return the number of items."""
        return self.stop - self.start

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        """Return one item, or a list of them."""
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        return self.items[self.start + range(len(self))[index]]


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
    try:
        with ArrowFileWriter(aside, schema) as writer:
            waiting: list[dict[str, Any]] = []
            for row in rows:
                waiting.append(row)
                if len(waiting) == ROWS_PER_BATCH:
                    writer.write(pa.RecordBatch.from_pylist(waiting, schema))
                    waiting = []
            if waiting:
                writer.write(pa.RecordBatch.from_pylist(waiting, schema))
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
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


class StoredOutputs(Sequence["TaskOutput"]):
    """Outputs as the journal has them: a stage reads its records many times, and few of their
    outputs.
    """

    def __init__(self, text: str) -> None:
        """Hold the JSON of a list of [name, size, modified_ns, digest]."""
        self._text = text
        self._parsed: list[list[Any]] | None = None

    @property
    def _rows(self) -> list[list[Any]]:
        # Not a cached_property, which takes a lock for each of millions of records.
        if self._parsed is None:
            self._parsed = _parse_json(self._text)[0]
        return self._parsed

    def __len__(self) -> int:
        """Return the number of outputs."""
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> "TaskOutput": ...
    @overload
    def __getitem__(self, index: slice) -> list["TaskOutput"]: ...
    def __getitem__(self, index: int | slice) -> "TaskOutput | list[TaskOutput]":
        """Return one output, or a list of them."""
        if isinstance(index, slice):
            return [TaskOutput(*row) for row in self._rows[index]]
        return TaskOutput(*self._rows[index])

    def __eq__(self, other: object) -> bool:
        """Compare with any sequence of outputs."""
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def digests(self) -> list[str]:
        """The digest of each output."""
        return [row[3] for row in self._rows]


def list_extracted_texts(folder: Path) -> list[Path]:
    """List the files of extracted texts of a dataset, for whoever inspects it.

    Args:
        folder: The dataset folder.

    Returns:
        Paths for `read_batches`, as many as are left: `work/` may be deleted.
    """
    listed = folder / LIST_FOLDER / f"{EXTRACTED}.arrow"
    if not listed.exists():  # by a release that kept a file for each block
        return sorted((folder / "work" / "extracted").glob("*.arrow"))
    present = dict[Path, bool]()
    found = []
    for path in FileList(folder, FileRows(listed)):
        packed = find_packed_file(path)
        file = path if packed is None else packed.pack
        if file not in present or packed is None:
            present[file] = file.exists()
        if present[file]:
            found.append(path)
    return found


@dataclass(frozen=True)
class TaskOutput:
    """One published file. `name` is relative to the dataset folder; `digest` is xxh3_128 in hex.

    A file in a pack is named by its place, see `llmsys/storage/pack_files.py`; its time is that of
    the pack.
    """

    name: str
    size: int
    modified_ns: int
    digest: str


@dataclass(frozen=True)
class TaskRecord:
    """One finished task.

    Attributes:
        key: Key of the task; "" if its input is quarantined.
        outputs: Its files.
        packed: Return value of its function as compressed JSON.
    """

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
        content: dict[str, Any] = _parse_json(zlib.decompress(self.packed).decode())[0]
        return content

    @property
    def digests(self) -> list[str]:
        """Digests of the outputs, for the keys of tasks that read them."""
        if isinstance(self.outputs, StoredOutputs):
            return self.outputs.digests
        return [output.digest for output in self.outputs]


def describe_output(folder: Path, name: str) -> TaskOutput:
    """Return size, time and digest of an output; its bytes are read.

    Args:
        folder: Dataset folder.
        name: Output, relative to the folder.

    Returns:
        The description that a record holds.
    """
    if is_packed_name(name):
        return _describe_part(folder, name)
    path = find_output(folder, name)
    status = path.stat()
    return TaskOutput(name, status.st_size, status.st_mtime_ns, compute_file_digest(path))


def _describe_part(folder: Path, name: str) -> TaskOutput:
    """Return the description of an output in a pack. It was hashed while it was written."""
    part = take_written_part(folder / name)
    if part is None:
        raise ValueError(f"{name} was not written by this process; write it with ArrowFileWriter")
    path = os.fspath(part.file.path.relative_to(folder))
    return TaskOutput(path, part.file.length, part.modified_ns, part.digest)


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
        # Without a frame of its own in tracebacks, of which people see the first lines.
        job = self.job.bind_arguments() if isinstance(self.job, StageJob) else self.job
        result = job(report)
        described = [describe_output(self.folder, name) for name in self.outputs]
        return pack_result(result, described)


class StageArguments:
    """Keyword arguments that all jobs of a stage share, such as the config. They are pickled once
    in the driver, and unpickled once in each worker.
    """

    def __init__(self, **values: Any) -> None:
        """Share some values, which can be pickled."""
        self.values = values
        self._pickled: bytes | None = None

    def __reduce__(self) -> tuple[Callable[[bytes], "StageArguments"], tuple[bytes]]:
        """Pickle the bytes that the first pickling made."""
        if self._pickled is None:
            self._pickled = pickle.dumps(self.values)
        return _load_arguments, (self._pickled,)


@lru_cache(maxsize=8)
def _load_arguments(pickled: bytes) -> StageArguments:
    return StageArguments(**pickle.loads(pickled))


@dataclass(frozen=True)
class StageJob:
    """A job that calls the function of a stage with shared and own keyword arguments.

    Attributes:
        function: The function.
        shared: Arguments of all jobs of the stage.
        own: Arguments of this one.
        folder: Dataset folder.
        paths: Arguments that are paths, relative to the folder: one name, or names by some key.
    """

    function: Callable[..., dict[str, Any]]
    shared: StageArguments
    own: dict[str, Any]
    folder: Path
    paths: dict[str, str | dict[str, str]]

    def bind_arguments(self) -> Job:
        """Return the function with its arguments."""
        # Joined in the worker: in the driver paths would cost more than all else of a task.
        paths = {
            name: self.folder / path
            if isinstance(path, str)
            else {key: self.folder / each for key, each in path.items()}
            for name, path in self.paths.items()
        }
        return partial(self.function, **self.shared.values, **self.own, **paths)

    def __call__(self, report: Report) -> dict[str, Any]:
        """Call the function."""
        return self.bind_arguments()(report)


@dataclass(frozen=True)
class FollowingJob:
    """The job of a later stage that the same worker runs after a job, on its first output.

    Attributes:
        stage: Name of the stage.
        job: The call; its path `source` is missing.
        outputs: Files it publishes, relative to the dataset folder.
    """

    stage: str
    job: StageJob
    outputs: tuple[str, ...]

    def bind_source(self, source: str) -> Job:
        """Return the job that reads `source`, a name relative to the dataset folder."""
        return replace(self.job, paths=self.job.paths | {"source": source})


@dataclass(frozen=True)
class ChainedJob:
    """A job and those that follow: no other process reads its output before they have."""

    first: RecordedJob
    following: tuple[FollowingJob, ...]

    def __call__(self, report: Report) -> dict[str, Any]:
        """Run the jobs. Return what `pack_result` returns of the first; `following` holds the same
        of the others, and None for one that failed, which is the last.
        """
        returned = self.first(report)
        done = list[dict[str, Any] | None]()
        folder = self.first.folder
        outputs = returned["outputs"]
        for link in self.following:
            drops = 0

            def report_drops(amount: float, dropped: int) -> None:
                nonlocal drops
                drops += dropped
                if dropped:
                    report(0, dropped)

            if isinstance(report, StageReport):
                report.enter_stage(link.stage)
            job = link.bind_source(outputs[0]["name"])
            try:
                found = RecordedJob(job, folder, link.outputs)(report_drops)
            # Its own stage runs it again, counts the attempts and says what is wrong.
            except Exception:
                if drops:
                    report(0, -drops)
                done.append(None)
                break
            done.append(found)
            outputs = found["outputs"]
        return returned | {"following": done}


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
