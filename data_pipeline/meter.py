"""Events of tasks in, the progress line of a stage out: how much is done, how much was dropped, what is tried again."""

from collections import defaultdict
from collections.abc import Sequence

from data_pipeline.executors.event import Advanced, Done, Early, Event, Failed
from data_pipeline.executors.tries import Again
from llmsys.progress import Progress


class Meter:
    """What the progress of a stage shows: a failed try is taken back, and a task that is done counts as a whole one.

    Of tasks that are done ahead only what they dropped is shown; they are numbered downwards from -1 here.
    """

    def __init__(self, progress: Progress, wholes: Sequence[float]) -> None:
        self.progress, self.wholes, self.again = progress, wholes, 0
        self._dropped = 0
        self._amounts: defaultdict[int, float] = defaultdict(float)
        self._drops: defaultdict[int, int] = defaultdict(int)

    def show(self, event: Event | Early | Again) -> None:
        """Draw an event."""
        match event:
            case Advanced(index, amount, dropped):
                self._tell(index, amount, dropped)
            case Done(index):
                self._advance(self.wholes[index] - self._amounts.pop(index, 0), 0)
            case Again(index):
                self.again += 1
                self._take_back(index)
            case Early(Advanced(index, _, dropped)):
                self._tell(-1 - index, 0, dropped)
            case Early(Failed(index)):
                self._take_back(-1 - index)

    def _tell(self, index: int, amount: float, dropped: int) -> None:
        self._amounts[index] += amount
        self._drops[index] += dropped
        self._advance(amount, dropped)

    def _take_back(self, index: int) -> None:
        self._advance(-self._amounts.pop(index, 0), -self._drops.pop(index, 0))

    def _advance(self, amount: float, dropped: int) -> None:
        self._dropped += dropped
        details = {"dropped": self._dropped, "tried_again": self.again}
        self.progress.advance(amount, **{name: value for name, value in details.items() if value})
