"""The wish to stop: a signal, Slurm's end of the job, or the run's own time limit.

Each rank hears for itself, and says so with the numbers that ride along with a step's loss; the sum over ranks is the
same everywhere, so all stop after the same step. SIGTERM and SIGUSR1 (what `sbatch --signal=USR1@300` sends) count, and
SIGHUP (a terminal that is closed) unless it was ignored before, as by `nohup`.
"""

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
HANGUP, HANGUP_SAVES, HANGUP_ENDS = "LLMSYS_HANGUP", "save", "end"
"""The variable in which a launcher tells ranks what SIGHUP means: it had to be ignored on the way to them, or it ends
them at once. Without it, SIGHUP saves unless it is ignored."""
SLURM_END = "SLURM_JOB_END_TIME"
RESERVE_SECONDS = 120.0
"""What is left of a Slurm job when the run begins to save, and as much again as the longest save took three times."""


class StopRequest:
    """Whether this rank was asked to stop, and by what. Times in seconds of the wall clock, as Slurm gives them."""

    def __init__(
        self,
        time_limit_minutes: float = 0.0,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.reason = ""
        self._clock = clock
        self._hangup = environment.get(HANGUP, "")
        self._limit = clock() + 60 * time_limit_minutes if time_limit_minutes else float("inf")
        self._limit_text = f"train.time_limit_minutes={time_limit_minutes:g} are over"
        self._job_end = float(environment.get(SLURM_END) or "inf")
        self.longest_save_seconds = 0.0

    def to_flag(self) -> float:
        """1.0 when this rank wishes to stop, else 0.0."""
        now = self._clock()
        if not self.reason and now >= self._limit:
            self.reason = self._limit_text
        if not self.reason and now >= self._job_end - RESERVE_SECONDS - 3 * self.longest_save_seconds:
            self.reason = f"Slurm ends the job in {max(0.0, self._job_end - now):.0f} s"
        return float(bool(self.reason))

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Take the signals as wishes while the block runs; what they did before is put back after it."""
        before = {number: signal.signal(number, self._handle_signal) for number in self._list_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _list_signals(self) -> list[signal.Signals]:
        is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        saves = self._hangup == HANGUP_SAVES or (not is_ignored and self._hangup != HANGUP_ENDS)
        return [*SIGNALS, *([signal.SIGHUP] if saves else [])]

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        redirect_dead_terminal()
        self.reason = self.reason or f"{signal.Signals(number).name} came"


def redirect_dead_terminal() -> None:
    """Send standard output and error nowhere if their terminal is gone: each write to it would fail, and end a save."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError as error:
            if error.errno == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
