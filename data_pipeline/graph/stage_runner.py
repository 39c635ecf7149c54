"""Run the task graph stage by stage: reuse journaled tasks, give the others to an executor.

Reads and writes the journal, the quarantine and events.jsonl of a dataset folder.

Invariants:
    - A task is journaled only after its files are published.
    - Files that a manifest names do not change before the next manifest, see `core/staging.py`.
    - A failed task stops neither the other tasks nor the next run, which runs only what is missing.
    - An input that fails every attempt is quarantined; the dataset is made without it.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

from data_pipeline.core.journal import Journal, TaskRecord
from data_pipeline.core.staging import begin_change, publish_staged
from data_pipeline.executors.base import (
    EagerTaskEvent,
    Event,
    Executor,
    InlineExecutor,
    TaskDone,
    TaskFailed,
    TaskProgress,
)
from data_pipeline.executors.local import LocalExecutor
from data_pipeline.graph.quarantine import Quarantine, format_quarantine_reason
from data_pipeline.graph.tasks import EagerTasks, NextStage, Task, TaskRetry, run_with_retries
from llmsys.config.executor import (
    ExecutorConfig,
    InlineExecutorConfig,
    LocalExecutorConfig,
    RayExecutorConfig,
    SlurmExecutorConfig,
)
from llmsys.errors import DataError
from llmsys.events import EventWriter
from llmsys.log import get_logger
from llmsys.manifest import MANIFEST_NAME
from llmsys.progress import Progress


def build_executor(config: ExecutorConfig, folder: Path, lock: int) -> Executor:
    """Build the executor that the config names.

    Args:
        config: The section `data.executor`.
        folder: Dataset folder.
        lock: File descriptor of the folder's lock, which local workers keep open.

    Returns:
        The executor. Its workers start with the first job.
    """
    match config:
        case LocalExecutorConfig():
            return LocalExecutor(config.workers, lock)
        case InlineExecutorConfig():
            return InlineExecutor()
        case RayExecutorConfig():
            from data_pipeline.executors.ray import RayExecutor  # ray is an extra

            return RayExecutor(config.address, config.workers)
        case SlurmExecutorConfig():
            from data_pipeline.executors.slurm import SlurmExecutor

            return SlurmExecutor(config, folder / "slurm")
        case unreachable:
            assert_never(unreachable)


class StageProgress:
    """Progress line of a stage. A failed attempt is subtracted, and a finished task counts in full.

    Early tasks show drops only. They are numbered downwards from -1.
    """

    def __init__(self, progress: Progress, totals: Sequence[float]) -> None:
        self.progress, self.totals, self.retries = progress, totals, 0
        self._dropped = 0
        self._amounts: defaultdict[int, float] = defaultdict(float)
        self._drops: defaultdict[int, int] = defaultdict(int)

    def show_event(self, event: Event | EagerTaskEvent | TaskRetry) -> None:
        """Update the progress line."""
        match event:
            case TaskProgress(index, amount, dropped):
                self._add_progress(index, amount, dropped)
            case TaskDone(index):
                self._update_display(self.totals[index] - self._amounts.pop(index, 0), 0)
            case TaskRetry(index):
                self.retries += 1
                self._revert_progress(index)
            case EagerTaskEvent(TaskProgress(index, _, dropped)):
                self._add_progress(-1 - index, 0, dropped)
            case EagerTaskEvent(TaskFailed(index)):
                self._revert_progress(-1 - index)
            case TaskFailed() | EagerTaskEvent():
                pass  # a failure ends the task: its progress stays
            case unreachable:
                assert_never(unreachable)

    def _add_progress(self, index: int, amount: float, dropped: int) -> None:
        self._amounts[index] += amount
        self._drops[index] += dropped
        self._update_display(amount, dropped)

    def _revert_progress(self, index: int) -> None:
        self._update_display(-self._amounts.pop(index, 0), -self._drops.pop(index, 0))

    def _update_display(self, amount: float, dropped: int) -> None:
        self._dropped += dropped
        details = {"dropped": self._dropped, "tried_again": self.retries}
        self.progress.advance(amount, **{name: value for name, value in details.items() if value})


_log = get_logger(__name__)


class StageRunner:
    """Runs the stages of one dataset folder with one executor."""

    def __init__(self, folder: Path, executor: ExecutorConfig, lock: int) -> None:
        """Open a folder whose lock is held under the file descriptor `lock`."""
        self.folder = folder
        self.journal = Journal(folder)
        self.num_run = self.num_reused = 0
        self._early: set[str] = set()  # tasks that ran before their stage
        self._config = executor
        self._quarantine = Quarantine(folder)
        self._outputs: set[Path] = set()
        self._events = EventWriter(folder / "events.jsonl")
        self._executor = build_executor(executor, folder, lock)

    def run_stage(
        self, name: str, tasks: Sequence[Task], *, unit: str, code: str, next_stage: NextStage | None = None
    ) -> list[TaskRecord]:
        """Run the missing tasks of a stage.

        Args:
            name: Name of the stage.
            tasks: All its tasks, done or not.
            unit: Unit of the progress line, such as `B`.
            code: Version of the stage's code, see `pipelines/stage_code.py`.
            next_stage: Stage whose tasks may start early. None: no task starts early.

        Returns:
            The records of all tasks, in their order.

        Raises:
            DataError: If a task failed for good.
        """
        keys = [task.compute_key(code) for task in tasks]
        records = [self.journal.find_record(task.name, key) for task, key in zip(tasks, keys, strict=True)]
        missing = [index for index, record in enumerate(records) if record is None]
        # All outputs count, also of reused tasks: the others are orphans.
        self._outputs.update(self.folder / output for task in tasks for output in task.outputs)
        self.num_reused += len({task.name for task, record in zip(tasks, records, strict=True) if record} - self._early)
        if missing:
            begin_change(self.folder)
            eager_tasks = EagerTasks(self.journal, next_stage, self._executor.eager_jobs)
            self._run_tasks(_StageTasks(name, tasks, keys, records, unit), missing, eager_tasks)
        # A quarantined task has a record without key.
        given_up = [task.name for task, record in zip(tasks, records, strict=True) if record and not record.key]
        self._quarantine.remove_others(name, given_up)
        self.journal.remove_stale_records(name, [task.name for task in tasks])
        return [record for record in records if record is not None]

    def withdraw_manifest(self) -> None:
        """Remove the manifest, because files will now change."""
        (self.folder / MANIFEST_NAME).unlink(missing_ok=True)

    def find_orphaned_files(self) -> list[Path]:
        """Return files in output folders that no task of this run makes, such as those of stages no longer configured.

        Encoded documents are no orphans: a run that ends before the tokens does not list them; the next run needs
        them.
        """
        folders = {output.parent for output in self._outputs}
        work = self.folder / "work"
        folders |= {folder for folder in work.iterdir() if folder.name != "encoded"} if work.is_dir() else set()
        folders |= {self.folder / "decontamination"} if (self.folder / "decontamination").is_dir() else set()
        folders = {folder for folder in folders if folder.is_dir()}  # unpublished outputs are in staging/
        return [path for folder in sorted(folders) for path in sorted(folder.iterdir()) if path not in self._outputs]

    def publish_files(self) -> None:
        """Move the new versions of this run's outputs into place. The manifest must be withdrawn."""
        publish_staged(self.folder, sorted(self._outputs))

    def _run_tasks(self, stage: "_StageTasks", missing: Sequence[int], eager_tasks: EagerTasks) -> None:
        began = time.monotonic()
        total = sum(task.progress_amount for task in stage.tasks)
        done = total - sum(stage.tasks[index].progress_amount for index in missing)
        failures: list[tuple[Task, TaskFailed]] = []
        # Long tasks first, so that no worker idles at the end.
        missing = sorted(missing, key=lambda index: -stage.tasks[index].progress_amount)
        tasks = [stage.tasks[index] for index in missing]
        with Progress(eager_tasks.format_title(stage.name), total, stage.unit, done=done) as progress:
            display = StageProgress(progress, [task.progress_amount for task in tasks])
            jobs, timeout = [task.job for task in tasks], self._get_timeout_seconds(stage)
            for event in run_with_retries(self._executor, jobs, self._config, timeout):
                display.show_event(event)
                match event:
                    case EagerTaskEvent():
                        eager_tasks.record_early_result(event)
                    case TaskDone():
                        eager_tasks.submit_next(
                            missing[event.index], self._save_record(stage, missing[event.index], event.result)
                        )
                    case TaskRetry():
                        _log.warning("task %s will be retried: %s", tasks[event.index].name, event.failed.message)
                    case TaskFailed() if tasks[event.index].fallback_result and event.cause != "mend":
                        stage.records[missing[event.index]] = self._quarantine_task(tasks[event.index], event)
                    case TaskFailed():
                        failures.append((tasks[event.index], event))
                    case TaskProgress():
                        pass
                    case unreachable:
                        assert_never(unreachable)
        self.num_run += len(eager_tasks.done)
        self._early.update(eager_tasks.done)
        seconds = round(time.monotonic() - began, 3)
        counts = {
            "tasks": len(tasks),
            "failed": len(failures),
            "again": display.retries,
            "ahead": len(eager_tasks.done),
        }
        self._events.write("stage", stage=stage.name, **counts, seconds=seconds)
        if failures:
            raise _build_stage_error(stage.name, len(stage.tasks), failures)

    def _save_record(self, stage: "_StageTasks", index: int, result: dict[str, Any]) -> TaskRecord:
        task = stage.tasks[index]
        stage.records[index] = record = self.journal.save_record(task.name, stage.keys[index], task.outputs, result)
        self.num_run += 1
        return record

    def _quarantine_task(self, task: Task, failed: TaskFailed) -> TaskRecord:
        """Quarantine an input. Return a record without key or files, which is never saved."""
        assert task.fallback_result is not None
        reason = format_quarantine_reason(failed.message, self._config.max_attempts)
        result = task.fallback_result(reason)
        self._quarantine.add_task(task.name, failed, self._config.max_attempts, result)
        _log.error("task %s is %s", task.name, reason)
        return TaskRecord(key="", outputs=[], result=result)

    def _get_timeout_seconds(self, stage: "_StageTasks") -> float:
        """Return the time limit of an attempt: 0 unless the dataset can be made without the input."""
        if isinstance(self._config, InlineExecutorConfig) or not all(task.fallback_result for task in stage.tasks):
            return 0
        return self._config.task_seconds

    def close(self) -> None:
        """Stop the workers."""
        self._executor.close()
        self._events.close()


@dataclass(frozen=True)
class _StageTasks:
    """The tasks of one stage, with their keys and the records there are so far."""

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
        f"{len(failures)} of {tasks} tasks of stage {stage} failed, the first is {task.name}: "
        f"{_end_with_period(first.message)} Results of the other tasks are kept: run the same command again to "
        "run only the missing ones."
    )
