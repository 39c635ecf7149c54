"""Run the task graph stage by stage: reuse journaled tasks, give the others to an executor.

Reads and writes the journal, the quarantine and events.jsonl of a dataset folder.

Invariants:
    - A task is journaled only after its files are published.
    - Files that a manifest names do not change before the next manifest, see `core/staging.py`.
    - A failed task stops neither the other tasks nor the next run, which runs only what is missing.
    - An input that fails every attempt is quarantined; the dataset is made without it.
"""

import shutil
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, assert_never

import numpy as np

from llmsys.config.executor import (
    ExecutorConfig,
    InlineExecutorConfig,
    LocalExecutorConfig,
    RayExecutorConfig,
    SlurmExecutorConfig,
)
from llmsys.data_pipeline.core.earlier_results import EarlierResults
from llmsys.data_pipeline.core.journal import Journal
from llmsys.data_pipeline.core.staging import (
    JOURNAL,
    SCORES,
    OutputNames,
    begin_change,
    publish_staged,
)
from llmsys.data_pipeline.core.task_record import TaskRecord
from llmsys.data_pipeline.executors.base import (
    EagerTaskEvent,
    Event,
    Executor,
    InlineExecutor,
    LazySequence,
    TaskDone,
    TaskFailed,
    TaskProgress,
    select_items,
)
from llmsys.data_pipeline.executors.local import LocalExecutor
from llmsys.data_pipeline.graph.quarantine import (
    FailureSummary,
    Quarantine,
    format_quarantine_reason,
)
from llmsys.data_pipeline.graph.tasks import (
    EagerTasks,
    NextStage,
    RecordList,
    Task,
    TaskRetry,
    run_with_retries,
    save_task_result,
)
from llmsys.dataset.manifest import MANIFEST_NAME
from llmsys.events import EventWriter
from llmsys.log import get_logger
from llmsys.progress import Progress
from llmsys.storage.pack_files import is_packed_name, parse_packed_name, release_packs


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
            from llmsys.data_pipeline.executors.ray import RayExecutor  # ray is an extra

            return RayExecutor(config.address, config.workers)
        case SlurmExecutorConfig():
            from llmsys.data_pipeline.executors.slurm import SlurmExecutor

            return SlurmExecutor(config, folder / "slurm")
        case unreachable:
            assert_never(unreachable)


class EarlyTasks(Protocol):
    """Tasks of later stages that start early, as the progress line sees them."""

    @property
    def open(self) -> Mapping[str, int]:
        """Tasks that are queued or run, by stage."""

    def get_progress_amount(self, number: int) -> float:
        """Return the progress of the current stage that a task makes."""

    def get_stage(self, number: int) -> str:
        """Return the stage of a task."""


