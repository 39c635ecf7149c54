"""Later stages whose tasks each need one task of the stage before: what can be done of them before that one has ended.

Reads the records of a stage as they come, puts jobs where an executor finds them, and keeps what came of them in the
journal. There their own stage finds it, does what is missing, and does again, with all its tries, what failed here.
"""

from collections.abc import Callable
from dataclasses import dataclass

from data_pipeline.executors.event import Ahead, Done, Early
from data_pipeline.journal import Journal, Record
from data_pipeline.task import Task


@dataclass(frozen=True)
class Following:
    """The next stage, as far as the one before it must know it.

    Attributes:
        stage: its name.
        code: the version of its code.
        task: gives the task that a record of the stage before makes possible, from the number of that one's task.
        then: the stage after it.
    """

    stage: str
    code: str
    task: Callable[[int, Record], Task]
    then: "Following | None" = None


@dataclass(frozen=True)
class _Step:
    """A task that was put ahead: what follows it, and the number of the task of the first stage that it comes from."""

    task: Task
    key: str
    then: Following | None
    index: int


class Forerun:
    """What is done of later stages while one stage is; nothing where none follows or `ahead` is None."""

    def __init__(self, journal: Journal, following: Following | None, ahead: Ahead | None) -> None:
        self.journal, self.ahead = journal, ahead
        self.following = following if ahead is not None else None
        if ahead is not None:
            ahead.next.clear()  # of what an earlier stage left when its workers died
            ahead.later.clear()
        self.done: list[str] = []
        self._steps: list[_Step] = []

    def title(self, stage: str) -> str:
        """The name of the stage and of those that are done ahead."""
        names, following = [stage], self.following
        while following is not None:
            names.append(following.stage)
            following = following.then
        return ", ".join(names)

    def offer(self, index: int, record: Record) -> None:
        """A task of the stage is done, so that the next stage's can be."""
        self._offer(self.following, index, record)

    def hear(self, early: Early) -> None:
        """Keep the record of what was done ahead."""
        if isinstance(early.event, Done):
            step = self._steps[early.event.index]
            record = self.journal.save(step.task.name, step.key, step.task.outputs, early.event.result)
            self.done.append(step.task.name)
            self._offer(step.then, step.index, record)

    def _offer(self, following: Following | None, index: int, record: Record) -> None:
        if following is None or self.ahead is None:
            return
        task = following.task(index, record)
        key = task.key(following.code)
        if found := self.journal.find(task.name, key):
            self._offer(following.then, index, found)
            return
        queue = self.ahead.next if following is self.following else self.ahead.later
        queue.append((len(self._steps), task.job))
        self._steps.append(_Step(task, key, following.then, index))
