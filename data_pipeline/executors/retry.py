"""Failed tasks again, whoever does the work: round by round, each round after a longer wait.

Reads the events of an executor, gives those of whole tasks. A round holds every task that failed in the one before, so
that a storage that was away for a minute costs each task one try, and a task that ran out of memory meets fewer others.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from data_pipeline.executors.base import EagerTaskEvent, Event, Executor, Job, TaskFailed
from llmsys.config.executor import ExecutorConfig

LONGEST_WAIT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class TaskRetry:
    """A try failed, and the task will be tried once more."""

    index: int
    failed: TaskFailed


def run_with_retries(
    executor: Executor,
    jobs: Sequence[Job],
    config: ExecutorConfig,
    seconds: float = 0,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Event | EagerTaskEvent | TaskRetry]:
    """Yield what happens; `Failed` only for a task that is given up: tried often enough, or a person's to mend."""
    left = list(range(len(jobs)))
    for number in range(1, config.max_attempts + 1):
        last = number == config.max_attempts
        again: list[int] = []
        for event in executor.run_jobs([jobs[index] for index in left], seconds):
            if isinstance(event, EagerTaskEvent):  # its own stage does again what failed
                yield event
                continue
            event = _replace_index(event, left[event.index])
            if isinstance(event, TaskFailed) and event.cause != "mend" and not last:
                again.append(event.index)
                yield TaskRetry(event.index, event)
            else:
                yield event
        if not again:
            return
        sleep(min(config.backoff_seconds * 2 ** (number - 1), LONGEST_WAIT_SECONDS))
        left = sorted(again)


def _replace_index(event: Event, index: int) -> Event:
    if event.index == index:
        return event
    return type(event)(index, *(getattr(event, name) for name in event.__slots__[1:]))
