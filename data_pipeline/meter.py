"""Events of tasks in, the progress line of a stage out: how much is done, how much was dropped, what is tried again."""

from collections import defaultdict
from collections.abc import Sequence

from data_pipeline.executors.event import TaskProgress, TaskDone, EagerTaskEvent, Event, TaskFailed
from data_pipeline.executors.tries import TaskRetry
from llmsys.progress import Progress


class StageProgress:
    """What the progress of a stage shows: a failed try is taken back, and a task that is done counts as a whole one.

    Of tasks that are done ahead only what they dropped is shown; they are numbered downwards from -1 here.
    """

    def __init__(self, progress: Progress, wholes: Sequence[float]) -> None:
        self.progress, self.wholes, self.again = progress, wholes, 0
        self._dropped = 0
        self._amounts: defaultdict[int, float] = defaultdict(float)
        self._drops: defaultdict[int, int] = defaultdict(int)

    def show_event(self, event: Event | EagerTaskEvent | TaskRetry) -> None:
        """Draw an event."""
        match event:
            case TaskProgress(index, amount, dropped):
                self._add_progress(index, amount, dropped)
            case TaskDone(index):
                self._update_display(self.wholes[index] - self._amounts.pop(index, 0), 0)
            case TaskRetry(index):
                self.again += 1
                self._revert_progress(index)
            case EagerTaskEvent(TaskProgress(index, _, dropped)):
                self._add_progress(-1 - index, 0, dropped)
            case EagerTaskEvent(TaskFailed(index)):
                self._revert_progress(-1 - index)

    def _add_progress(self, index: int, amount: float, dropped: int) -> None:
        self._amounts[index] += amount
        self._drops[index] += dropped
        self._update_display(amount, dropped)

    def _revert_progress(self, index: int) -> None:
        self._update_display(-self._amounts.pop(index, 0), -self._drops.pop(index, 0))

    def _update_display(self, amount: float, dropped: int) -> None:
        self._dropped += dropped
        details = {"dropped": self._dropped, "tried_again": self.again}
        self.progress.advance(amount, **{name: value for name, value in details.items() if value})
