"""Retry failed tasks in rounds, with exponential back-off between rounds.

A round holds every task that failed in the round before. So a storage outage of a minute costs each task one attempt,
and a task that ran out of memory competes with fewer others.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from data_pipeline.executors.base import EagerTaskEvent, Event, Executor, Job, TaskFailed, select_items
from llmsys.config.executor import ExecutorConfig

LONGEST_WAIT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class TaskRetry:
    """An attempt failed, and the task will be tried again."""

    index: int
    failed: TaskFailed


def run_with_retries(
    executor: Executor,
    jobs: Sequence[Job],
    config: ExecutorConfig,
    seconds: float = 0,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Event | EagerTaskEvent | TaskRetry]:
    """Run jobs with retries.

    Args:
        executor: Runs each attempt.
        jobs: The jobs of one stage.
        config: Number of attempts (`max_attempts`) and back-off.
        seconds: Time limit of one attempt; 0 means no limit.
        sleep: Waits between rounds; tests replace it.

    Yields:
        Events by job index. `TaskFailed` means that no attempt is left or that the user must act first.
    """
    remaining: Sequence[int] = range(len(jobs))
    for number in range(1, config.max_attempts + 1):
        last = number == config.max_attempts
        again: list[int] = []
        for event in executor.run_jobs(select_items(jobs, remaining), seconds):
            if isinstance(event, EagerTaskEvent):  # its own stage retries it
                yield event
                continue
            event = _replace_index(event, remaining[event.index])
            if isinstance(event, TaskFailed) and event.cause != "mend" and not last:
                again.append(event.index)
                yield TaskRetry(event.index, event)
            else:
                yield event
        # An early end leaves out the wait.
        if not again:
            return
        sleep(min(config.backoff_seconds * 2 ** (number - 1), LONGEST_WAIT_SECONDS))
        remaining = sorted(again)


def _replace_index(event: Event, index: int) -> Event:
    if event.index == index:
        return event
    return type(event)(index, *(getattr(event, name) for name in event.__slots__[1:]))
