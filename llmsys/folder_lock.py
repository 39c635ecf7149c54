"""Lock a folder for one writer with an advisory lock.

Reads/Writes: `.lock` in the folder.

Invariants:
- Two commands never write one folder at the same time. The error of the second names the process that holds the lock.
- The kernel releases the lock when its holders die, so a crash leaves nothing to clean up.
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
    """Hold the lock of a folder for the `with` block.

    Args:
        folder: The folder. Created when missing.
        wait_seconds: Seconds to wait for a lock that another process holds.

    Yields:
        The file descriptor of the lock. Child processes may keep it open.

    Raises:
        DataError: The folder cannot be written or its file system cannot lock.
        DataError: The lock is not free after `wait_seconds`. The message names the process id of the holder.
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
                raise DataError(_describe_lockless(folder, error)) from None
            holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
        if time.monotonic() >= deadline:
            raise DataError(
                f"{folder} is being written by process {holder}, and two commands cannot write one folder. "
                f"Wait until it finishes, or end it (kill {holder}), then run the same command again."
            )
        if not is_logged:
            get_logger(__name__).info("waiting for process %s, which writes %s", holder, folder)
            is_logged = True
        time.sleep(0.05)


def _describe_lockless(folder: Path, error: OSError) -> str:
    """Return the error message for a file system without locks: its type, its mount point and the fixes."""
    kind, place = find_mount(folder)
    return (
        f"{folder} lies on {kind} mounted at {place}, where flock does not work ({error.strerror}), and "
        "without a lock two commands could write the same folder. Mount it with locks (Lustre: -o flock; NFS: "
        "version 4, or without nolock and with lockd running), or name a folder on another file system "
        "(run.folder, data.folder)."
    )


def find_mount(folder: Path, mounts: Path = MOUNTS) -> tuple[str, str]:
    """Return the type and the mount point of the file system of a folder."""
    try:
        rows = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return "a file system", "an unknown place"
    whole = folder.resolve()
    # /proc/mounts writes a space as \040
    places = [(Path(row[1].replace("\\040", " ")), row[2]) for row in rows if len(row) > 2]
    around = [(place, kind) for place, kind in places if place == whole or place in whole.parents]
    if not around:
        return "a file system", "an unknown place"
    place, kind = max(reversed(around), key=lambda one: len(one[0].parts))  # of two at one place, the later one
    return kind, str(place)
