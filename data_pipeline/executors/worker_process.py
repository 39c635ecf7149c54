"""One worker process: jobs in by a pipe, events out by it, until the pipe or the process that started it ends.

Promises: a worker ends with the process that started it, even when that is killed, and holds its lock until then.
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
    """One process and the two pipes to it: one for jobs and events, one that only ever closes."""

    def __init__(self, lock: int | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        lifeline, self.lifeline = context.Pipe(duplex=False)
        held = DupFd(lock) if lock is not None else None
        self.process: SpawnProcess = context.Process(target=_serve_jobs, args=(theirs, lifeline, held), daemon=True)
        with _limit_threads():
            self.process.start()
        theirs.close()
        lifeline.close()
        self.index: int | None = None
        self.since = 0.0
        self.early = self.practised = False  # its job was put ahead; it has had one of the next stage

    def kill(self) -> None:
        """Kill the process: whatever it writes is published by rename, so there is nothing to wait for."""
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.lifeline.close()


@contextmanager
def _limit_threads() -> Iterator[None]:
    """Children start with one thread per numeric library: processes are the unit of parallel work."""
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
    """Do jobs until the pipe closes. `lock` is unpickled into a duplicate of the parent's lock, open until the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears ctrl-c too, and ends its workers
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
    """End this process when its parent does: at once where the kernel offers it, else when the pipe breaks."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def exit_with_parent() -> None:
        lifeline.poll(None)  # nothing is ever sent: it returns when the other end closes
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
