"""Run tasks of later stages early, while the current stage still has work.

Reads the records of a stage as they arrive, queues jobs for the executor, and writes finished results to the journal.

Invariants:
    - Only tasks that depend on exactly one task of the stage before start early.
    - The next stage reuses journaled results and retries failed early tasks with the full number of attempts.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.core.journal import Journal
from data_pipeline.core.task import Task, save_task_result
from data_pipeline.core.task_record import TaskRecord
from data_pipeline.executors.base import EagerJobs, EagerTaskEvent, TaskDone, TaskProgress


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
    """A queued eager task, with its stage and the index of its source task in the current stage."""

    task: Task
    stage: NextStage
    index: int


class EagerTasks:
    """Early tasks of later stages during one stage. Does nothing without a next stage or without queues."""

    def __init__(self, folder: Path, journal: Journal, next_stage: NextStage | None, queues: EagerJobs | None) -> None:
        self.folder, self.journal, self.queues = folder, journal, queues
        self.next_stage = next_stage if queues is not None else None
        if queues is not None:
            queues.next_jobs.clear()  # jobs of an earlier stage remain if its workers died
            queues.later_jobs.clear()
        self.done: Counter[str] = Counter()  # by stage
        self._steps: dict[int, _SubmittedTask] = {}
        self._submitted = 0

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
        if isinstance(early.event, TaskProgress):
            return
        step = self._steps.pop(early.event.index)  # its own stage retries a failed one
        if isinstance(early.event, TaskDone):
            record = save_task_result(self.journal, step.task, step.stage.code, early.event.result)
            self.done[step.stage.stage] += 1
            self._submit_task(step.stage.then, step.index, record)

    def _submit_task(self, next_stage: NextStage | None, index: int, record: TaskRecord) -> None:
        if next_stage is None or self.queues is None:
            return
        task = next_stage.task(index, record)
        if found := self.journal.find_record(task.name, task.compute_key(next_stage.code)):
            self._submit_task(next_stage.then, index, found)
            return
        # Executors prefer the next stage: its results enable later ones.
        queue = self.queues.next_jobs if next_stage is self.next_stage else self.queues.later_jobs
        queue.append((self._submitted, task.build_recorded_job(self.folder)))
        self._steps[self._submitted] = _SubmittedTask(task, next_stage, index)
        self._submitted += 1
