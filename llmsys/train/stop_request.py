"""Stop requests: a signal, the end of the Slurm job, or the run's own time limit.

Each rank checks for itself and sends a flag with the numbers that are reduced with a step's loss.
The sum is the same everywhere, so all ranks stop after the same step. SIGTERM and SIGUSR1 (as
`sbatch --signal=USR1@300` sends) count, and SIGHUP (a closed terminal) unless it was ignored
before, as by `nohup`.
"""

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Asks a running job for a profile of its next step, see step_profiler.py.
PROFILE_SIGNAL = signal.SIGUSR2
# The variable in which a launcher passes the meaning of SIGHUP to the ranks: the launcher had to
# ignore it, or it ends the ranks at once. Without the variable, SIGHUP saves unless it is ignored.
HANGUP = "LLMSYS_HANGUP"
HANGUP_SAVES = "save"
HANGUP_ENDS = "end"
SLURM_END = "SLURM_JOB_END_TIME"
# Seconds before the end of a Slurm job at which the run saves; three times the longest save is
# added.
RESERVE_SECONDS = 120.0


class StopRequest:
    """The reason why this rank was asked to stop, if it was. Times are wall clock seconds, as
    Slurm's.
    """

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
        """Return 1.0 when this rank was asked to stop, else 0.0."""
        now = self._clock()
        if not self.reason and now >= self._limit:
            self.reason = self._limit_text
        if (
            not self.reason
            and now >= self._job_end - RESERVE_SECONDS - 3 * self.longest_save_seconds
        ):
            self.reason = f"Slurm ends the job in {max(0.0, self._job_end - now):.0f} s"
        # A float: it is reduced with the loss.
        return float(bool(self.reason))

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Record the signals as stop requests inside the block; restore their handlers
        afterwards.
        """
        before = {
            number: signal.signal(number, self._handle_signal) for number in self._list_signals()
        }
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
    """Redirect stdout and stderr to /dev/null if their terminal is gone: a write to it would
    fail and abort a save.
    """
    for descriptor in (1, 2):
        try:
            # Writing nothing still reports EIO on a terminal that is gone.
            os.write(descriptor, b"")
        except OSError as error:
            if error.errno == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
