"""Measure whether this process works: it or a child computes, or it reads and writes.

A process that waits in a collective, for a lock or for a signal does none of these. The driver of
an accelerator may compute while it waits; the timeout of the collective ends that wait.
"""

import resource
import time

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
        self._mark = self._read_counters()
        self._own_mark = 0.0  # a new thread has used no CPU time

    def measure_idle_seconds(self) -> float:
        """Return the seconds since this process last worked."""
        now = time.monotonic()
        own = time.thread_time()
        seconds, transferred, faults = self._read_counters()
        computed = seconds - self._mark[0] - max(0.0, own - self._own_mark)
        is_at_work = (
            computed >= self._work_seconds
            or transferred - self._mark[1] >= WORK_BYTES
            or faults - self._mark[2] >= WORK_FAULTS
        )
        if is_at_work or computed < 0:  # negative: a child has ended
            self._worked_at = now if is_at_work else self._worked_at
            self._mark = (seconds, transferred, faults)
            self._own_mark = own
        return now - self._worked_at

    def _read_counters(self) -> tuple[float, int, int]:
        """Return the CPU seconds, the bytes transferred and the pages read by this process and
        its children.
        """
        # process_time is finer than psutil, whose times are multiples of 10 ms.
        seconds = time.process_time()
        transferred = 0
        for process in (self._process, *self._process.children(recursive=True)):
            try:
                if process != self._process:
                    times = process.cpu_times()
                    seconds += times.user + times.system
                if hasattr(process, "io_counters"):  # not on macOS
                    counters = process.io_counters()
                    transferred += counters.read_chars + counters.write_chars
            except psutil.Error:
                continue
        return seconds, transferred, resource.getrusage(resource.RUSAGE_SELF).ru_majflt
