"""Interface between the task graph and executors: jobs, events and the `Executor` protocol.

`InlineExecutor` runs jobs one after another in this process: for debugging, for tests, and as the
reference for other executors. An exception of a job fails this job only.
"""

import errno
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, overload, runtime_checkable

import numpy as np

from llmsys.errors import LlmsysError, to_data_error
from llmsys.log import redact_secrets

Item = TypeVar("Item")
# amount done since the last call (in the stage's unit), documents dropped
Report = Callable[[float, int], None]
Job = Callable[[Report], dict[str, Any]]  # picklable, because another process may run it


@runtime_checkable
class StageReport(Protocol):
    """A `Report` that is also told where a chain of jobs has come to: of an executor that shows
    jobs while they run.
    """

    def __call__(self, amount: float, dropped: int) -> None:
        """Take the amount done since the last call, and the documents dropped."""

    def enter_stage(self, stage: str) -> None:
        """Take the name of the later stage whose job begins: the one before it is done."""


# Kinds of failure: the user must act, an exception, a dead process, a timeout.
Cause = Literal["mend", "error", "lost", "slow"]


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """A part of a job is done. `stage` is the later stage that a chain of jobs has come to, and
    "" in its first job.
    """

    index: int
    amount: float
    dropped: int
    stage: str = ""


@dataclass(frozen=True, slots=True)
class TaskDone:
    """A job returned. `result` holds values that JSON can hold."""

    index: int
    result: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """An attempt failed. `message` is for the user, `traceback` for developers ("" if the
    failure is no bug).
    """

    index: int
    message: str
    traceback: str
    cause: Cause = "error"


Event = TaskProgress | TaskDone | TaskFailed


@dataclass(frozen=True, slots=True)
class EagerTaskEvent:
    """An event of an eager job, by the number it was queued with."""

    event: Event


# Numbered jobs.
Queue = deque[tuple[int, Job]]


class LazySequence(Sequence[Item]):
    """Items that are built each time they are asked for: a stage of millions of tasks takes no
    memory.
    """

    def __init__(self, length: int, build: Callable[[int], Item]) -> None:
        """Have `length` items and keep none of them.

        Args:
            length: Number of items.
            build: Returns the item of an index from 0 to `length` - 1. It is called each time that
                an item is asked for, so it should be cheap and return equal items for an index.
        """
        self._length = length
        self._build = build

    def __len__(self) -> int:
        """Return the number of items."""
        return self._length

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> "LazySequence[Item]": ...
    def __getitem__(self, index: int | slice) -> "Item | LazySequence[Item]":
        """Build one item, or return a shorter sequence."""
        indices = range(self._length)[index]
        if isinstance(indices, int):
            return self._build(indices)
        return LazySequence(len(indices), lambda number: self._build(indices[number]))


def select_items(
    items: Sequence[Item], indices: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]
) -> LazySequence[Item]:
    """Return the items at some indices, built on demand.

    Args:
        items: Any sequence.
        indices: Indices into it, in the order of the result.

    Returns:
        As many items as indices.
    """
    return LazySequence(len(indices), lambda number: items[int(indices[number])])


class JobQueue:
    """Numbered jobs of a stage in order, each built when its turn comes."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._next = 0

    def __len__(self) -> int:
        """Return the number of jobs that wait."""
        return len(self._jobs) - self._next

    def pop_next(self) -> tuple[int, Job]:
        """Remove the next job and return it with its number."""
        self._next += 1
        return self._next - 1, self._jobs[self._next - 1]


@dataclass
class EagerJobs:
    """Queues of jobs of later stages that can start early. The reader of a stage's events fills
    them.

    Attributes:
        next_jobs: Jobs of the next stage.
        later_jobs: Jobs of the stages after that.
        seconds: Time limit of each of them; 0 means no limit.
    """

    next_jobs: Queue = field(default_factory=deque)
    later_jobs: Queue = field(default_factory=deque)
    seconds: float = 0

    def __len__(self) -> int:
        return len(self.next_jobs) + len(self.later_jobs)


class Executor(Protocol):
    """Runs jobs, each once. Retries are decided in `graph/tasks.py`."""

    @property
    def eager_jobs(self) -> EagerJobs | None:
        """Queues for jobs of later stages while a stage runs. None if stages run strictly in
        order.
        """

    def run_jobs(self, jobs: Sequence[Job], seconds: float = 0) -> Iterator[Event | EagerTaskEvent]:
        """Run the jobs of a stage, and those that are put into `eager_jobs` meanwhile.

        Args:
            jobs: Jobs of one stage. Each is built when its turn comes, and runs once.
            seconds: Limit of the time of each of these jobs. Default: 0, no limit.

        Yields:
            Events until every one of `jobs` is done or has failed. The index of an event is that
            of its job in `jobs`; an `EagerTaskEvent` has the number that the job was queued with.
        """

    def close(self) -> None:
        """Stop all workers."""


# A retry cannot fix these, and no input causes them: disk full, quota, file too large, read-only
# file system.
_PLACE_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS))


class InlineExecutor:
    """Runs each job when its event is requested. It cannot stop a job that takes too long."""

    eager_jobs = None

    def run_jobs(self, jobs: Sequence[Job], seconds: float = 0) -> Iterator[Event]:
        """Yield the events of each job in order."""
        for index, job in enumerate(jobs):
            progress: list[TaskProgress] = []

            def report_progress(
                amount: float,
                dropped: int,
                index: int = index,
                progress: list[TaskProgress] = progress,
            ) -> None:
                progress.append(TaskProgress(index, amount, dropped))

            # Progress is collected first: a callback cannot yield.
            outcome = try_job(index, job, report_progress)
            yield from progress
            yield outcome

    def close(self) -> None:
        """Do nothing: there are no workers."""


def try_job(index: int, job: Job, report: Report) -> TaskDone | TaskFailed:
    """Run one job once.

    Args:
        index: Number of the job, returned in the event.
        job: The job.
        report: Progress callback of the job.

    Returns:
        `TaskDone`, or `TaskFailed`. Errors that a user can fix have a message only, others also a
        traceback.
    """
    try:
        return TaskDone(index, job(report))
    except LlmsysError as error:
        return TaskFailed(index, str(error), "", "mend")
    except Exception as error:
        if (
            isinstance(error, OSError)
            and error.errno in _PLACE_ERRORS
            and (problem := to_data_error(error))
        ):
            return TaskFailed(index, str(problem), "", "mend")
        message = f"{type(error).__name__}: {error}"
        stack = traceback.format_exc()
        return TaskFailed(index, redact_secrets(message), redact_secrets(stack))
