"""Later stages whose tasks each need one task of the stage before: what can be done of them before that one has ended.

Reads the records of a stage as they come, puts jobs where an executor finds them, and keeps what came of them in the
journal. There their own stage finds it, does what is missing, and does again, with all its tries, what failed here.
"""

from collections.abc import Callable
from dataclasses import dataclass

from data_pipeline.core.journal import Journal, TaskRecord
from data_pipeline.core.task import Task
from data_pipeline.executors.base import EagerJobs, EagerTaskEvent, TaskDone


@dataclass(frozen=True)
class NextStage:
    """The next stage, as far as the one before it must know it.

    Attributes:
        stage: its name.
        code: the version of its code.
        task: gives the task that a record of the stage before makes possible, from the number of that one's task.
        then: the stage after it.
    """

    stage: str
    code: str
    task: Callable[[int, TaskRecord], Task]
    then: "NextStage | None" = None


@dataclass(frozen=True)
class _SubmittedTask:
    """A task that was put ahead: what follows it, and the number of the task of the first stage that it comes from."""

    task: Task
    key: str
    then: NextStage | None
    index: int


class EagerTasks:
    """What is done of later stages while one stage is; nothing where none follows or `ahead` is None."""

    def __init__(self, journal: Journal, following: NextStage | None, ahead: EagerJobs | None) -> None:
        self.journal, self.ahead = journal, ahead
        self.following = following if ahead is not None else None
        if ahead is not None:
            ahead.next_jobs.clear()  # of what an earlier stage left when its workers died
            ahead.later_jobs.clear()
        self.done: list[str] = []
        self._steps: list[_SubmittedTask] = []

    def format_title(self, stage: str) -> str:
        """The name of the stage and of those that are done ahead."""
        names, following = [stage], self.following
        while following is not None:
            names.append(following.stage)
            following = following.then
        return ", ".join(names)

    def submit_next(self, index: int, record: TaskRecord) -> None:
        """A task of the stage is done, so that the next stage's can be."""
        self._submit_task(self.following, index, record)

    def record_early_result(self, early: EagerTaskEvent) -> None:
        """Keep the record of what was done ahead."""
        if isinstance(early.event, TaskDone):
            step = self._steps[early.event.index]
            record = self.journal.save_record(step.task.name, step.key, step.task.outputs, early.event.result)
            self.done.append(step.task.name)
            self._submit_task(step.then, step.index, record)

    def _submit_task(self, following: NextStage | None, index: int, record: TaskRecord) -> None:
        if following is None or self.ahead is None:
            return
        task = following.task(index, record)
        key = task.compute_key(following.code)
        if found := self.journal.find_record(task.name, key):
            self._submit_task(following.then, index, found)
            return
        queue = self.ahead.next_jobs if following is self.following else self.ahead.later_jobs
        queue.append((len(self._steps), task.job))
        self._steps.append(_SubmittedTask(task, key, following.then, index))
