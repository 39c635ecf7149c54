"""Tasks in worker processes on this machine; a worker that dies fails its task's try and nothing else.

Reads jobs, gives events as they happen. Promises: results do not depend on the number of workers; one that dies or
takes too long is replaced; workers outlive nobody, see `worker.py`.

Jobs of the next stage go to workers that have done such already: what they load and learn (models, words), each worker
would load and learn anew. Those of later stages are for whoever has nothing else to do. So nobody waits for the slowest
job of a stage but at the very end.
"""

import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import wait

from data_pipeline.executors.base import EagerJobs, EagerTaskEvent, Event, Job, Queue, TaskFailed, TaskProgress
from data_pipeline.executors.worker_process import WorkerProcess

BEHIND = 3
"""How many early jobs may wait for each worker that does such: beginning with them costs another about as much time."""


def count_available_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class LocalExecutor:
    """Worker processes that live through all stages of a run."""

    def __init__(self, workers: int, lock: int | None = None) -> None:
        """Start nothing yet. `workers` 0 means one per core; `lock` is a file descriptor that workers hold open."""
        self.limit = workers or count_available_cores()
        self.lock = lock
        self.eager_jobs = EagerJobs() if self.limit > 1 else None  # one worker gains nothing by it
        self._workers: list[WorkerProcess] = []

    def run_jobs(self, jobs: Sequence[Job], seconds: float = 0) -> Iterator[Event | EagerTaskEvent]:
        """Yield what happens until every job is done or has failed; so with those ahead, while there are workers."""
        waiting = deque(enumerate(jobs))
        for worker in self._workers:
            worker.practised = False
        while waiting or self._list_busy_workers() or (self.eager_jobs and self._workers):
            self._assign_jobs(waiting)
            for worker in self._wait_for_workers(seconds):
                event = self._receive_event(worker)
                yield _wrap_event(worker, event if event is not None else self._remove_lost_worker(worker))
            for worker in self._list_busy_workers():
                if seconds and time.monotonic() - worker.since > seconds:
                    yield _wrap_event(
                        worker, TaskFailed(self._remove_worker(worker), format_timeout(seconds), "", "slow")
                    )

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def _assign_jobs(self, waiting: Queue) -> None:
        """Give a job to every idle worker that should have one, starting workers while there are jobs for them."""
        for worker in self._workers:
            if worker.index is None:
                self._assign_job(worker, waiting)
        while waiting and len(self._workers) < self.limit:
            self._workers.append(WorkerProcess(self.lock))
            self._assign_job(self._workers[-1], waiting)

    def _assign_job(self, worker: WorkerProcess, waiting: Queue) -> None:
        """Give an idle worker the job that is best for it; none when what it is good at will soon be there."""
        queue = self._select_queue(worker, waiting)
        if not queue:
            return
        worker.early = queue is not waiting
        worker.practised |= self.eager_jobs is not None and queue is self.eager_jobs.next_jobs
        (worker.index, job), worker.since = queue.popleft(), time.monotonic()
        with suppress(BrokenPipeError, ConnectionResetError):  # it died while idle: _ready finds it, its job is lost
            worker.connection.send((worker.index, job))

    def _select_queue(self, worker: WorkerProcess, waiting: Queue) -> Queue:
        """Where the next job of a worker comes from."""
        ahead = self.eager_jobs
        if ahead is None:
            return waiting
        if worker.practised and len(ahead.later_jobs) > BEHIND * len(self._workers):
            return ahead.later_jobs  # or the end would be all theirs
        practised = sum(each.practised for each in self._workers)
        if ahead.next_jobs and (worker.practised or len(ahead.next_jobs) > BEHIND * practised):
            return ahead.next_jobs
        others = sum(each.index is not None and not each.early for each in self._workers)
        last = worker.practised and len(waiting) <= others  # of the stage: they are left to those others
        return waiting if waiting and not last else ahead.later_jobs

    def _list_busy_workers(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers if worker.index is not None]

    def _wait_for_workers(self, seconds: float) -> list[WorkerProcess]:
        """Wait until a busy worker says something, ends, or has worked on its job for longer than `seconds`."""
        busy = self._list_busy_workers()
        until = min((worker.since for worker in busy), default=0.0) + seconds + 0.01
        patience = max(0.0, until - time.monotonic()) if seconds else None
        ready = wait([*(worker.connection for worker in busy), *(worker.process.sentinel for worker in busy)], patience)
        return [worker for worker in busy if worker.connection in ready or worker.process.sentinel in ready]

    def _receive_event(self, worker: WorkerProcess) -> Event | None:
        """Return the next event of a worker; None when it is dead and has nothing more to say."""
        try:
            event: Event = worker.connection.recv()
        except (EOFError, OSError):
            return None
        if not isinstance(event, TaskProgress):
            worker.index = None
        return event

    def _remove_lost_worker(self, worker: WorkerProcess) -> TaskFailed:
        """Take a worker out that has died on its own."""
        index = self._remove_worker(worker)
        return TaskFailed(index, format_worker_loss(_format_exit_status(worker.process.exitcode)), "", "lost")

    def _remove_worker(self, worker: WorkerProcess) -> int:
        """Take a worker out and return the index of the job it had."""
        self._workers.remove(worker)
        worker.kill()
        assert worker.index is not None
        return worker.index


def _wrap_event(worker: WorkerProcess, event: Event) -> Event | EagerTaskEvent:
    return EagerTaskEvent(event) if worker.early else event


def _format_exit_status(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was killed by signal {-status} ({signal.Signals(-status).name})"
    return f"ended with status {status}"


def format_worker_loss(ending: str) -> str:
    """Say that a process was lost and what a person can do about it."""
    return (
        f"its process {ending}. When the machine ran out of memory, use fewer workers (data.executor.workers=1) "
        f"or smaller portions (data.executor.block_bytes, data.documents.batch_bytes)."
    )


def format_timeout(seconds: float) -> str:
    """Say that the wall clock ended a try."""
    return f"took longer than {seconds:g} s, so that its process was ended (data.executor.task_seconds)."
