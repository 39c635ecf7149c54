"""One writer per folder: an advisory lock that the kernel lets go of when its holders die, however they die.

Reads and writes `.lock` in the folder; gives `lock_folder`. Promises: two commands never write one folder at once, the
second says who holds it, and a crash leaves nothing to clean up.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmsys.errors import DataError
from llmsys.log import get_logger

LOCK_NAME = ".lock"
MOUNTS = Path("/proc/mounts")


@contextmanager
def lock_folder(folder: Path, wait_seconds: float = 10.0) -> Iterator[int]:
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
        _acquire_lock(handle, folder, wait_seconds)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield handle
    finally:
        os.close(handle)


def _acquire_lock(handle: int, folder: Path, wait_seconds: float) -> None:
    deadline = time.monotonic() + wait_seconds
    said = False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                raise DataError(_describe_lockless(folder, error)) from None
            holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
        if time.monotonic() >= deadline:
            raise DataError(
                f"{folder} is being written by process {holder}; two commands cannot write one folder. "
                f"Wait until it has finished, or end it (kill {holder}), then run the same command again."
            )
        if not said:
            get_logger(__name__).info("waiting for process %s, which writes %s", holder, folder)
            said = True
        time.sleep(0.05)


def _describe_lockless(folder: Path, error: OSError) -> str:
    """Say that a file system cannot lock, which one it is, and the ways out."""
    kind, place = find_mount(folder)
    return (
        f"{folder} lies on {kind} mounted at {place}, where flock does not work ({error.strerror}), and without a lock "
        f"two commands could write one folder. Mount it with locks (Lustre: -o flock; NFS: version 4, or without "
        f"nolock and with lockd running), or name a folder on another file system (run.folder, data.folder)."
    )


def find_mount(folder: Path, mounts: Path = MOUNTS) -> tuple[str, str]:
    """Return the type of the file system that a folder lies on, and where it is mounted."""
    try:
        rows = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return "a file system", "an unknown place"
    whole = folder.resolve()
    places = [(Path(row[1].replace("\\040", " ")), row[2]) for row in rows if len(row) > 2]
    around = [(place, kind) for place, kind in places if place == whole or place in whole.parents]
    if not around:
        return "a file system", "an unknown place"
    place, kind = max(reversed(around), key=lambda one: len(one[0].parts))  # of two at one place, the later one
    return kind, str(place)
