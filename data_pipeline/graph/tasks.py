"""Tasks of the graph: their journal keys, retries with back-off, and tasks of later stages that start early.

Run tasks of later stages early, while the current stage still has work.

Reads the records of a stage as they arrive, queues jobs for the executor, and writes finished results to the journal.

A task of the graph: its outputs, its inputs and its job.

Retry failed tasks in rounds, with exponential back-off between rounds.

A round holds every task that failed in the round before. So a storage outage of a minute costs each task one attempt,
and a task that ran out of memory competes with fewer others.

Invariants:
- Only tasks that depend on exactly one task of the stage before start early.
- The next stage reuses journaled results and retries failed early tasks with the full number of attempts.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from data_pipeline.core.journal import Journal, TaskRecord, compute_json_digest
from data_pipeline.executors.base import EagerJobs, EagerTaskEvent, Event, Executor, Job, TaskDone, TaskFailed
from llmsys.config.executor import ExecutorConfig


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


Stage = Callable[[str, list[Task], str], list[TaskRecord]]
"""Runs the tasks of one stage, given its name and progress unit; returns their records in order."""


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
    remaining = list(range(len(jobs)))
    for number in range(1, config.max_attempts + 1):
        last = number == config.max_attempts
        again: list[int] = []
        for event in executor.run_jobs([jobs[index] for index in remaining], seconds):
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


@dataclass(frozen=True)
class NextStage:
    """The next stage, as far as the current one must know it.

    Attributes:
        stage: Name of the stage.
        code: Version of its code.
        task: Builds the task that a record of the current stage enables, from the index of that record's task.
        then: The stage after it.
    """

    stage: str
    code: str
    task: Callable[[int, TaskRecord], Task]
    then: "NextStage | None" = None


@dataclass(frozen=True)
class _SubmittedTask:
    """A queued eager task, with the stage after it and the index of its source task in the current stage."""

    task: Task
    key: str
    then: NextStage | None
    index: int


class EagerTasks:
    """Early tasks of later stages during one stage. Does nothing without a next stage or without queues."""

    def __init__(self, journal: Journal, next_stage: NextStage | None, queues: EagerJobs | None) -> None:
        self.journal, self.queues = journal, queues
        self.next_stage = next_stage if queues is not None else None
        if queues is not None:
            queues.next_jobs.clear()  # jobs of an earlier stage remain if its workers died
            queues.later_jobs.clear()
        self.done: list[str] = []
        self._steps: list[_SubmittedTask] = []

    def format_title(self, stage: str) -> str:
        """Return the names of the stage and of the stages that start early, for the progress line."""
        names, next_stage = [stage], self.next_stage
        while next_stage is not None:
            names.append(next_stage.stage)
            next_stage = next_stage.then
        return ", ".join(names)

    def submit_next(self, index: int, record: TaskRecord) -> None:
        """Queue the task of the next stage that a finished task enables."""
        self._submit_task(self.next_stage, index, record)

    def record_early_result(self, early: EagerTaskEvent) -> None:
        """Journal the result of an early task and queue its successor."""
        if isinstance(early.event, TaskDone):
            step = self._steps[early.event.index]
            record = self.journal.save_record(step.task.name, step.key, step.task.outputs, early.event.result)
            self.done.append(step.task.name)
            self._submit_task(step.then, step.index, record)

    def _submit_task(self, next_stage: NextStage | None, index: int, record: TaskRecord) -> None:
        if next_stage is None or self.queues is None:
            return
        task = next_stage.task(index, record)
        key = task.compute_key(next_stage.code)
        if found := self.journal.find_record(task.name, key):
            self._submit_task(next_stage.then, index, found)
            return
        # Executors prefer the next stage: its results enable later ones.
        queue = self.queues.next_jobs if next_stage is self.next_stage else self.queues.later_jobs
        queue.append((len(self._steps), task.job))
        self._steps.append(_SubmittedTask(task, key, next_stage.then, index))
