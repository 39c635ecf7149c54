"""The executor that a config names: a section in, what does the work out.

Events of tasks in, the progress line of a stage out: how much is done, how much was dropped, what is tried again.

The task graph, one stage at a time: what is done is found in the journal, the rest is given to an executor.

Reads tasks, gives their journal records in the order of the tasks. Promises: a task is recorded only after its files
are published; what a manifest names does not change before the next manifest (see `staging`); a failed task stops
neither the others nor the next run, which does only what is missing; an input that fails every try is quarantined, the
rest goes on without it.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.core.journal import Journal, TaskRecord
from data_pipeline.core.staging import begin_change, publish_staged
from data_pipeline.core.task import Task
from data_pipeline.executors.base import EagerTaskEvent, Event, Executor, TaskDone, TaskFailed, TaskProgress
from data_pipeline.executors.inline import InlineExecutor
from data_pipeline.executors.local import LocalExecutor
from data_pipeline.executors.retry import TaskRetry, run_with_retries
from data_pipeline.graph.eager_tasks import EagerTasks, NextStage
from data_pipeline.graph.quarantine import Quarantine, format_quarantine_reason
from llmsys.config.executor import ExecutorConfig, InlineExecutorConfig, LocalExecutorConfig, RayExecutorConfig
from llmsys.errors import DataError
from llmsys.events import EventWriter
from llmsys.log import get_logger
from llmsys.manifest import MANIFEST_NAME
from llmsys.progress import Progress


def build_executor(config: ExecutorConfig, folder: Path, lock: int) -> Executor:
    """Return what does the tasks of a dataset folder, whose lock is held under the file descriptor `lock`."""
    if isinstance(config, LocalExecutorConfig):
        return LocalExecutor(config.workers, lock)
    if isinstance(config, InlineExecutorConfig):
        return InlineExecutor()
    if isinstance(config, RayExecutorConfig):
        from data_pipeline.executors.ray import RayExecutor  # an extra: imported only where it was asked for

        return RayExecutor(config.address, config.workers)
    from data_pipeline.executors.slurm import SlurmExecutor

    return SlurmExecutor(config, folder / "slurm")


class StageProgress:
    """What the progress of a stage shows: a failed try is taken back, and a task that is done counts as a whole one.

    Of tasks that are done ahead only what they dropped is shown; they are numbered downwards from -1 here.
    """

    def __init__(self, progress: Progress, wholes: Sequence[float]) -> None:
        self.progress, self.wholes, self.again = progress, wholes, 0
        self._dropped = 0
        self._amounts: defaultdict[int, float] = defaultdict(float)
        self._drops: defaultdict[int, int] = defaultdict(int)

    def show_event(self, event: Event | EagerTaskEvent | TaskRetry) -> None:
        """Draw an event."""
        match event:
            case TaskProgress(index, amount, dropped):
                self._add_progress(index, amount, dropped)
            case TaskDone(index):
                self._update_display(self.wholes[index] - self._amounts.pop(index, 0), 0)
            case TaskRetry(index):
                self.again += 1
                self._revert_progress(index)
            case EagerTaskEvent(TaskProgress(index, _, dropped)):
                self._add_progress(-1 - index, 0, dropped)
            case EagerTaskEvent(TaskFailed(index)):
                self._revert_progress(-1 - index)

    def _add_progress(self, index: int, amount: float, dropped: int) -> None:
        self._amounts[index] += amount
        self._drops[index] += dropped
        self._update_display(amount, dropped)

    def _revert_progress(self, index: int) -> None:
        self._update_display(-self._amounts.pop(index, 0), -self._drops.pop(index, 0))

    def _update_display(self, amount: float, dropped: int) -> None:
        self._dropped += dropped
        details = {"dropped": self._dropped, "tried_again": self.again}
        self.progress.advance(amount, **{name: value for name, value in details.items() if value})


_log = get_logger(__name__)


class StageRunner:
    """Does the stages of one dataset folder with one executor."""

    def __init__(self, folder: Path, executor: ExecutorConfig, lock: int) -> None:
        """Work in a folder whose lock is held under the file descriptor `lock`."""
        self.folder = folder
        self.journal = Journal(folder)
        self.made = self.found = 0
        self._early: set[str] = set()  # tasks that this run has made before their stage
        self._config = executor
        self._quarantine = Quarantine(folder)
        self._outputs: set[Path] = set()
        self._events = EventWriter(folder / "events.jsonl")
        self._executor = build_executor(executor, folder, lock)

    def run_stage(
        self, name: str, tasks: Sequence[Task], *, unit: str, code: str, following: NextStage | None = None
    ) -> list[TaskRecord]:
        """Do what is missing of a stage and return the records of all its tasks; DataError when some failed.

        Of the stage that is `following`, what this one's records make possible may be done on the way.
        """
        keys = [task.compute_key(code) for task in tasks]
        records = [self.journal.find_record(task.name, key) for task, key in zip(tasks, keys, strict=True)]
        missing = [index for index, record in enumerate(records) if record is None]
        self._outputs.update(self.folder / output for task in tasks for output in task.outputs)
        self.found += len({task.name for task, record in zip(tasks, records, strict=True) if record} - self._early)
        if missing:
            begin_change(self.folder)
            forerun = EagerTasks(self.journal, following, self._executor.eager_jobs)
            self._run_tasks(_StageTasks(name, tasks, keys, records, unit), missing, forerun)
        given_up = [task.name for task, record in zip(tasks, records, strict=True) if record and not record.key]
        self._quarantine.remove_others(name, given_up)
        self.journal.remove_stale_records(name, [task.name for task in tasks])
        return [record for record in records if record is not None]

    def withdraw_manifest(self) -> None:
        """Take the manifest away: from here on the files are not what it says."""
        (self.folder / MANIFEST_NAME).unlink(missing_ok=True)

    def find_orphaned_files(self) -> list[Path]:
        """Return the files beside the outputs of this run's tasks that none of them makes.

        What stages left that are asked for no longer is among them. Encoded documents are not: a run that ends before
        the tokens does not ask for them, and the next one will.
        """
        rooms = {output.parent for output in self._outputs}
        work = self.folder / "work"
        rooms |= {room for room in work.iterdir() if room.name != "encoded"} if work.is_dir() else set()
        rooms |= {self.folder / "decontamination"} if (self.folder / "decontamination").is_dir() else set()
        rooms = {room for room in rooms if room.is_dir()}  # until they are published, new ones are in staging/
        return [path for room in sorted(rooms) for path in sorted(room.iterdir()) if path not in self._outputs]

    def publish_files(self) -> None:
        """Put the new versions of this run's outputs in their places, with the manifest withdrawn."""
        publish_staged(self.folder, sorted(self._outputs))

    def _run_tasks(self, stage: "_StageTasks", missing: Sequence[int], forerun: EagerTasks) -> None:
        began = time.monotonic()
        total = sum(task.progress_amount for task in stage.tasks)
        done = total - sum(stage.tasks[index].progress_amount for index in missing)
        failures: list[tuple[Task, TaskFailed]] = []
        missing = sorted(
            missing, key=lambda index: -stage.tasks[index].progress_amount
        )  # so that no worker idles at the end
        tasks = [stage.tasks[index] for index in missing]
        with Progress(forerun.format_title(stage.name), total, stage.unit, done=done) as progress:
            meter = StageProgress(progress, [task.progress_amount for task in tasks])
            jobs, patience = [task.job for task in tasks], self._get_timeout_seconds(stage)
            for event in run_with_retries(self._executor, jobs, self._config, patience):
                meter.show_event(event)
                match event:
                    case EagerTaskEvent():
                        forerun.record_early_result(event)
                    case TaskDone():
                        forerun.submit_next(
                            missing[event.index], self._save_record(stage, missing[event.index], event.result)
                        )
                    case TaskRetry():
                        _log.warning("task %s will be tried again: %s", tasks[event.index].name, event.failed.message)
                    case TaskFailed() if tasks[event.index].fallback_result and event.cause != "mend":
                        stage.records[missing[event.index]] = self._quarantine_task(tasks[event.index], event)
                    case TaskFailed():
                        failures.append((tasks[event.index], event))
        self.made += len(forerun.done)
        self._early.update(forerun.done)
        seconds = round(time.monotonic() - began, 3)
        counts = {"tasks": len(tasks), "failed": len(failures), "again": meter.again, "ahead": len(forerun.done)}
        self._events.write("stage", stage=stage.name, **counts, seconds=seconds)
        if failures:
            raise _build_stage_error(stage.name, len(stage.tasks), failures)

    def _save_record(self, stage: "_StageTasks", index: int, result: dict[str, Any]) -> TaskRecord:
        task = stage.tasks[index]
        stage.records[index] = record = self.journal.save_record(task.name, stage.keys[index], task.outputs, result)
        self.made += 1
        return record

    def _quarantine_task(self, task: Task, failed: TaskFailed) -> TaskRecord:
        """Note a quarantined input, and return a record without key or files, which is never saved."""
        assert task.fallback_result is not None
        reason = format_quarantine_reason(failed.message, self._config.max_attempts)
        result = task.fallback_result(reason)
        self._quarantine.add_task(task.name, failed, self._config.max_attempts, result)
        _log.error("task %s is %s", task.name, reason)
        return TaskRecord(key="", outputs=[], result=result)

    def _get_timeout_seconds(self, stage: "_StageTasks") -> float:
        """Wall clock of a try: only where the dataset can do without the input."""
        if isinstance(self._config, InlineExecutorConfig) or not all(task.fallback_result for task in stage.tasks):
            return 0
        return self._config.task_seconds

    def close(self) -> None:
        """End the workers."""
        self._executor.close()
        self._events.close()


@dataclass(frozen=True)
class _StageTasks:
    """The tasks of one stage, with their keys and, once there, their records."""

    name: str
    tasks: Sequence[Task]
    keys: Sequence[str]
    records: list[TaskRecord | None]
    unit: str


def _end_with_period(message: str) -> str:
    return message if message.endswith(".") else f"{message}."


def _build_stage_error(stage: str, tasks: int, failures: Sequence[tuple[Task, TaskFailed]]) -> DataError:
    for task, failed in failures:
        if failed.traceback:
            _log.error("task %s failed:\n%s", task.name, failed.traceback)
    task, first = min(failures, key=lambda failure: failure[0].name)
    if tasks == 1 and not first.traceback:
        return DataError(first.message)
    return DataError(
        f"{len(failures)} of {tasks} tasks of stage {stage} failed, "
        f"the first is {task.name}: {_end_with_period(first.message)} "
        f"What the other tasks made is kept: run the same command again to do only what is missing."
    )
