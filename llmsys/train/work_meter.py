"""Measure whether this process works: it or a child computes, or it reads and writes.

A process that waits in a collective, for a lock or for a signal does none of these. The driver of
an accelerator may compute while it waits; the timeout of the collective ends that wait.
"""

import resource
import time
from collections.abc import Callable

import psutil

# Bytes read or written that count as work; heartbeats and log lines are far fewer.
WORK_BYTES = 2**20
# Pages read from disk through a mapped file that count as work.
WORK_FAULTS = 64


class WorkMeter:
    """The time this process has been idle. Called from one thread, whose own work does not
    count.
    """

    def __init__(self, work_seconds: float) -> None:
        """Count `work_seconds` of CPU time since the last work as work."""
        self._work_seconds = work_seconds
        self._process = psutil.Process()
        self._worked_at = time.monotonic()
        self._marks = {
            self._read_own_counters: self._read_own_counters(),
            self._read_child_counters: self._read_child_counters(),
        }

    def measure_idle_seconds(self) -> float:
        """Return the seconds since this process last worked."""
        now = time.monotonic()
        # Children are found among all processes of the machine. While a thread computes in Python,
        # each of these many reads would wait for the interpreter's lock: children come last.
        if any(self._has_worked(read) for read in self._marks):
            self._worked_at = now
        return now - self._worked_at

    def _has_worked(self, read_counters: Callable[[], tuple[float, int, int]]) -> bool:
        counters = read_counters()
        seconds, transferred, faults = (
            count - mark for count, mark in zip(counters, self._marks[read_counters], strict=True)
        )
        has_worked = (
            seconds >= self._work_seconds or transferred >= WORK_BYTES or faults >= WORK_FAULTS
        )
        if has_worked or seconds < 0:  # negative: a child has ended, or another thread calls
            self._marks[read_counters] = counters
        return has_worked

    def _read_own_counters(self) -> tuple[float, int, int]:
        """Return the CPU seconds of this process but the calling thread, the bytes it transferred
        and the pages it read.
        """
        # process_time is finer than psutil, whose times are multiples of 10 ms.
        seconds = time.process_time() - time.thread_time()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        return seconds, _count_transferred_bytes(self._process), faults

    def _read_child_counters(self) -> tuple[float, int, int]:
        """Return the CPU seconds of the children and the bytes they transferred."""
        seconds = 0.0
        transferred = 0
        for process in self._process.children(recursive=True):
            try:
                times = process.cpu_times()
                seconds += times.user + times.system
                transferred += _count_transferred_bytes(process)
            except psutil.Error:
                continue
        return seconds, transferred, 0


def _count_transferred_bytes(process: psutil.Process) -> int:
    if not hasattr(process, "io_counters"):  # macOS
        return 0
    counters = process.io_counters()
    return int(counters.read_chars + counters.write_chars)
