"""Count the time of a phase as an idle machine would: what other programs take does not count."""

import time
from collections.abc import Sequence
from typing import Any

import psutil

# Share of a core below which a process waits.
WAITING_SHARE = 0.02


class PhaseClock:
    """Seconds that processes have worked, or that all of them have waited.

    A case that compiles needs minutes of a core, and beside twenty other programs many times as
    many on the wall. Ranks whose peer is lost wait in a collective, which counts as on any clock.
    """

    def __init__(self) -> None:
        """Begin at zero, before the processes are started."""
        self.seconds = 0.0
        self._read_at = time.monotonic()
        self._spent: dict[int, float] = {}

    def advance(self, pids: Sequence[int]) -> float:
        """Count the time since the last call.

        Args:
            pids: Processes that run now.

        Returns:
            The seconds counted so far.
        """
        now = time.monotonic()
        spent = {pid: _read_cpu_seconds(pid) for pid in pids}
        worked = [seconds - self._spent.get(pid, 0.0) for pid, seconds in spent.items()]
        self.seconds += count_interval(now - self._read_at, worked)
        self._read_at, self._spent = now, spent
        return self.seconds


def count_interval(wall_seconds: float, cpu_seconds: Sequence[float]) -> float:
    """Return what an interval counts: the work of its busiest process, or all of it if none works.

    Args:
        wall_seconds: Length of the interval.
        cpu_seconds: What each process computed in it, with its children.
    """
    most = max(cpu_seconds, default=0.0)
    return wall_seconds if most < WAITING_SHARE * wall_seconds else min(most, wall_seconds)


def _read_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its children, such as compilers; 0 if it ended."""
    try:
        process = psutil.Process(pid)
        family = [process.cpu_times(), *(one.cpu_times() for one in process.children(True))]
    except psutil.Error:
        return 0.0
    # The children that it has waited for are in its own fields.
    return sum(one.user + one.system + _read_ended(one) for one in family)


def _read_ended(times: Any) -> float:
    """Return the CPU seconds of children that have ended; 0 on a system without them."""
    ended: float = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return ended