class StageProgress:
    """Progress line of a stage. A failed attempt is subtracted, and a finished task counts in full.

    Early tasks show drops, and progress if their amount is not 0. They are numbered downwards
    from -1. Where all that is counted is done, the line names the stages that still run.
    """

    def __init__(
        self,
        progress: Progress,
        stage: str,
        totals: Sequence[float] | np.ndarray[Any, np.dtype[np.float64]],
        early: EarlyTasks,
    ) -> None:
        self.progress = progress
        self.stage = stage
        self.totals = totals
        self.retries = 0
        self._early = early
        self._open = len(totals)
        # The later stage that a chain of jobs has come to, by the number of its task.
        self._following = dict[int, str]()
        self._dropped = 0
        self._amounts: defaultdict[int, float] = defaultdict(float)
        self._drops: defaultdict[int, int] = defaultdict(int)

    def show_event(self, event: Event | EagerTaskEvent | TaskRetry) -> None:
        """Update the progress line."""
        match event:
            case TaskProgress(index, amount, dropped, following):
                if following:  # its own stage is done
                    self._following[index] = following
                    amount = float(self.totals[index]) - self._amounts[index]
                self._add_progress(index, amount, dropped)
            case TaskDone(index):
                self._open -= 1
                self._complete(index, float(self.totals[index]))
            case TaskRetry(index):
                self.retries += 1
                self._revert_progress(index)
            case EagerTaskEvent(TaskProgress(index, amount, dropped, following)):
                whole = self._early.get_progress_amount(index)
                if following:
                    self._following[-1 - index] = following
                    amount = whole - self._amounts[-1 - index]
                self._add_progress(-1 - index, amount if whole else 0, dropped)
            case EagerTaskEvent(TaskDone(index)):
                self._complete(-1 - index, self._early.get_progress_amount(index))
            case EagerTaskEvent(TaskFailed(index)):
                self._revert_progress(-1 - index)
            case TaskFailed(index):
                self._open -= 1  # a failure ends the task: its progress stays
                self._following.pop(index, None)
            case EagerTaskEvent():
                pass
            case unreachable:
                assert_never(unreachable)

    def describe_remainder(self) -> str:
        """Return the stages of the tasks that are not done, with their numbers; "" where all
        are.
        """
        counts = Counter[str]({self.stage: self._open})
        counts.update(self._early.open)
        for number, stage in self._following.items():
            counts[self.stage if number >= 0 else self._early.get_stage(-1 - number)] -= 1
            counts[stage] += 1
        return ", ".join(
            f"{stage} ({count} {'task' if count == 1 else 'tasks'})"
            for stage, count in counts.items()
            if count > 0
        )

    def _complete(self, number: int, amount: float) -> None:
        self._following.pop(number, None)
        self._drops.pop(number, 0)  # memory does not grow with the tasks
        if amount := amount - self._amounts.pop(number, 0):
            self.update_display(amount, 0)

    def _add_progress(self, index: int, amount: float, dropped: int) -> None:
        self._amounts[index] += amount
        self._drops[index] += dropped
        self.update_display(amount, dropped)

    def _revert_progress(self, index: int) -> None:
        self._following.pop(index, None)
        self.update_display(-self._amounts.pop(index, 0), -self._drops.pop(index, 0))

    def update_display(self, amount: float, dropped: int) -> None:
        """Add an amount and dropped documents; also of tasks that were done already."""
        self._dropped += dropped
        details = {"dropped": self._dropped, "retries": self.retries}
        self.progress.advance(amount, **{name: value for name, value in details.items() if value})


_log = get_logger(__name__)


