"""What an executor tells while it works: progress inside a task, a task that is done, a task that failed.

Reads nothing; the types here are the border between the task graph and whoever does the work.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Report = Callable[[float, int], None]  # amount done since the last call (in the stage's unit), documents dropped
Job = Callable[[Report], dict[str, Any]]  # what a task does; picklable, so that another process can do it


@dataclass(frozen=True, slots=True)
class Advanced:
    """Part of a task is done."""

    amount: float
    dropped: int


@dataclass(frozen=True, slots=True)
class Done:
    """A job is done; `result` is what it returned, plain data that JSON can hold."""

    index: int
    result: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """A job is given up; `message` says why, for a person; `traceback` for whoever mends it ("" when it is no bug)."""

    index: int
    message: str
    traceback: str


Event = Advanced | Done | Failed
