"""Events of tasks in, the progress line of a stage out: how much is done, how much was dropped, what is tried again."""

from collections import defaultdict
from collections.abc import Sequence

from data_pipeline.executors.event import Advanced, Done, Failed
from data_pipeline.executors.tries import Again
from llmsys.progress import Progress


class Meter:
    """What the progress of a stage shows: a failed try is taken back, and a task that is done counts as a whole one."""

    def __init__(self, progress: Progress, wholes: Sequence[float]) -> None:
        self.progress, self.wholes, self.again = progress, wholes, 0
        self._dropped = 0
        self._amounts: defaultdict[int, float] = defaultdict(float)
        self._drops: defaultdict[int, int] = defaultdict(int)

    def show(self, event: Advanced | Done | Failed | Again) -> None:
        """Draw an event."""
        if isinstance(event, Advanced):
            self._amounts[event.index] += event.amount
            self._drops[event.index] += event.dropped
            self._advance(event.amount, event.dropped)
        elif isinstance(event, Done):
            self._advance(self.wholes[event.index] - self._amounts.pop(event.index, 0), 0)
        elif isinstance(event, Again):
            self.again += 1
            self._advance(-self._amounts.pop(event.index, 0), -self._drops.pop(event.index, 0))

    def _advance(self, amount: float, dropped: int) -> None:
        self._dropped += dropped
        details = {"dropped": self._dropped, "tried_again": self.again}
        self.progress.advance(amount, **{name: value for name, value in details.items() if value})
