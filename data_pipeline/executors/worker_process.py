"""A worker process: it receives jobs through a pipe and sends events back.

Invariants:
    - A worker ends with the process that started it, even if that is killed, and holds its lock until then.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import DupFd
from typing import Any

from data_pipeline.executors.base import Report, TaskProgress
from data_pipeline.executors.inline import try_job

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
        self.process: SpawnProcess = context.Process(target=_serve_jobs, args=(theirs, lifeline, held), daemon=True)
        with _limit_threads():
            self.process.start()
        # Our copies must close, or the pipes would not break when the worker dies.
        theirs.close()
        lifeline.close()
        self.index: int | None = None
        self.since = 0.0
        self.early = self.experienced = False  # it runs an early job; it has run a job of the next stage

    def kill(self) -> None:
        """Kill the process. Its files are published by rename, so nothing needs to finish."""
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.lifeline.close()


@contextmanager
def _limit_threads() -> Iterator[None]:
    """Start children with one thread per numeric library, because processes are the unit of parallelism."""
    before = {name: os.environ.pop(name, None) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
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
    """Run jobs until the pipe closes. `lock` becomes a duplicate of the parent's lock file, open until the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives ctrl-c too and kills its workers
    _die_with_parent(lifeline)
    held = lock.detach() if lock is not None else None
    try:
        while True:
            index, job = connection.recv()
            connection.send(try_job(index, job, _build_reporter(connection, index)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        if held is not None:
            os.close(held)


def _build_reporter(connection: Connection, index: int) -> Report:
    return lambda amount, dropped: connection.send(TaskProgress(index, amount, dropped))


def _die_with_parent(lifeline: Connection) -> None:
    """End this process when its parent dies: by signal on Linux, elsewhere when the pipe breaks."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def exit_with_parent() -> None:
        lifeline.poll(None)  # nothing is ever sent: it returns when the other end closes
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
