"""Where the numbers of a run go: events.jsonl, and the trackers beside it. Written by rank 0."""

from dataclasses import dataclass
from typing import Any

from llmsys.events import EventWriter
from llmsys.log import logger
from llmsys.train.saver import Save
from llmsys.train.tracking import Trackers

log = logger(__name__)


@dataclass
class Record:
    """Where numbers go. On ranks other than 0 nothing is written."""

    events: EventWriter | None
    trackers: Trackers | None

    def write(self, event: str, step: int, **fields: Any) -> None:
        """One event, and its plain numbers to the trackers."""
        if self.events is None:
            return
        self.events.write(event, step=step, **fields)
        if self.trackers is not None:
            numbers = {
                f"{event}/{key}": float(value) for key, value in fields.items() if isinstance(value, int | float)
            }
            self.trackers.log(step, numbers)

    def save(self, save: Save) -> None:
        """What became of a save: a `checkpoint`, or `save_failed` with the reason."""
        times = {"seconds": save.seconds, "stalled_seconds": save.stalled_seconds}
        if save.failure is None:
            self.write("checkpoint", save.steps, folder=str(save.folder), **times)
        elif self.events is not None:
            log.warning("%s The run goes on; if the next save fails too, it ends.", save.failure)
            self.write("save_failed", save.steps, reason=str(save.failure), **times)
