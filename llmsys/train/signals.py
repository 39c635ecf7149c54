"""The wish to stop: a signal, Slurm's end of the job, or the run's own time limit.

Each rank hears for itself, and says so with the numbers that ride along with a step's loss; the sum over ranks is the
same everywhere, so all stop after the same step. SIGTERM and SIGUSR1 (what `sbatch --signal=USR1@300` sends) count.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SLURM_END = "SLURM_JOB_END_TIME"
RESERVE_SECONDS = 120.0
"""What is left of a Slurm job when the run begins to save, and as much again as the longest save took three times."""


class StopWish:
    """Whether this rank was asked to stop, and by what. Times in seconds of the wall clock, as Slurm gives them."""

    def __init__(
        self,
        time_limit_minutes: float = 0.0,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.reason = ""
        self._clock = clock
        self._limit = clock() + 60 * time_limit_minutes if time_limit_minutes else float("inf")
        self._limit_text = f"train.time_limit_minutes={time_limit_minutes:g} are over"
        self._job_end = float(environment.get(SLURM_END) or "inf")
        self.longest_save_seconds = 0.0

    def raised(self) -> float:
        """1.0 when this rank wishes to stop, else 0.0."""
        now = self._clock()
        if not self.reason and now >= self._limit:
            self.reason = self._limit_text
        if not self.reason and now >= self._job_end - RESERVE_SECONDS - 3 * self.longest_save_seconds:
            self.reason = f"Slurm ends the job in {max(0.0, self._job_end - now):.0f} s"
        return float(bool(self.reason))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals as wishes while the block runs; what they did before is put back after it."""
        before = {number: signal.signal(number, self._heard) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or f"{signal.Signals(number).name} came"
