"""One writer per folder: an advisory lock that the kernel lets go of when its holders die, however they die.

Reads and writes `.lock` in the folder; gives `folder_lock`. Promises: two commands never write one folder at once, the
second says who holds it, and a crash leaves nothing to clean up.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmsys.errors import DataError
from llmsys.log import logger

LOCK_NAME = ".lock"


@contextmanager
def folder_lock(folder: Path, wait_seconds: float = 10.0) -> Iterator[int]:
    """Hold the folder's lock for the block and yield its file descriptor, which child processes may hold open too.

    Creates the folder when it is not there. DataError when it cannot be written, and with the holder's
    process id when the lock is not free after `wait_seconds`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DataError(
            f"{folder} is not a folder that can be written: {error.strerror}. "
            f"Name another (run.folder, data.folder), or make this one writable."
        ) from None
    try:
        _acquire(handle, folder, wait_seconds)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield handle
    finally:
        os.close(handle)


def _acquire(handle: int, folder: Path, wait_seconds: float) -> None:
    deadline = time.monotonic() + wait_seconds
    said = False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
        if time.monotonic() >= deadline:
            raise DataError(
                f"{folder} is being written by process {holder}; two commands cannot write one folder. "
                f"Wait until it has finished, or end it (kill {holder}), then run the same command again."
            )
        if not said:
            logger(__name__).info("waiting for process %s, which writes %s", holder, folder)
            said = True
        time.sleep(0.05)
