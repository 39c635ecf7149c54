"""Wait for what another process does: a file it writes, its end."""

import time
from collections.abc import Callable
from pathlib import Path

import psutil

PATIENCE_SECONDS = 180.0  # only a broken test waits this long


def wait_until(
    condition: Callable[[], object],
    what: str,
    look_seconds: float = 0.02,
    *,
    patience_seconds: float = PATIENCE_SECONDS,
) -> None:
    """Return as soon as the condition holds; fail with `what` when it never does. A dear look is
    worth a pause.
    """
    deadline = time.monotonic() + patience_seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {patience_seconds:.0f} s in vain: {what}"
        time.sleep(look_seconds)


def has_ended(pid: int) -> bool:
    """Whether a process is gone; one that only waits to be noticed by its parent is."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for_pid(path: Path) -> int:
    """The process id that another process writes to `path`."""
    wait_until(
        lambda: path.exists() and path.read_text().endswith("\n"), f"{path.name} was not written"
    )
    return int(path.read_text())
