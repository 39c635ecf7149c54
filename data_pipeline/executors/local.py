"""Run jobs in worker processes on this machine.

Jobs of the next stage prefer workers that have run such jobs before, because each worker loads
models and learns words anew. Jobs of later stages go to idle workers, so that no worker waits for
the slowest job of a stage until the end.

A worker process receives jobs through a pipe and sends events back.

Invariants:
    - Results do not depend on the number of workers.
    - A worker that dies or exceeds the time limit is replaced; only the attempt of its job fails.
    - A worker ends with the process that started it, even if that is killed, and holds its lock
      until then.
"""

import ctypes
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import DupFd
from typing import Any

from llmsys.data_pipeline.executors.base import (
    EagerJobs,
    EagerTaskEvent,
    Event,
    Job,
    JobQueue,
    Queue,
    TaskFailed,
    TaskProgress,
    try_job,
)
from llmsys.data_pipeline.executors.garbage_collection import collect_less_often

_REPORT_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


class WorkerProcess:
    """A process with two pipes: one for jobs and events, one that only ever closes."""

    def __init__(self, lock: int | None) -> None:
        # Forking a process with threads of pyarrow or Ray can deadlock.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        lifeline, self.lifeline = context.Pipe(duplex=False)
        # The lock outlives a killed driver until its last worker is gone.
        held = DupFd(lock) if lock is not None else None
        self.process: SpawnProcess = context.Process(
            target=_serve_jobs, args=(theirs, lifeline, held), daemon=True
        )
        with _limit_threads(), _ignore_interrupts():
            self.process.start()
        # Our copies must close, or the pipes would not break when the worker dies.
        theirs.close()
        lifeline.close()
        # What wakes the driver: an event, and the end of the process.
        self.files = (self.connection.fileno(), int(self.process.sentinel))
        self.index: int | None = None
        self.since = 0.0
        # it runs an early job; it has run a job of the next stage
        self.early = self.experienced = False

    def kill(self) -> None:
        """Kill the process. Its files are published by rename, so nothing needs to finish."""
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.lifeline.close()


@contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Start children with SIGINT blocked for good: one that is still importing would print a
    traceback at Ctrl-C.
    """
    resource_tracker.ensure_running()  # its own start unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _limit_threads() -> Iterator[None]:
    """Start children with one thread per numeric library, because processes are the unit of
    parallelism.
    """
    before = {
        name: os.environ.pop(name, None) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    }
    os.environ.update(dict.fromkeys(before, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


# --- inside the process ---


def _serve_jobs(connection: Connection, lifeline: Connection, lock: Any) -> None:
    """Run jobs until the pipe closes. `lock` becomes a duplicate of the parent's lock file, open
    until the end.
    """
    # the parent receives ctrl-c too and kills its workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent(lifeline)
    collect_less_often()
    held = lock.detach() if lock is not None else None
    try:
        while True:
            index, job = connection.recv()
            reporter = _Reporter(connection, index)
            outcome = try_job(index, job, reporter)
            reporter.send_drops()
            connection.send(outcome)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        if held is not None:
            os.close(held)


class _Reporter:
    """Sends the progress of a job, at most every tenth of a second: the driver of many short jobs
    would do nothing but read it.
    """

    def __init__(self, connection: Connection, index: int) -> None:
        self._connection = connection
        self._index = index
        self._amount = 0.0
        self._dropped = 0
        self._stage = ""
        self._sent = time.monotonic()

    def __call__(self, amount: float, dropped: int) -> None:
        """Add progress of the job."""
        self._amount += amount
        self._dropped += dropped
        if time.monotonic() - self._sent >= _REPORT_SECONDS:
            self._send()

    def enter_stage(self, stage: str) -> None:
        """Send at once that the job of a later stage begins: it may be silent until its end."""
        self._stage = stage
        self._send()

    def send_drops(self) -> None:
        """Send what the end of the job does not say: a finished job counts in full."""
        if self._dropped:
            self._send()

    def _send(self) -> None:
        self._connection.send(TaskProgress(self._index, self._amount, self._dropped, self._stage))
        self._amount = 0.0
        self._dropped = 0
        self._sent = time.monotonic()


def _die_with_parent(lifeline: Connection) -> None:
    """End this process when its parent dies: by signal on Linux, elsewhere when the pipe breaks."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def exit_with_parent() -> None:
        lifeline.poll(None)  # nothing is ever sent: it returns when the other end closes
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


# Early jobs that may queue per worker that has run one; the first such job of another worker takes
# about as long.
MAX_WAITING_PER_WORKER = 3


