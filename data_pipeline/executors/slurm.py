"""Run jobs as Slurm job arrays, several at a time: an array for every part of a stage, a few jobs
per array task.

An array is submitted as soon as an eighth of the tasks that may be in Slurm is free, so that no
node waits for the slowest task of an array. Jobs of later stages get their own arrays while the
stage runs.

Writes slurm/ of the dataset folder, and there a folder per array: NUMBER.job per job, and the batch
script. Array tasks read their jobs there and write NUMBER.result.

Invariants:
    - A task is lost only when Slurm no longer knows it and no result has appeared.
    - Arrays of a killed driver are cancelled and gone before anything new is submitted.
    - At most `workers` tasks are in Slurm, or twice an array.
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
from dataclasses import dataclass
from pathlib import Path

from llmsys.config.executor import SlurmExecutorConfig
from llmsys.data_pipeline.executors.base import (
    EagerJobs,
    EagerTaskEvent,
    Event,
    Job,
    JobQueue,
    TaskDone,
    TaskFailed,
    TaskProgress,
)
from llmsys.data_pipeline.executors.local import format_timeout, format_worker_loss
from llmsys.errors import DataError
from llmsys.log import get_logger
from llmsys.storage.atomic_write import PRIVATE, write_bytes_atomically
from llmsys.storage.paths import find_import_root

_log = get_logger(__name__)
_GRACE_POLLS = 3  # network file systems show a result with a delay
_ENDED_BY_TIME = ("TIMEOUT", "DEADLINE")


@dataclass
class _JobArray:
    """A submitted array.

    Attributes:
        id: Slurm's number of it.
        folder: Its jobs and results.
        numbers: Numbers of its jobs, as its events have them.
        seconds: Time limit of a job.
        is_early: Whether the jobs are of later stages.
        polls: For each job without a result, the polls for which Slurm has not listed its task.
    """

    id: str
    folder: Path
    numbers: list[int]
    seconds: float
    is_early: bool
    polls: dict[int, int]


class SlurmExecutor:
    """Job arrays submitted with sbatch, observed through result files and squeue."""

    def __init__(self, config: SlurmExecutorConfig, folder: Path) -> None:
        """Cancel the arrays that a killed run of the same folder left.

        Args:
            config: The `data.executor:` section.
            folder: Folder for job files and results. The name of the arrays follows from its
                absolute path, and array tasks open it under that path.

        Raises:
            DataError: sbatch, squeue or scancel is not on the PATH, or an old array cannot be
                cancelled.
        """
        self.config = config
        self.folder = folder.absolute()
        self.eager_jobs = EagerJobs()
        self._submitted = 0
        # The name follows from the folder, so that a later run finds the arrays of a killed one.
        self.name = (
            f"llmsys-{hashlib.blake2b(str(self.folder).encode(), digest_size=6).hexdigest()}"
        )
        for command in ("sbatch", "squeue", "scancel"):
            if shutil.which(command) is None:
                raise DataError(
                    f"data.executor.kind=slurm needs {command}, which is not on the PATH of this "
                    "machine. Run llmsys on a submit host, or use data.executor.kind=local."
                )
        self._cancel_leftover_jobs()

    def run_jobs(self, jobs: Sequence[Job], seconds: float = 0) -> Iterator[Event | EagerTaskEvent]:
        """Yield events until every job is done or failed, and every eager job too."""
        waiting = JobQueue(jobs)
        arrays = list[_JobArray]()
        while waiting or arrays or self.eager_jobs:
            arrays += self._submit_arrays(waiting, arrays, seconds)
            queued = self._query_queued_tasks()
            for array in arrays:
                for event in self._collect_events(array, queued):
                    yield EagerTaskEvent(event) if array.is_early else event
                if not array.polls:
                    shutil.rmtree(array.folder, ignore_errors=True)
            arrays = [array for array in arrays if array.polls]
            if arrays:
                time.sleep(self.config.poll_seconds)
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Cancel all running arrays of this dataset folder."""
        self._cancel_leftover_jobs()

    def _submit_arrays(
        self, waiting: JobQueue, arrays: Sequence[_JobArray], seconds: float
    ) -> Iterator[_JobArray]:
        """Submit arrays of the jobs that wait, as far as tasks are free."""
        each = self.config.jobs_per_task
        limit = self.config.workers or 2 * self.config.array_tasks
        free = limit - sum(len({number // each for number in array.polls}) for array in arrays)
        # Jobs of later stages first: split_inputs alone would enable millions of them.
        while free and (not arrays or free * 8 >= limit) and (waiting or self.eager_jobs):
            is_early = len(self.eager_jobs) >= each or not waiting
            most = min(free, self.config.array_tasks) * each
            jobs = (
                self._pop_eager_jobs(most)
                if is_early
                else [waiting.pop_next() for _ in range(min(most, len(waiting)))]
            )
            free -= -(-len(jobs) // each)
            yield self._submit_array(
                jobs, self.eager_jobs.seconds if is_early else seconds, is_early
            )

    def _pop_eager_jobs(self, most: int) -> list[tuple[int, Job]]:
        jobs: list[tuple[int, Job]] = []
        while self.eager_jobs and len(jobs) < most:
            jobs.append((self.eager_jobs.later_jobs or self.eager_jobs.next_jobs).popleft())
        return jobs

    def _submit_array(
        self, jobs: Sequence[tuple[int, Job]], seconds: float, is_early: bool = False
    ) -> _JobArray:
        """Write numbered jobs and submit an array of them. A later run finds it by its job name."""
        folder = self.folder / str(self._submitted)
        each = self.config.jobs_per_task
        self._submitted += 1
        _write_jobs(folder, [job for _, job in jobs], each)
        minutes = int(seconds * each // 60) + 1  # Slurm counts minutes
        limit = [f"--time={minutes}"] if seconds else []
        # Slurm expands %a
        logs = str(folder).replace("%", "%%")
        tasks = -(-len(jobs) // each)
        arguments = [
            # A requeued task would overlap with our own retry.
            "sbatch", "--parsable", "--no-requeue", f"--job-name={self.name}",
            f"--chdir={os.getcwd()}",
            f"--array=0-{tasks - 1}", f"--output={logs}/%a.log", *limit,
            *self.config.sbatch_options,
            str(folder / "script.sh"),
        ]  # fmt: skip
        array = _run_command(arguments).strip().split(";")[0]
        _log.info("submitted array %s of %d tasks to Slurm", array, tasks)
        numbers = [number for number, _ in jobs]
        return _JobArray(
            array, folder, numbers, seconds, is_early, dict.fromkeys(range(len(jobs)), 0)
        )

    def _collect_events(
        self, array: _JobArray, queued: set[tuple[str, int]] | None
    ) -> Iterator[Event]:
        """Yield results that have appeared, and a loss after Slurm has not listed a task for
        some polls.
        """
        for position, absent in list(array.polls.items()):
            task = position // self.config.jobs_per_task
            number = array.numbers[position]
            result = array.folder / f"{position}.result"
            if result.exists():
                del array.polls[position]
                yield from _build_events(number, json.loads(result.read_bytes()))
            elif queued is None or (array.id, task) in queued:
                array.polls[position] = 0
            elif absent < _GRACE_POLLS:
                array.polls[position] += 1
            else:
                del array.polls[position]
                yield _build_lost_event(array, number, task)

    def _query_queued_tasks(self) -> set[tuple[str, int]] | None:
        """Return the tasks that Slurm still lists, by array and number. None if Slurm does not
        answer.
        """
        asked = subprocess.run(
            ["squeue", "--noheader", "--array", f"--name={self.name}", "--format=%F %K"],
            capture_output=True,
            text=True,
        )
        if asked.returncode != 0:
            return None
        rows = [line.split() for line in asked.stdout.splitlines()]
        return {(row[0], int(row[1])) for row in rows if len(row) == 2 and row[1].isdigit()}

    def _cancel_leftover_jobs(self) -> None:
        """Cancel the arrays of an earlier run and wait for their end: two drivers must not write
        one folder.
        """
        deadline = time.monotonic() + 120
        while found := self._list_own_jobs():
            subprocess.run(["scancel", f"--name={self.name}"], capture_output=True)
            if time.monotonic() > deadline:
                raise DataError(
                    f"Slurm still has tasks {', '.join(found[:3])}, which an earlier run of this "
                    f"folder submitted. End them with `scancel --name={self.name}`, then run the "
                    "same command again."
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


def _write_jobs(folder: Path, jobs: Sequence[Job], jobs_per_task: int) -> None:
    # jobs are pickles: whoever writes one runs code as this user
    folder.mkdir(mode=0o700, parents=True)
    for number, job in enumerate(jobs):
        # Private: a URL in a job may hold a password.
        write_bytes_atomically(folder / f"{number}.job", pickle.dumps(job), PRIVATE)
    command = shlex.join(
        [
            sys.executable,
            "-m",
            "llmsys.data_pipeline.executors.slurm_task",
            str(folder),
            str(jobs_per_task),
        ]
    )
    # The checkout of the driver: nodes may have another version installed.
    root = find_import_root()
    write_bytes_atomically(
        folder / "script.sh",
        "#!/bin/sh\n"
        f"export PYTHONPATH={shlex.quote(str(root))}${{PYTHONPATH:+:$PYTHONPATH}}\n"
        "export OMP_NUM_THREADS=1\n"
        f'exec {command} "$SLURM_ARRAY_TASK_ID"\n'.encode(),
        PRIVATE,
    )


def _build_lost_event(array: _JobArray, number: int, task: int) -> TaskFailed:
    state = _query_task_state(array.id, task)
    if state in _ENDED_BY_TIME:
        return TaskFailed(number, format_timeout(array.seconds), "", "slow")
    log = array.folder / f"{task}.log"
    tail = log.read_text(errors="replace")[-2_000:] if log.exists() else ""
    return TaskFailed(
        number,
        format_worker_loss(f"ended without a result (Slurm state: {state or 'unknown'})"),
        tail,
        "lost",
    )


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
