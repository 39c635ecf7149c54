"""What an executor tells while it works: progress inside a task, a task that is done, a try that failed.

Reads nothing; the types here are the border between the task graph and whoever does the work.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Report = Callable[[float, int], None]  # amount done since the last call (in the stage's unit), documents dropped
Job = Callable[[Report], dict[str, Any]]  # what a task does; picklable, so that another process can do it

Cause = Literal["mend", "error", "lost", "slow"]
"""A person must mend something first; an exception; its process ended; it took longer than a try may take."""


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """Part of a task is done."""

    index: int
    amount: float
    dropped: int


@dataclass(frozen=True, slots=True)
class TaskDone:
    """A job is done; `result` is what it returned, plain data that JSON can hold."""

    index: int
    result: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """A try failed; `message` says why, for a person; `traceback` for whoever mends it ("" when it is no bug)."""

    index: int
    message: str
    traceback: str
    cause: Cause = "error"


Event = TaskProgress | TaskDone | TaskFailed


@dataclass(frozen=True, slots=True)
class EagerTaskEvent:
    """An event of a job that was done ahead, by the number it was put there with."""

    event: Event


Queue = deque[tuple[int, Job]]
"""Jobs, each with its number."""


@dataclass(frozen=True)
class EagerJobs:
    """Jobs of other stages that can be done already; who reads the events of a stage puts them in.

    Attributes:
        next: those of the next stage.
        later: those of the stages after that one.
    """

    next_jobs: Queue = field(default_factory=deque)
    later_jobs: Queue = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.next_jobs) + len(self.later_jobs)


class Executor(Protocol):
    """Who does the work. Every job is tried once: what a failure costs is decided in one place, see tries.py."""

    @property
    def eager_jobs(self) -> EagerJobs | None:
        """Where jobs of later stages can be put while a stage is done; None: stages come one after the other."""

    def run_jobs(self, jobs: Sequence[Job], seconds: float = 0) -> Iterator[Event | EagerTaskEvent]:
        """Yield what happens until every job is done or failed; a job may take so many seconds, 0: for ever."""

    def close(self) -> None:
        """End what works."""