def count_available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class LocalExecutor:
    """Worker processes that live through all stages of a run."""

    def __init__(self, workers: int, lock: int | None = None) -> None:
        """Start no process yet: workers start with the first jobs.

        Args:
            workers: Number of worker processes; 0: one per core that this process may use.
            lock: File descriptor of the dataset folder's lock. Workers inherit it, so that the
                folder stays locked until the last of them is gone, even if this process is killed.
                None: no lock.
        """
        self.limit = workers or count_available_cores()
        self.lock = lock
        # a single worker gains nothing by it
        self.eager_jobs = EagerJobs() if self.limit > 1 else None
        self._workers: list[WorkerProcess] = []
        # The files of busy workers. One that died while it was idle is seen when it gets a job.
        self._poll = select.poll()

    def run_jobs(self, jobs: Sequence[Job], seconds: float = 0) -> Iterator[Event | EagerTaskEvent]:
        """Yield events until every job is done or failed, and every eager job too while workers
        live.
        """
        # Experience counts per stage: another stage loads other models.
        waiting = JobQueue(jobs)
        for worker in self._workers:
            worker.experienced = False
        # Eager jobs wait for workers that live; none is started for them.
        while waiting or self._list_busy_workers() or (self.eager_jobs and self._workers):
            self._assign_jobs(waiting)
            for worker in self._wait_for_workers(seconds):
                event = self._receive_event(worker)
                yield _wrap_event(
                    worker, event if event is not None else self._remove_lost_worker(worker)
                )
            for worker in self._list_busy_workers():
                limit = self._get_limit(worker, seconds)
                if limit and time.monotonic() - worker.since > limit:
                    failed = TaskFailed(
                        self._remove_worker(worker), format_timeout(limit), "", "slow"
                    )
                    yield _wrap_event(worker, failed)

    def close(self) -> None:
        """Kill all workers."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        self._poll = select.poll()

    def _assign_jobs(self, waiting: JobQueue) -> None:
        """Give a job to every idle worker that should have one. Start workers while there are
        jobs for them.
        """
        for worker in self._workers:
            if worker.index is None:
                self._assign_job(worker, waiting)
        while waiting and len(self._workers) < self.limit:
            self._workers.append(WorkerProcess(self.lock))
            self._assign_job(self._workers[-1], waiting)

    def _assign_job(self, worker: WorkerProcess, waiting: JobQueue) -> None:
        """Give an idle worker its best job. Give none if a job that suits it better will come
        soon.
        """
        queue = self._select_queue(worker, waiting)
        if not queue:
            return
        worker.early = queue is not waiting
        worker.experienced |= self.eager_jobs is not None and queue is self.eager_jobs.next_jobs
        worker.index, job = queue.pop_next() if isinstance(queue, JobQueue) else queue.popleft()
        worker.since = time.monotonic()
        for file in worker.files:
            self._poll.register(file, select.POLLIN)
        # died while idle: _wait_for_workers will see it
        with suppress(BrokenPipeError, ConnectionResetError):
            worker.connection.send((worker.index, job))

    def _select_queue(self, worker: WorkerProcess, waiting: JobQueue) -> Queue | JobQueue:
        """Return the queue of the next job of a worker."""
        ahead = self.eager_jobs
        if ahead is None:
            return waiting
        if worker.experienced and len(ahead.later_jobs) > MAX_WAITING_PER_WORKER * len(
            self._workers
        ):
            return ahead.later_jobs  # otherwise they would all be left for the end
        experienced = sum(each.experienced for each in self._workers)
        if ahead.next_jobs and (
            worker.experienced or len(ahead.next_jobs) > MAX_WAITING_PER_WORKER * experienced
        ):
            return ahead.next_jobs
        others = sum(each.index is not None and not each.early for each in self._workers)
        # of the stage: the other workers take them
        last = worker.experienced and len(waiting) <= others
        return waiting if waiting and not last else ahead.later_jobs

    def _list_busy_workers(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers if worker.index is not None]

    def _get_limit(self, worker: WorkerProcess, seconds: float) -> float:
        """Return the seconds that the job of a worker may take: `seconds` for one of the stage
        itself.
        """
        return self.eager_jobs.seconds if worker.early and self.eager_jobs is not None else seconds

    def _wait_for_workers(self, seconds: float) -> list[WorkerProcess]:
        """Wait until a busy worker sends an event, ends, or exceeds its limit."""
        busy = self._list_busy_workers()
        ends = [
            worker.since + limit for worker in busy if (limit := self._get_limit(worker, seconds))
        ]
        # 0.01 s later, so that the limit has passed when the wait returns.
        patience = max(0.0, min(ends) + 0.01 - time.monotonic()) if ends else None
        ready = {file for file, _ in self._poll.poll(None if patience is None else patience * 1e3)}
        return [worker for worker in busy if not ready.isdisjoint(worker.files)]

    def _receive_event(self, worker: WorkerProcess) -> Event | None:
        """Return the next event of a worker, or None if it is dead and its pipe is empty."""
        try:
            event: Event = worker.connection.recv()
        except (EOFError, OSError):
            return None
        if not isinstance(event, TaskProgress):
            self._stop_watching(worker)
            worker.index = None
        return event

    def _stop_watching(self, worker: WorkerProcess) -> None:
        for file in worker.files:
            self._poll.unregister(file)

    def _remove_lost_worker(self, worker: WorkerProcess) -> TaskFailed:
        """Remove a worker that died and return the failure of its job."""
        index = self._remove_worker(worker)
        return TaskFailed(
            index, format_worker_loss(_format_exit_status(worker.process.exitcode)), "", "lost"
        )

    def _remove_worker(self, worker: WorkerProcess) -> int:
        """Remove a worker and return the index of its job."""
        self._workers.remove(worker)
        self._stop_watching(worker)
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
    """Describe the loss of a worker process.

    Args:
        ending: How it ended, such as `was killed by SIGKILL`.

    Returns:
        The message, with a fix for the most frequent cause, memory.
    """
    return (
        f"its process {ending}. If the machine ran out of memory, use fewer workers "
        "(data.executor.workers=1) or smaller blocks (data.executor.block_bytes, "
        "data.documents.batch_bytes)."
    )


def format_timeout(seconds: float) -> str:
    """Describe an attempt that exceeded the time limit.

    Args:
        seconds: The limit, `data.executor.task_seconds`.

    Returns:
        The message.
    """
    return (
        f"took longer than {seconds:g} s, so its process was terminated "
        "(data.executor.task_seconds)."
    )
