"""Tasks of the graph: their journal keys, retries with back-off, and tasks of later stages that
start early.

Run tasks of later stages early, while the current stage still has work.

Reads the records of a stage as they arrive, queues jobs for the executor, and writes finished
results to the journal.

A task of the graph: its outputs, its inputs and its job.

Retry failed tasks in rounds, with exponential back-off between rounds.

A round holds every task that failed in the round before. So a storage outage of a minute costs each
task one attempt, and a task that ran out of memory competes with fewer others.

Invariants:
- Only tasks that depend on exactly one task of the stage before start early.
- The next stage reuses journaled results and retries failed early tasks with the full number of
  attempts.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from llmsys.config.executor import ExecutorConfig
from llmsys.data_pipeline.core.earlier_results import EarlierResults
from llmsys.data_pipeline.core.journal import Journal, compute_json_digest
from llmsys.data_pipeline.core.task_record import (
    ChainedJob,
    FollowingJob,
    RecordedJob,
    TaskRecord,
    unpack_result,
)
from llmsys.data_pipeline.executors.base import (
    EagerJobs,
    EagerTaskEvent,
    Event,
    Executor,
    Job,
    TaskFailed,
    TaskProgress,
    select_items,
)
from llmsys.log import get_logger

_PAGE = 500  # records that are read at a time
_log = get_logger(__name__)
MAX_QUEUED = 10_000  # early tasks of an executor: split_inputs makes many of every file


class RecordList(Sequence[TaskRecord]):
    """The records of the tasks of a stage, in their order. They stay in the journal; one page of
    them is in memory.
    """

    def __init__(self, journal: Journal, stage: str, count: int) -> None:
        self._journal = journal
        self._stage = stage
        self._count = count
        self._first = 0
        self._page = list[TaskRecord]()

    def __len__(self) -> int:
        """Return the number of tasks."""
        return self._count

    @overload
    def __getitem__(self, index: int) -> TaskRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[TaskRecord]: ...
    def __getitem__(self, index: int | slice) -> TaskRecord | list[TaskRecord]:
        """Return one record, or a list of them."""
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._count))]
        index = range(self._count)[index]
        end = self._first + len(self._page)
        if not self._first <= index < end:
            # A page pays only where the records are read in order.
            self._page = self._journal.read_records(
                self._stage, index, _PAGE if index == end else 1
            )
            self._first = index
        return self._page[index - self._first]

    def __iter__(self) -> Iterator[TaskRecord]:
        """Yield the records page by page; each iteration has its own page."""
        for first in range(0, self._count, _PAGE):
            yield from self._journal.read_records(
                self._stage, first, min(_PAGE, self._count - first)
            )


@dataclass(frozen=True)
class Task:
    """One call that writes some files.

    Attributes:
        name: `stage/item`, unique in the graph. It also names the record.
        inputs: Everything that decides the outputs besides the code, as values that JSON can hold.
        outputs: Files it publishes, relative to the dataset folder.
        job: The call; picklable.
        progress_amount: Its share of the stage's progress, in the unit of the stage.
        fallback_result: Builds the result for a quarantined input from a reason. None if the stage
            needs the task.
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

    def build_recorded_job(self, folder: Path) -> RecordedJob:
        """Return the job with the hashing of its outputs, for a worker."""
        return RecordedJob(self.job, folder, tuple(self.outputs))


def save_task_result(
    journal: Journal, task: Task, code: str, returned: dict[str, Any], position: int | None = None
) -> TaskRecord:
    """Record a finished task.

    Args:
        journal: The journal of the dataset folder.
        task: The task.
        code: Version of the code of its stage.
        returned: What its `RecordedJob` returned.
        position: Its place in its stage; None if its stage has not begun.

    Returns:
        The record.
    """
    record = unpack_result(task.compute_key(code), returned)
    journal.insert_record(task.name, record, returned["is_provisional"], position)
    return record


