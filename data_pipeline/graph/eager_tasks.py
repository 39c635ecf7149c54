"""Run tasks of later stages early, while the current stage still has work.

Reads the records of a stage as they arrive, queues jobs for the executor, and writes finished results to the journal.

Invariants:
    - Only tasks that depend on exactly one task of the stage before start early.
    - The next stage reuses journaled results and retries failed early tasks with the full number of attempts.
"""

from collections.abc import Callable
from dataclasses import dataclass

from data_pipeline.core.journal import Journal, TaskRecord
from data_pipeline.core.task import Task
from data_pipeline.executors.base import EagerJobs, EagerTaskEvent, TaskDone


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
