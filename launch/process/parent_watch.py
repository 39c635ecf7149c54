"""No process outlives the one that started it, not even after `kill -9`.

A process that starts others gives them `build_child_environment()`: their environment names it in LLMSYS_PARENT. Each
of them calls `die_with_parent()`, which ends it at once, with status 1, when the named process is gone. An environment
variable goes through launchers such as torchrun and deepspeed, where the parent process id would only name the
launcher.
"""

import os
import threading
import time
from collections.abc import Mapping

import psutil

VARIABLE = "LLMSYS_PARENT"
POLL_SECONDS = 0.25
CLOCK_STEP_SECONDS = 5.0  # creation times are read off the wall clock, which may be set while we run


def build_child_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """`base` (default: this process's environment), with this process as the one whose end is the child's end."""
    # The time of creation tells this process from a later one that is given the same number.
    created = psutil.Process().create_time()
    return {**(os.environ if base is None else base), VARIABLE: f"{os.getpid()}:{created!r}"}


def die_with_parent() -> None:
    """Watch the process that LLMSYS_PARENT names, if it names one; end this process when that one is gone.

    The value is `pid:create_time`, or a bare `pid` (what a shell or make can write), for which the creation time is
    read now. A value that names no process, or one that is gone already, ends this process at once.
    """
    value = os.environ.get(VARIABLE)
    if not value:
        return
    parent = _find_parent(value)
    if parent is None:
        os._exit(1)
    threading.Thread(target=_watch_parent, args=(parent,), name="die-with-parent", daemon=True).start()


def _find_parent(value: str) -> psutil.Process | None:
    pid, _, created = value.partition(":")
    try:
        process = psutil.Process(int(pid))
        same = not created or abs(process.create_time() - float(created)) < CLOCK_STEP_SECONDS
    except (psutil.Error, ValueError):
        return None
    return process if same and _is_alive(process) else None


def _is_alive(process: psutil.Process) -> bool:
    """Whether it runs; one that has ended and waits for its own parent to notice (a zombie) does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _watch_parent(parent: psutil.Process) -> None:
    while _is_alive(parent):
        time.sleep(POLL_SECONDS)
    os._exit(1)  # not sys.exit: that would end this thread alone, and would wait for a collective that never ends
