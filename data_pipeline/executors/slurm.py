"""Run jobs as Slurm job arrays: one array per block of a stage, a few jobs per array task.

Writes slurm/ of the dataset folder: NUMBER.job per job, and the batch script. Array tasks read their jobs there and
write NUMBER.result.

Invariants:
    - A task is lost only when Slurm no longer knows it and no result has appeared.
    - Arrays of a killed driver are cancelled and gone before anything new is submitted.
"""

import hashlib
import json
import os
import pickle
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_pipeline.executors.base import Event, Job, TaskDone, TaskFailed, TaskProgress
from data_pipeline.executors.local import format_timeout, format_worker_loss
from llmsys.config.executor import SlurmExecutorConfig
from llmsys.errors import DataError
from llmsys.local_files import PRIVATE, write_bytes_atomically
from llmsys.log import get_logger

_log = get_logger(__name__)
_GRACE_POLLS = 3  # network file systems show a result with a delay
_ENDED_BY_TIME = ("TIMEOUT", "DEADLINE")


class SlurmExecutor:
    """Job arrays submitted with sbatch, observed through result files and squeue."""

    eager_jobs = None

    def __init__(self, config: SlurmExecutorConfig, folder: Path) -> None:
        """Use `folder` for jobs and results. Raise DataError without sbatch, or if an old array cannot be cancelled."""
        self.config, self.folder = config, folder.absolute()
        # The name follows from the folder, so that a later run finds the arrays of a killed one.
        self.name = f"llmsys-{hashlib.blake2b(str(self.folder).encode(), digest_size=6).hexdigest()}"
        for command in ("sbatch", "squeue", "scancel"):
            if shutil.which(command) is None:
                raise DataError(
                    f"data.executor.kind=slurm needs {command}, which is not on the PATH of this machine. Run "
                    "llmsys on a submit host, or use data.executor.kind=local."
                )
        self._cancel_leftover_jobs()

    def run_jobs(self, jobs: Sequence[Job], seconds: float = 0) -> Iterator[Event]:
        """Yield events until every job is done or failed."""
        size = self.config.array_tasks * self.config.jobs_per_task
        for first in range(0, len(jobs), size):
            block = jobs[first : first + size]
            self._write_jobs(block)
            array = self._submit_array(-(-len(block) // self.config.jobs_per_task), seconds)
            for event in self._watch_array(array, len(block), seconds):
                yield _shift_index(event, first)
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Cancel all running arrays of this dataset folder."""
        self._cancel_leftover_jobs()

    def _write_jobs(self, jobs: Sequence[Job]) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700, parents=True)  # jobs are pickles: whoever writes one runs code as this user
        for number, job in enumerate(jobs):
            # Private: a URL in a job may hold a password.
            write_bytes_atomically(self.folder / f"{number}.job", pickle.dumps(job), PRIVATE)
        each = str(self.config.jobs_per_task)
        command = shlex.join([sys.executable, "-m", "data_pipeline.executors.slurm_task", str(self.folder), each])
        # The checkout of the driver: nodes may have another version installed.
        root = Path(__file__).resolve().parents[2]
        write_bytes_atomically(
            self.folder / "script.sh",
            f"#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(root))}${{PYTHONPATH:+:$PYTHONPATH}} OMP_NUM_THREADS=1\n"
            f'exec {command} "$SLURM_ARRAY_TASK_ID"\n'.encode(),
            PRIVATE,
        )

    def _submit_array(self, tasks: int, seconds: float) -> str:
        """Submit one array and return its id. A later run finds it by its job name."""
        at_a_time = f"%{self.config.workers}" if self.config.workers else ""
        minutes = int(seconds * self.config.jobs_per_task // 60) + 1  # Slurm counts minutes
        limit = [f"--time={minutes}"] if seconds else []
        logs = str(self.folder).replace("%", "%%")  # Slurm expands %a
        arguments = [
            # A requeued task would overlap with our own retry.
            "sbatch", "--parsable", "--no-requeue", f"--job-name={self.name}", f"--chdir={os.getcwd()}",
            f"--array=0-{tasks - 1}{at_a_time}", f"--output={logs}/%a.log", *limit, *self.config.sbatch_options,
            str(self.folder / "script.sh"),
        ]  # fmt: skip
        array = _run_command(arguments).strip().split(";")[0]
        _log.info("submitted array %s of %d tasks to Slurm", array, tasks)
        return array

    def _watch_array(self, array: str, jobs: int, seconds: float) -> Iterator[Event]:
        """Yield results as they appear, and a loss after Slurm has not listed a task for some polls."""
        left, absent = set(range(jobs)), dict.fromkeys(range(jobs), 0)
        while left:
            known = self._query_queued_tasks(array)
            for number in sorted(left):
                task = number // self.config.jobs_per_task
                result = self.folder / f"{number}.result"
                if result.exists():
                    left.discard(number)
                    yield from _build_events(number, json.loads(result.read_bytes()))
                elif task in known or None in known:
                    absent[number] = 0
                else:
                    absent[number] += 1
                    if absent[number] > _GRACE_POLLS:
                        left.discard(number)
                        yield self._build_lost_event(array, number, seconds)
            if left:
                time.sleep(self.config.poll_seconds)

    def _query_queued_tasks(self, array: str) -> set[int | None]:
        """Return the tasks of an array that Slurm still lists. {None} if Slurm does not answer."""
        asked = subprocess.run(
            ["squeue", "--noheader", "--array", f"--jobs={array}", "--format=%K %t"], capture_output=True, text=True
        )
        if asked.returncode != 0:
            # Slurm forgets an array that has ended.
            return set() if "Invalid job id" in asked.stderr else {None}
        rows = [line.split() for line in asked.stdout.splitlines()]
        return {int(row[0]) for row in rows if len(row) == 2 and row[0].isdigit()}

    def _build_lost_event(self, array: str, number: int, seconds: float) -> TaskFailed:
        task = number // self.config.jobs_per_task
        state = _query_task_state(array, task)
        if state in _ENDED_BY_TIME:
            return TaskFailed(number, format_timeout(seconds), "", "slow")
        log = self.folder / f"{task}.log"
        tail = log.read_text(errors="replace")[-2_000:] if log.exists() else ""
        return TaskFailed(
            number, format_worker_loss(f"ended without a result (Slurm state: {state or 'unknown'})"), tail, "lost"
        )

    def _cancel_leftover_jobs(self) -> None:
        """Cancel the arrays of an earlier run and wait for their end: two drivers must not write one folder."""
        deadline = time.monotonic() + 120
        while found := self._list_own_jobs():
            subprocess.run(["scancel", f"--name={self.name}"], capture_output=True)
            if time.monotonic() > deadline:
                raise DataError(
                    f"Slurm still has tasks {', '.join(found[:3])}, which an earlier run of this folder submitted. "
                    f"End them with `scancel --name={self.name}`, then run the same command again."
                )
            time.sleep(min(self.config.poll_seconds, 1.0))
        shutil.rmtree(self.folder, ignore_errors=True)

    def _list_own_jobs(self) -> list[str]:
        arguments = ["squeue", "--noheader", f"--name={self.name}", "--format=%i"]
        return subprocess.run(arguments, capture_output=True, text=True).stdout.split()


def _run_command(arguments: Sequence[str]) -> str:
    asked = subprocess.run(arguments, capture_output=True, text=True)
    if asked.returncode:
        raise DataError(
            f"{arguments[0]} failed: {(asked.stderr or asked.stdout).strip()}. Correct "
            "data.executor.sbatch_options; finished tasks are kept."
        )
    return asked.stdout


def _query_task_state(array: str, task: int) -> str:
    """Return the accounting state of a finished task, or "" without accounting."""
    if shutil.which("sacct") is None:
        return ""
    arguments = ["sacct", "--noheader", "--parsable2", "--format=State", f"--jobs={array}_{task}"]
    states = subprocess.run(arguments, capture_output=True, text=True).stdout.split()
    return states[0] if states else ""


def _build_events(number: int, result: dict[str, object]) -> list[Event]:
    outcome = {name: value for name, value in result.items() if name not in ("amount", "dropped")}
    ended = TaskDone(number, **outcome) if "result" in outcome else TaskFailed(number, **outcome)  # type: ignore[arg-type]
    return [TaskProgress(number, result["amount"], result["dropped"]), ended]  # type: ignore[arg-type]


def _shift_index(event: Event, first: int) -> Event:
    return type(event)(event.index + first, *(getattr(event, name) for name in event.__slots__[1:]))
