"""Lock a folder, so that only one process writes it.

Reads/Writes: `.lock` in the locked folder.

Invariants:
- Two commands never write one folder at the same time. The error of the second names the process
  that holds the lock.
- The kernel releases the lock when its holders die, so a crash leaves nothing to clean up.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmsys.errors import DataError, LockedFolderError
from llmsys.log import get_logger

LOCK_NAME = ".lock"


@contextmanager
def lock_folder(folder: Path, wait_seconds: float = 10.0) -> Iterator[int]:
    """Hold the lock of a folder for the `with` block.

    Args:
        folder: The folder. Created when missing.
        wait_seconds: Seconds to wait for a lock that another process holds.

    Yields:
        The file descriptor of the lock. Child processes may keep it open.

    Raises:
        DataError: The folder cannot be written or its file system cannot lock.
        DataError: The lock is not free after `wait_seconds`. The message names the process id of
            the holder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DataError(
            f"{folder} is not a writable folder: {error.strerror}. Use another folder (run.folder, "
            "data.folder), or make this one writable."
        ) from None
    try:
        _acquire_lock(handle, folder, wait_seconds)
        # only the holder writes here, so that the number names it
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield handle
    finally:
        os.close(handle)


def _acquire_lock(handle: int, folder: Path, wait_seconds: float) -> None:
    deadline = time.monotonic() + wait_seconds
    is_logged = False
    while True:
        try:
            # it belongs to the open file, so children that inherit the descriptor hold it too
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                # almost every file system can lock
                from llmsys.storage.mount import describe_lockless_folder

                raise DataError(describe_lockless_folder(folder, error)) from None
            holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
        if time.monotonic() >= deadline:
            raise LockedFolderError(
                f"{folder} is being written by process {holder}, and two commands cannot write "
                f"one folder. Wait until it finishes, or end it (kill {holder}), then run the "
                "same command again."
            )
        if not is_logged:
            get_logger(__name__).info("waiting for process %s, which writes %s", holder, folder)
            is_logged = True
        time.sleep(0.05)
