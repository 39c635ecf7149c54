"""A task of the graph: its outputs, its inputs and its job; the records of a stage's tasks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from data_pipeline.core.journal import Journal, compute_json_digest
from data_pipeline.core.task_record import RecordedJob, TaskRecord, unpack_result
from data_pipeline.executors.base import Job

_PAGE = 500  # records that are read at a time


class RecordList(Sequence[TaskRecord]):
    """The records of the tasks of a stage, in their order. They stay in the journal; one page of them is in memory."""

    def __init__(self, journal: Journal, stage: str, count: int) -> None:
        self._journal, self._stage, self._count = journal, stage, count
        self._first, self._page = 0, list[TaskRecord]()

    def __len__(self) -> int:
        """Return the number of tasks."""
        return self._count

    @overload
    def __getitem__(self, index: int) -> TaskRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[TaskRecord]: ...
    def __getitem__(self, index: int | slice) -> TaskRecord | list[TaskRecord]:
        """Return one record, or a list of them."""
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._count))]
        index = range(self._count)[index]
        end = self._first + len(self._page)
        if not self._first <= index < end:
            # A page pays only where the records are read in order.
            self._page = self._journal.read_records(self._stage, index, _PAGE if index == end else 1)
            self._first = index
        return self._page[index - self._first]


@dataclass(frozen=True)
class Task:
    """One call that writes some files.

    Attributes:
        name: `stage/item`, unique in the graph. It also names the record.
        inputs: Everything that decides the outputs besides the code, as values that JSON can hold.
        outputs: Files it publishes, relative to the dataset folder.
        job: The call; picklable.
        progress_amount: Its share of the stage's progress, in the unit of the stage.
        fallback_result: Builds the result for a quarantined input from a reason. None if the stage needs the task.
    """

    name: str
    inputs: Sequence[Any]
    outputs: Sequence[str]
    job: Job
    progress_amount: float
    fallback_result: Callable[[str], dict[str, Any]] | None = None

    def compute_key(self, code: str) -> str:
        """Return the journal key: a digest of the code version, the name and the inputs."""
        return compute_json_digest(code, self.name, self.inputs)

    def build_recorded_job(self, folder: Path) -> "RecordedJob":
        """Return the job with the hashing of its outputs, for a worker."""
        return RecordedJob(self.job, folder, tuple(self.outputs))


def save_task_result(
    journal: Journal, task: Task, code: str, returned: dict[str, Any], position: int | None = None
) -> TaskRecord:
    """Record a finished task.

    Args:
        journal: The journal of the dataset folder.
        task: The task.
        code: Version of the code of its stage.
        returned: What its `RecordedJob` returned.
        position: Its place in its stage; None if its stage has not begun.

    Returns:
        The record.
    """
    record = unpack_result(task.compute_key(code), returned)
    journal.insert_record(task.name, record, returned["again"], position)
    return record


Stage = Callable[[str, Sequence[Task], str], Sequence[TaskRecord]]
"""Runs the tasks of one stage, given its name and progress unit; returns their records in order."""
