"""End a process when the process that started it is gone, even after `kill -9`.

A process that starts others gives them `build_child_environment()`, which names it in
LLMSYS_PARENT. Each child calls `die_with_parent()`, which exits with status 1 as soon as the named
process is gone. An environment variable passes through launchers such as torchrun and deepspeed; a
parent process id would only name the launcher.
"""

import os
import threading
import time
from collections.abc import Mapping

import psutil

VARIABLE = "LLMSYS_PARENT"
POLL_SECONDS = 0.25
# creation times are read off the wall clock, which may be set while we run
CLOCK_STEP_SECONDS = 5.0


def build_child_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment that ties the life of a child process to this process.

    Args:
        base: Variables to start from. Default: this process's environment.

    Returns:
        `base` with LLMSYS_PARENT set to `pid:create_time` of this process.
    """
    # The time of creation tells this process from a later one that is given the same number.
    created = psutil.Process().create_time()
    return {**(os.environ if base is None else base), VARIABLE: f"{os.getpid()}:{created!r}"}


def die_with_parent() -> None:
    """Watch the process that LLMSYS_PARENT names, and end this process when that one is gone.

    The value is `pid:create_time`, or a bare `pid` as a shell or make can write it. For a bare
    `pid` the creation time is read now. A value that names no living process ends this process at
    once; without the variable nothing happens.
    """
    value = os.environ.get(VARIABLE)
    if not value:
        return
    parent = _find_parent(value)
    if parent is None:
        os._exit(1)
    threading.Thread(
        target=_watch_parent, args=(parent,), name="die-with-parent", daemon=True
    ).start()


def _find_parent(value: str) -> psutil.Process | None:
    pid, _, created = value.partition(":")
    try:
        process = psutil.Process(int(pid))
        same = not created or abs(process.create_time() - float(created)) < CLOCK_STEP_SECONDS
    except (psutil.Error, ValueError):
        return None
    return process if same and _is_alive(process) else None


def _is_alive(process: psutil.Process) -> bool:
    """Return whether the process runs. A zombie, which has ended and waits for its parent, does
    not.
    """
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _watch_parent(parent: psutil.Process) -> None:
    while _is_alive(parent):
        time.sleep(POLL_SECONDS)
    # not sys.exit: that would end this thread alone, and would wait for a collective that never
    # ends
    os._exit(1)
