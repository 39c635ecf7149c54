"""Tasks in worker processes on this machine; a worker that dies fails its task's try and nothing else.

Reads jobs, gives events as they happen. Promises: results do not depend on the number of workers; one that dies or
takes too long is replaced; workers outlive nobody, see `worker.py`.
"""

import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait

from data_pipeline.executors.event import Advanced, Event, Failed, Job
from data_pipeline.executors.worker import Worker


def available_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class LocalPool:
    """Worker processes that live through all stages of a run."""

    def __init__(self, workers: int, lock: int | None = None) -> None:
        """Start nothing yet. `workers` 0 means one per core; `lock` is a file descriptor that workers hold open."""
        self.limit = workers or available_cores()
        self.lock = lock
        self._workers: list[Worker] = []

    def run(self, jobs: Sequence[Job], seconds: float = 0) -> Iterator[Event]:
        """Yield what happens until every job is done or has failed."""
        waiting = deque(range(len(jobs)))
        while waiting or self._busy():
            self._hand_out(jobs, waiting)
            for worker in self._ready(seconds):
                event = self._receive(worker)
                yield event if event is not None else self._lost(worker)
            for worker in self._busy():
                if seconds and time.monotonic() - worker.since > seconds:
                    yield Failed(self._replace(worker), too_slow(seconds), "", "slow")

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def _hand_out(self, jobs: Sequence[Job], waiting: deque[int]) -> None:
        """Give a job to every idle worker, starting workers while there are jobs for them."""
        while waiting:
            worker = next((each for each in self._workers if each.index is None), None)
            if worker is None and len(self._workers) < self.limit:
                worker = Worker(self.lock)
                self._workers.append(worker)
            if worker is None:
                return
            worker.index, worker.since = waiting.popleft(), time.monotonic()
            try:
                worker.connection.send((worker.index, jobs[worker.index]))
            except (BrokenPipeError, ConnectionResetError):
                return  # it died while idle; _ready finds it, and its job counts as lost

    def _busy(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.index is not None]

    def _ready(self, seconds: float) -> list[Worker]:
        """Wait until a busy worker says something, ends, or has worked on its job for longer than `seconds`."""
        busy = self._busy()
        until = min((worker.since for worker in busy), default=0.0) + seconds + 0.01
        patience = max(0.0, until - time.monotonic()) if seconds else None
        ready = wait([*(worker.connection for worker in busy), *(worker.process.sentinel for worker in busy)], patience)
        return [worker for worker in busy if worker.connection in ready or worker.process.sentinel in ready]

    def _receive(self, worker: Worker) -> Event | None:
        """Return the next event of a worker; None when it is dead and has nothing more to say."""
        try:
            event: Event = worker.connection.recv()
        except (EOFError, OSError):
            return None
        if not isinstance(event, Advanced):
            worker.index = None
        return event

    def _lost(self, worker: Worker) -> Failed:
        """Take a worker out that has died on its own."""
        index = self._replace(worker)
        return Failed(index, loss(_ending(worker.process.exitcode)), "", "lost")

    def _replace(self, worker: Worker) -> int:
        """Take a worker out and return the index of the job it had."""
        self._workers.remove(worker)
        worker.end()
        assert worker.index is not None
        return worker.index


def _ending(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was killed by signal {-status} ({signal.Signals(-status).name})"
    return f"ended with status {status}"


def loss(ending: str) -> str:
    """Say that a process was lost and what a person can do about it."""
    return (
        f"its process {ending}. When the machine ran out of memory, use fewer workers (data.executor.workers=1) "
        f"or smaller portions (data.executor.block_bytes, data.documents.batch_bytes)."
    )


def too_slow(seconds: float) -> str:
    """Say that the wall clock ended a try."""
    return f"took longer than {seconds:g} s, so that its process was ended (data.executor.task_seconds)."