# Runs the tasks of one stage, given its name and progress unit; returns their records in order.
Stage = Callable[[str, Sequence[Task], str], Sequence[TaskRecord]]


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
    again_jobs: Sequence[Job] | None = None,
) -> Iterator[Event | EagerTaskEvent | TaskRetry]:
    """Run jobs with retries.

    Args:
        executor: Runs each attempt.
        jobs: The jobs of one stage.
        config: Number of attempts (`max_attempts`) and back-off.
        seconds: Time limit of one attempt; 0 means no limit.
        sleep: Waits between rounds; tests replace it.
        again_jobs: What to run of the same jobs after the first attempt; None: the same.

    Yields:
        Events by job index. `TaskFailed` means that no attempt is left or that the user must act
        first.
    """
    remaining: Sequence[int] = range(len(jobs))
    for number in range(1, config.max_attempts + 1):
        last = number == config.max_attempts
        again: list[int] = []
        attempted = jobs if number == 1 or again_jobs is None else again_jobs
        for event in executor.run_jobs(select_items(attempted, remaining), seconds):
            if isinstance(event, EagerTaskEvent):  # its own stage retries it
                yield event
                continue
            # An executor numbers the jobs of a round from 0.
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
        tasks: Builds the tasks that a finished task of the current stage enables, from the item of
            its name and its record.
        then: The stage after it.
        is_counted: Its early tasks count in the progress of the current stage, which has the same
            unit and amounts.
        build_following: Builds the job that the worker of a task of the current stage runs at once,
            from the item of its name. None: there are other tasks than one for each.
    """

    stage: str
    code: str
    tasks: Callable[[str, TaskRecord], Iterable[Task]]
    then: "NextStage | None" = None
    is_counted: bool = False
    build_following: Callable[[str], FollowingJob] | None = None


@dataclass(frozen=True)
class _SubmittedTask:
    """A queued eager task, with its stage."""

    task: Task
    stage: NextStage


class EagerTasks:
    """Early tasks of later stages during one stage. Does nothing without a next stage or without
    queues.
    """

    def __init__(
        self,
        journal: Journal,
        earlier: EarlierResults,
        next_stage: NextStage | None,
        queues: EagerJobs | None,
        seconds: float,
    ) -> None:
        """Fill `queues`, the executor's, with tasks that may take `seconds` each (0: any time)."""
        self.folder = journal.folder
        self.journal = journal
        self._earlier = earlier
        self.queues = queues
        has_chain = next_stage is not None and next_stage.build_following is not None
        self.next_stage = next_stage if queues is not None or has_chain else None
        if queues is not None:
            queues.seconds = seconds
            queues.next_jobs.clear()  # jobs of an earlier stage remain if its workers died
            queues.later_jobs.clear()
        self.is_counted = self.next_stage is not None and self.next_stage.is_counted
        self.done: Counter[str] = Counter()  # by stage
        self.open: Counter[str] = Counter()  # queued or running, by stage
        self.reused_amount = 0.0  # progress of counted tasks that were done already
        self._steps: dict[int, _SubmittedTask] = {}
        self._submitted = 0
        self._has_earlier: dict[str, bool] = {}
        self._enabled: deque[tuple[NextStage, Iterator[Task]]] = deque()  # not yet built

    def format_title(self, stage: str) -> str:
        """Return the names of the stage and of the stages that start early, for the progress
        line.
        """
        names = [stage]
        next_stage = self.next_stage
        while next_stage is not None:
            names.append(next_stage.stage)
            next_stage = next_stage.then
        return ", ".join(names)

    def get_progress_amount(self, number: int) -> float:
        """Return the progress of the current stage that a queued task makes, by its number; 0 if
        it is not counted.
        """
        step = self._steps[number]
        return (
            step.task.progress_amount if self.is_counted and step.stage is self.next_stage else 0.0
        )

    def get_stage(self, number: int) -> str:
        """Return the stage of a queued task, by its number."""
        return self._steps[number].stage.stage

    def build_job(self, task: Task, then: NextStage | None) -> Job:
        """Return the job of a task, after which the worker goes on with the stage `then`, as far as
        the journal has no record of it that may be reused.
        """
        first = task.build_recorded_job(self.folder)
        following = list[FollowingJob]()
        item = task.name.partition("/")[2]
        while then is not None and then.build_following is not None:
            if self._has_record(then.stage, item):
                break
            following.append(then.build_following(item))
            then = then.then
        return ChainedJob(first, tuple(following)) if following else first

    def _has_record(self, stage: str, item: str) -> bool:
        """Return whether an earlier run left a record of a task, with whatever key."""
        if stage not in self._has_earlier:
            self._has_earlier[stage] = self.journal.has_any_record(stage)
        return self._has_earlier[stage] and self.journal.has_any_record(stage, item)

    def submit_next(
        self, task: Task, record: TaskRecord, returned: dict[str, Any], position: int
    ) -> None:
        """Journal what the worker did after a finished task, which returned something, or queue the
        tasks of the next stage that the task enables. `position` is the task's place in its stage.
        """
        self._record_following(self.next_stage, task, record, returned, position)
        self._fill_queues()

    def _record_following(
        self,
        stage: NextStage | None,
        task: Task,
        record: TaskRecord,
        returned: dict[str, Any],
        position: int | None = None,
    ) -> None:
        if "following" not in returned:
            self._add_enabled(stage, task, record)
            return
        is_complete = True
        for result in returned["following"]:
            assert stage is not None
            if result is None:  # it failed, and its own stage runs it again
                is_complete = False
                break
            (task,) = stage.tasks(task.name.partition("/")[2], record)
            # One task follows each, so that it has the same place in its stage; where an input is
            # missing there, its stage moves it.
            record = save_task_result(self.journal, task, stage.code, result, position)
            self.done[stage.stage] += 1
            stage = stage.then
        if is_complete:
            self._add_enabled(stage, task, record)

    def record_early_result(self, early: EagerTaskEvent) -> None:
        """Journal the result of an early task and queue its successor."""
        if isinstance(early.event, TaskProgress):
            return
        step = self._steps.pop(early.event.index)
        self.open[step.stage.stage] -= 1
        if isinstance(early.event, TaskFailed):
            _log.warning(
                "task %s will be retried by its own stage: %s", step.task.name, early.event.message
            )
        else:
            with self.journal.hold_changes():
                record = save_task_result(
                    self.journal, step.task, step.stage.code, early.event.result
                )
                self._record_following(step.stage.then, step.task, record, early.event.result)
            self.done[step.stage.stage] += 1
        self._fill_queues()

    def _add_enabled(self, stage: NextStage | None, before: Task, record: TaskRecord) -> None:
        if stage is not None and self.queues is not None:
            # In front: a task of a later stage waits for no other one.
            self._enabled.appendleft(
                (stage, iter(stage.tasks(before.name.partition("/")[2], record)))
            )

    def _fill_queues(self) -> None:
        """Queue enabled tasks that have no result yet, as many as fit."""
        while self.queues is not None and self._enabled and len(self.queues) < MAX_QUEUED:
            stage, tasks = self._enabled[0]
            task = next(tasks, None)
            if task is None:
                self._enabled.popleft()
            elif found := self.journal.find_record(task.name, task.compute_key(stage.code)):
                self.reused_amount += (
                    task.progress_amount if self.is_counted and stage is self.next_stage else 0
                )
                self._add_enabled(stage.then, task, found)
            else:
                # Executors prefer the next stage: its results enable later ones.
                queue = (
                    self.queues.next_jobs if stage is self.next_stage else self.queues.later_jobs
                )
                self._earlier.keep_result(task.name)
                queue.append((self._submitted, self.build_job(task, stage.then)))
                self._steps[self._submitted] = _SubmittedTask(task, stage)
                self.open[stage.stage] += 1
                self._submitted += 1
