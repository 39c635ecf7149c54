"""The task graph, one stage at a time: what is done is found in the journal, the rest is given to an executor.

Reads tasks, gives their journal records in the order of the tasks. Promises: a task is recorded only after its files
are published; what a manifest names does not change before the next manifest (see `staging`); a failed task stops
neither the others nor the next run, which does only what is missing; an input that fails every try is quarantined, the
rest goes on without it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.executors.choose import choose_executor
from data_pipeline.executors.event import Done, Early, Failed
from data_pipeline.executors.tries import Again, run_with_tries
from data_pipeline.following import Following, Forerun
from data_pipeline.journal import Journal, Record
from data_pipeline.meter import Meter
from data_pipeline.quarantine import Quarantine, quarantine_reason
from data_pipeline.staging import begin_change, publish_staged
from data_pipeline.task import Task
from llmsys.config.executor import ExecutorConfig, InlineExecutor
from llmsys.errors import DataError
from llmsys.events import EventWriter
from llmsys.log import logger
from llmsys.manifest import MANIFEST_NAME
from llmsys.progress import Progress

_log = logger(__name__)


class Workshop:
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
        self._executor = choose_executor(executor, folder, lock)

    def stage(
        self, name: str, tasks: Sequence[Task], *, unit: str, code: str, following: Following | None = None
    ) -> list[Record]:
        """Do what is missing of a stage and return the records of all its tasks; DataError when some failed.

        Of the stage that is `following`, what this one's records make possible may be done on the way.
        """
        keys = [task.key(code) for task in tasks]
        records = [self.journal.find(task.name, key) for task, key in zip(tasks, keys, strict=True)]
        missing = [index for index, record in enumerate(records) if record is None]
        self._outputs.update(self.folder / output for task in tasks for output in task.outputs)
        self.found += len({task.name for task, record in zip(tasks, records, strict=True) if record} - self._early)
        if missing:
            begin_change(self.folder)
            forerun = Forerun(self.journal, following, self._executor.ahead)
            self._make(_Stage(name, tasks, keys, records, unit), missing, forerun)
        given_up = [task.name for task, record in zip(tasks, records, strict=True) if record and not record.key]
        self._quarantine.keep_only(name, given_up)
        self.journal.forget_others(name, [task.name for task in tasks])
        return [record for record in records if record is not None]

    def withdraw_manifest(self) -> None:
        """Take the manifest away: from here on the files are not what it says."""
        (self.folder / MANIFEST_NAME).unlink(missing_ok=True)

    def leftovers(self) -> list[Path]:
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

    def _make(self, stage: "_Stage", missing: Sequence[int], forerun: Forerun) -> None:
        began = time.monotonic()
        total = sum(task.amount for task in stage.tasks)
        done = total - sum(stage.tasks[index].amount for index in missing)
        failures: list[tuple[Task, Failed]] = []
        missing = sorted(missing, key=lambda index: -stage.tasks[index].amount)  # so that no worker idles at the end
        tasks = [stage.tasks[index] for index in missing]
        with Progress(forerun.title(stage.name), total, stage.unit, done=done) as progress:
            meter = Meter(progress, [task.amount for task in tasks])
            jobs, patience = [task.job for task in tasks], self._patience(stage)
            for event in run_with_tries(self._executor, jobs, self._config, patience):
                meter.show(event)
                match event:
                    case Early():
                        forerun.hear(event)
                    case Done():
                        forerun.offer(missing[event.index], self._keep(stage, missing[event.index], event.result))
                    case Again():
                        _log.warning("task %s will be tried again: %s", tasks[event.index].name, event.failed.message)
                    case Failed() if tasks[event.index].without and event.cause != "mend":
                        stage.records[missing[event.index]] = self._give_up(tasks[event.index], event)
                    case Failed():
                        failures.append((tasks[event.index], event))
        self.made += len(forerun.done)
        self._early.update(forerun.done)
        seconds = round(time.monotonic() - began, 3)
        counts = {"tasks": len(tasks), "failed": len(failures), "again": meter.again, "ahead": len(forerun.done)}
        self._events.write("stage", stage=stage.name, **counts, seconds=seconds)
        if failures:
            raise _failure(stage.name, len(stage.tasks), failures)

    def _keep(self, stage: "_Stage", index: int, result: dict[str, Any]) -> Record:
        task = stage.tasks[index]
        stage.records[index] = record = self.journal.save(task.name, stage.keys[index], task.outputs, result)
        self.made += 1
        return record

    def _give_up(self, task: Task, failed: Failed) -> Record:
        """Note a quarantined input, and return a record without key or files, which is never saved."""
        assert task.without is not None
        reason = quarantine_reason(failed.message, self._config.tries)
        result = task.without(reason)
        self._quarantine.put(task.name, failed, self._config.tries, result)
        _log.error("task %s is %s", task.name, reason)
        return Record(key="", outputs=[], result=result)

    def _patience(self, stage: "_Stage") -> float:
        """Wall clock of a try: only where the dataset can do without the input."""
        if isinstance(self._config, InlineExecutor) or not all(task.without for task in stage.tasks):
            return 0
        return self._config.task_seconds

    def close(self) -> None:
        """End the workers."""
        self._executor.close()
        self._events.close()


@dataclass(frozen=True)
class _Stage:
    """The tasks of one stage, with their keys and, once there, their records."""

    name: str
    tasks: Sequence[Task]
    keys: Sequence[str]
    records: list[Record | None]
    unit: str


def _sentence(message: str) -> str:
    return message if message.endswith(".") else f"{message}."


def _failure(stage: str, tasks: int, failures: Sequence[tuple[Task, Failed]]) -> DataError:
    for task, failed in failures:
        if failed.traceback:
            _log.error("task %s failed:\n%s", task.name, failed.traceback)
    task, first = min(failures, key=lambda failure: failure[0].name)
    if tasks == 1 and not first.traceback:
        return DataError(first.message)
    return DataError(
        f"{len(failures)} of {tasks} tasks of stage {stage} failed, "
        f"the first is {task.name}: {_sentence(first.message)} "
        f"What the other tasks made is kept: run the same command again to do only what is missing."
    )