class StageRunner:
    """Runs the stages of one dataset folder with one executor."""

    def __init__(self, folder: Path, executor: ExecutorConfig, lock: int) -> None:
        """Open the journal and the event log of a dataset folder, and prepare the executor.

        Args:
            folder: The dataset folder.
            executor: The `data.executor:` section.
            lock: File descriptor under which the lock of the folder is held. The caller keeps it
                until the runner is closed.

        Raises:
            DataError: The executor cannot be used on this machine.
        """
        self.folder = folder
        self.journal = Journal(folder)
        self.earlier = EarlierResults(self.journal, executor.earlier_results_bytes)
        self.num_run = self.num_reused = 0
        self._stages = set[str]()  # those that have run
        self._early: Counter[str] = Counter()  # tasks that ran before their stage, by stage
        self._config = executor
        self._task_seconds = (
            0.0 if isinstance(executor, InlineExecutorConfig) else executor.task_seconds
        )
        self._quarantine = Quarantine(folder)
        self._outputs = OutputNames(folder / JOURNAL)
        # Names of packs that hold an output of this run: as many as gigabytes and workers.
        self._packs = set[str]()
        self._events = EventWriter(folder / "events.jsonl")
        self._executor = build_executor(executor, folder, lock)

    def run_stage(
        self,
        name: str,
        tasks: Sequence[Task],
        *,
        unit: str,
        code: str,
        next_stage: NextStage | None = None,
    ) -> Sequence[TaskRecord]:
        """Run the missing tasks of a stage.

        Args:
            name: Name of the stage.
            tasks: All its tasks, done or not. Each is built again where it is needed if the
                sequence is lazy.
            unit: Unit of the progress line, such as `B`.
            code: Version of the stage's code, see `pipelines/stage_code.py`.
            next_stage: Stage whose tasks may start early. None: no task starts early.

        Returns:
            The records of all tasks, in their order. They stay in the journal until they are asked
            for.

        Raises:
            DataError: If a task failed for good.
        """
        stage = _StageTasks(name, tasks, code, unit)
        with self.journal.hold_changes():
            for index, task in enumerate(tasks):
                # All outputs count, also of reused tasks: the others are orphans.
                for output in task.outputs:
                    is_packed = is_packed_name(output)
                    stage.has_packed |= is_packed
                    if not is_packed:
                        self._outputs.add(output)
                key = task.compute_key(code)
                is_done = self.journal.has_record(
                    task.name, key, index
                ) or self.earlier.restore_result(task.name, key, index)
                if not is_done:
                    self.earlier.keep_result(task.name)
                stage.add_amount(task, None if is_done else index)
        self.num_reused += max(0, len(tasks) - len(stage.missing) - self._early[name])
        if stage.missing:
            begin_change(self.folder)
            queues = self._executor.eager_jobs
            eager_tasks = EagerTasks(
                self.journal, self.earlier, next_stage, queues, self._task_seconds
            )
            self._run_tasks(stage, eager_tasks)
        self._quarantine.remove_others(name, self.journal.list_unfinished(name))
        self._stages.add(name)
        self.earlier.keep_stage(name, len(tasks))
        self.journal.remove_stale_records(name, len(tasks))
        if stage.has_packed:
            self._add_packed_outputs(name)
        return RecordList(self.journal, name, len(tasks))

    def _add_packed_outputs(self, stage: str) -> None:
        """Keep the packs that hold outputs of a stage, and its files of earlier releases."""
        for name in self.journal.iter_output_names(stage):
            part = parse_packed_name(name)
            if part is None:
                self._outputs.add(name)
            else:
                self._packs.add(part[0])

    def remove_earlier_results(self) -> None:
        """Keep no more results of earlier configs than the config allows, and their packs."""
        if not self._config.earlier_results_bytes:
            shutil.rmtree(self.folder / "work" / SCORES, ignore_errors=True)
        if self.num_run or self.earlier.is_changed:
            self.earlier.keep_other_stages(self._stages)
        self.earlier.remove_oldest()
        self._packs.update(self.earlier.iter_packs())

    def record_core_pages(self, counts: Mapping[str, int]) -> None:
        """Write an event with the number of pages, of those that the compiled core extracted, and
        of those that it left to Python, if this run extracted any.

        Args:
            counts: `pages`, `compiled_pages` and `left_pages`; of earlier runs, too.
        """
        if self.num_run:
            self._events.write("core", **counts)

    def withdraw_manifest(self) -> None:
        """Remove the manifest, because files will now change."""
        (self.folder / MANIFEST_NAME).unlink(missing_ok=True)

    def find_orphaned_files(self) -> list[Path]:
        """Return files in output folders that no task of this run makes, such as those of stages no
        longer configured.

        Encoded documents are no orphans: a run that ends before the tokens does not list them; the
        next run needs them. Nor are scores of models, which no task lists.
        """
        folders = {self.folder / folder for folder in self._outputs.folders}
        work = self.folder / "work"
        folders |= (
            {folder for folder in work.iterdir() if folder.name not in ("encoded", SCORES)}
            if work.is_dir()
            else set()
        )
        folders |= (
            {self.folder / "decontamination"}
            if (self.folder / "decontamination").is_dir()
            else set()
        )
        # unpublished outputs are in staging/
        folders = {folder for folder in folders if folder.is_dir()}
        return [
            path
            for folder in sorted(folders)
            for path in sorted(
                path
                for path in folder.rglob("*")
                if path.is_file() and not self._is_output(str(path.relative_to(self.folder)))
            )
        ]

    def _is_output(self, name: str) -> bool:
        return name in self._packs or name in self._outputs

    def publish_files(self) -> None:
        """Move the new versions of this run's outputs into place. The manifest must be
        withdrawn.
        """
        publish_staged(self.folder, self._outputs.__contains__)

    def _run_tasks(self, stage: "_StageTasks", eager_tasks: EagerTasks) -> None:
        began = time.monotonic()
        # Long tasks first, so that no worker idles at the end.
        order = np.argsort(-np.array(stage.amounts), kind="stable")
        missing = np.array(stage.missing)[order]
        amounts = np.array(stage.amounts)[order]
        tasks = select_items(stage.tasks, missing)
        chained = LazySequence(
            len(missing),
            lambda number: eager_tasks.build_job(tasks[number], eager_tasks.next_stage),
        )
        # A later stage counts its own attempts.
        alone = LazySequence(
            len(missing), lambda number: tasks[number].build_recorded_job(self.folder)
        )
        failures = FailureSummary()
        # Without the input of a slow task the dataset must still be possible.
        seconds = self._task_seconds if stage.has_fallbacks else 0
        title = eager_tasks.format_title(stage.name)
        to_do = float(amounts.sum())
        total = stage.total + (to_do if eager_tasks.is_counted else 0)
        with Progress(title, total, stage.unit, done=stage.total - to_do) as progress:
            display = StageProgress(progress, stage.name, amounts, eager_tasks)
            progress.describe_remainder = display.describe_remainder
            for event in run_with_retries(
                self._executor, chained, self._config, seconds, again_jobs=alone
            ):
                if not isinstance(event, TaskDone):
                    display.show_event(event)
                match event:
                    case EagerTaskEvent():
                        eager_tasks.record_early_result(event)
                        progress.advance(0)  # other tasks may be left now
                    case TaskDone():
                        index = int(missing[event.index])
                        task = tasks[event.index]
                        with self.journal.hold_changes():
                            record = save_task_result(
                                self.journal, task, stage.code, event.result, index
                            )
                            eager_tasks.submit_next(task, record, event.result, index)
                        self.num_run += 1
                        # With the tasks that this one has enabled among those that are left.
                        display.show_event(event)
                    case TaskRetry():
                        _log.warning(
                            "task %s will be retried: %s",
                            tasks[event.index].name,
                            event.failed.message,
                        )
                    # Where the user must act, no input is to blame, and none is quarantined.
                    case TaskFailed() if stage.has_fallbacks and event.cause != "mend":
                        self._quarantine_task(tasks[event.index], event, int(missing[event.index]))
                    case TaskFailed():
                        failures.add(tasks[event.index], event)
                    case TaskProgress():
                        pass
                    case unreachable:
                        assert_never(unreachable)
            display.update_display(eager_tasks.reused_amount, 0)
        self.num_run += sum(eager_tasks.done.values())
        self._early.update(eager_tasks.done)
        counts = {"tasks": len(tasks), "failed": failures.count, "retries": display.retries}
        counts["eager"] = sum(eager_tasks.done.values())
        self._events.write(
            "stage", stage=stage.name, **counts, seconds=round(time.monotonic() - began, 3)
        )
        if failures.first is not None:
            raise failures.build_error(stage.name, len(stage.tasks))

    def _quarantine_task(self, task: Task, failed: TaskFailed, index: int) -> None:
        """Quarantine an input. Its record has neither key nor files, so that the next run tries
        it again.
        """
        assert task.fallback_result is not None
        reason = format_quarantine_reason(failed.message, self._config.max_attempts)
        result = task.fallback_result(reason)
        self._quarantine.add_task(task.name, failed, self._config.max_attempts, result)
        _log.error("task %s is %s", task.name, reason)
        self.journal.save_record(task.name, "", [], result, index)

    def close(self) -> None:
        """Stop the workers."""
        self._executor.close()
        release_packs(self.folder)
        self._events.close()
        self.journal.close()


class _StageTasks:
    """The tasks of one stage, and the indices and amounts of those that have no record yet."""

    def __init__(self, name: str, tasks: Sequence[Task], code: str, unit: str) -> None:
        self.name = name
        self.tasks = tasks
        self.code = code
        self.unit = unit
        # 16 bytes a task
        self.missing = array("q")
        self.amounts = array("d")
        self.total = 0.0
        self.has_fallbacks = True
        self.has_packed = False

    def add_amount(self, task: Task, missing: int | None) -> None:
        """Count a task, which is done or is the missing one of an index."""
        self.total += task.progress_amount
        self.has_fallbacks &= task.fallback_result is not None
        if missing is not None:
            self.missing.append(missing)
            self.amounts.append(task.progress_amount)
