"""Where the numbers of a run go: events.jsonl, and the trackers beside it. Written by rank 0."""

from dataclasses import dataclass
from typing import Any

from llmsys.events import EventWriter
from llmsys.log import get_logger
from llmsys.train.saver import SaveResult
from llmsys.train.tracking import Trackers

log = get_logger(__name__)


@dataclass
class MetricLogger:
    """Where numbers go. On ranks other than 0 nothing is written."""

    events: EventWriter | None
    trackers: Trackers | None

    def log_event(self, event: str, step: int, **fields: Any) -> None:
        """One event, and its plain numbers to the trackers."""
        if self.events is None:
            return
        self.events.write(event, step=step, **fields)
        if self.trackers is not None:
            numbers = {
                f"{event}/{key}": float(value) for key, value in fields.items() if isinstance(value, int | float)
            }
            self.trackers.log_step(step, numbers)

    def log_save(self, save: SaveResult) -> None:
        """What became of a save: a `checkpoint`, or `save_failed` with the reason."""
        times = {"seconds": save.seconds, "stalled_seconds": save.stalled_seconds}
        if save.failure is None:
            self.log_event("checkpoint", save.steps, folder=str(save.folder), **times)
        elif self.events is not None:
            log.warning("%s The run goes on; if the next save fails too, it ends.", save.failure)
            self.log_event("save_failed", save.steps, reason=str(save.failure), **times)
