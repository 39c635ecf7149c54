"""Checkpoints by the clock (`checkpoint.every_minutes`).

The clock of rank 0 decides. Its flag is summed over ranks with the numbers of a step, so all ranks
save after the same step, and no clocks are compared.
"""

import time
from collections.abc import Callable

from llmsys.parallel.process_group import get_rank


class SaveTimer:
    """The minutes since the last checkpoint, or since the start of the process.

    Args:
        minutes: `checkpoint.every_minutes`; 0: nothing is ever due.
        clock: returns seconds. Tests replace it.

    Attributes:
        is_due: whether all ranks save after the step that was trained last.
    """

    def __init__(self, minutes: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = 60 * minutes
        self._clock = clock
        self._began = clock()
        self.is_due = False

    def to_flag(self) -> float:
        """Return 1.0 on rank 0 when the minutes are over, else 0.0."""
        is_over = self._seconds > 0 and self._clock() - self._began >= self._seconds
        # A float: it is reduced with the loss.
        return float(is_over and get_rank() == 0)

    def restart(self) -> None:
        """Count the minutes from now on: a checkpoint was saved."""
        self._began = self._clock()
        self.is_due = False
