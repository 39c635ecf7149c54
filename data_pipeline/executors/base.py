"""Interface between the task graph and executors: jobs, events and the `Executor` protocol."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Report = Callable[[float, int], None]  # amount done since the last call (in the stage's unit), documents dropped
Job = Callable[[Report], dict[str, Any]]  # picklable, because another process may run it

Cause = Literal["mend", "error", "lost", "slow"]
"""Kinds of failure: the user must act, an exception, a dead process, a timeout."""


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """A part of a job is done."""

    index: int
    amount: float
    dropped: int


@dataclass(frozen=True, slots=True)
class TaskDone:
    """A job returned. `result` holds values that JSON can hold."""

    index: int
    result: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """An attempt failed. `message` is for the user, `traceback` for developers ("" if the failure is no bug)."""

    index: int
    message: str
    traceback: str
    cause: Cause = "error"


Event = TaskProgress | TaskDone | TaskFailed


@dataclass(frozen=True, slots=True)
class EagerTaskEvent:
    """An event of an eager job, by the number it was queued with."""

    event: Event


Queue = deque[tuple[int, Job]]
"""Numbered jobs."""


@dataclass(frozen=True)
class EagerJobs:
    """Queues of jobs of later stages that can start early. The reader of a stage's events fills them.

    Attributes:
        next_jobs: Jobs of the next stage.
        later_jobs: Jobs of the stages after that.
    """

    next_jobs: Queue = field(default_factory=deque)
    later_jobs: Queue = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.next_jobs) + len(self.later_jobs)


class Executor(Protocol):
    """Runs jobs, each once. Retries are decided in `retry.py`."""

    @property
    def eager_jobs(self) -> EagerJobs | None:
        """Queues for jobs of later stages while a stage runs. None if stages run strictly in order."""

    def run_jobs(self, jobs: Sequence[Job], seconds: float = 0) -> Iterator[Event | EagerTaskEvent]:
        """Yield events until every job is done or failed. `seconds` limits each job; 0 means no limit."""

    def close(self) -> None:
        """Stop all workers."""
