"""The task graph, one stage at a time: what is done is found in the journal, the rest is given to an executor.

Reads tasks, gives their journal records in the order of the tasks. Promises: a task is recorded only after its files
are published; the manifest is withdrawn before the first file changes; a failed task stops neither the others nor the
next run, which does only what is missing.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.executors.event import Advanced, Done, Failed, Job
from data_pipeline.executors.inline import Inline
from data_pipeline.executors.local import LocalPool
from data_pipeline.journal import Journal, Record, digest_of
from llmsys.config.executor import InlineExecutor, LocalExecutor
from llmsys.errors import DataError
from llmsys.log import EventWriter, Progress, logger
from llmsys.manifest import MANIFEST_NAME

_log = logger(__name__)


@dataclass(frozen=True)
class Task:
    """One call that makes some files.

    Attributes:
        name: "stage/what", unique in the graph; also the name of its record.
        inputs: everything that decides the outputs, besides the code: plain data that JSON can hold.
        outputs: the files it publishes, relative to the dataset folder.
        job: what makes them; picklable.
        amount: its share of the stage's progress, in the stage's unit.
    """

    name: str
    inputs: Sequence[Any]
    outputs: Sequence[str]
    job: Job
    amount: float


class Workshop:
    """Does the stages of one dataset folder with one executor."""

    def __init__(self, folder: Path, executor: LocalExecutor | InlineExecutor, lock: int) -> None:
        """Work in a folder whose lock is held under the file descriptor `lock`."""
        self.folder = folder
        self.journal = Journal(folder)
        self.made = self.found = 0
        self._outputs: set[Path] = set()
        self._events = EventWriter(folder / "events.jsonl")
        match executor:
            case LocalExecutor():
                self._executor: LocalPool | Inline = LocalPool(executor.workers, executor.tries, lock)
            case InlineExecutor():
                self._executor = Inline()

    def stage(self, name: str, tasks: Sequence[Task], *, unit: str, code: str) -> list[Record]:
        """Do what is missing of a stage and return the records of all its tasks; DataError when some failed."""
        keys = [digest_of(code, task.name, task.inputs) for task in tasks]
        records = [self.journal.find(task.name, key) for task, key in zip(tasks, keys, strict=True)]
        missing = [index for index, record in enumerate(records) if record is None]
        self._outputs.update(self.folder / output for task in tasks for output in task.outputs)
        self.found += len(tasks) - len(missing)
        if missing:
            self.withdraw_manifest()
            self._make(name, tasks, keys, records, missing, unit)
        self.journal.forget_others(name, [task.name for task in tasks])
        return [record for record in records if record is not None]

    def withdraw_manifest(self) -> None:
        """Take the manifest away: from here on the files are not what it says."""
        (self.folder / MANIFEST_NAME).unlink(missing_ok=True)

    def leftovers(self) -> list[Path]:
        """Return the files beside the outputs of this run's tasks that none of them makes."""
        rooms = sorted({output.parent for output in self._outputs})
        return [path for room in rooms for path in sorted(room.iterdir()) if path not in self._outputs]

    def _make(
        self,
        name: str,
        tasks: Sequence[Task],
        keys: Sequence[str],
        records: list[Record | None],
        missing: Sequence[int],
        unit: str,
    ) -> None:
        began = time.monotonic()
        total = sum(task.amount for task in tasks)
        done = total - sum(tasks[index].amount for index in missing)
        failures: list[tuple[Task, Failed]] = []
        dropped = 0
        with Progress(name, total, unit, done=done) as progress:
            for event in self._executor.run([tasks[index].job for index in missing]):
                match event:
                    case Advanced():
                        dropped += event.dropped
                        progress.advance(event.amount, **({"dropped": dropped} if dropped else {}))
                    case Done():
                        index = missing[event.index]
                        task = tasks[index]
                        records[index] = self.journal.save(task.name, keys[index], task.outputs, event.result)
                        self.made += 1
                    case Failed():
                        failures.append((tasks[missing[event.index]], event))
        seconds = time.monotonic() - began
        self._events.write("stage", stage=name, tasks=len(missing), failed=len(failures), seconds=round(seconds, 3))
        if failures:
            raise _failure(name, len(tasks), failures)

    def close(self) -> None:
        """End the workers."""
        self._executor.close()
        self._events.close()


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
