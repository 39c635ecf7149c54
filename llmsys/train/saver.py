"""Saves a run's state, at once or in the background, and says what became of each save.

Reads an engine's logical state, publishes `step-…` folders (see checkpoint_write.py) and retires old ones. One save is
on its way at a time; the next waits for it. A save that fails leaves the checkpoints before it as they were and the run
goes on; the second failure in a row ends the run, as does a failure of the last save.
"""

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from llmsys.config.checkpoint import CheckpointConfig
from llmsys.engine.engine import LogicalState
from llmsys.errors import CheckpointError
from llmsys.parallel.crew import Crew
from llmsys.parallel.group import rank
from llmsys.train.checkpoint_copy import HostCopy
from llmsys.train.checkpoint_write import sweep, target_of, write_sharded
from llmsys.train.retention import retire
from llmsys.train.verified import VerifiedCheckpoints

CLOSE_SECONDS = 120
"""How long the end of a run that failed waits for a save in the background."""


@dataclass
class Save:
    """One save: for how long it held the step up, how long it took, and why it failed if it did. Times in seconds."""

    steps: int
    folder: Path
    began: float
    stalled_seconds: float = 0.0
    seconds: float = 0.0
    failure: BaseException | None = None
    ended: bool = False


class Saver:
    """Saves into `folder` by the rule of the config. Making it is collective, and so are `save` and `wait`."""

    def __init__(self, folder: Path, rule: CheckpointConfig) -> None:
        self._folder, self._rule = folder, rule
        self._crew = Crew()
        self._copy = HostCopy()
        self._thread: threading.Thread | None = None
        self._last: Save | None = None
        self._untold: list[Save] = []
        self._failures = 0
        self._verified = VerifiedCheckpoints()
        if rank() == 0:
            sweep(folder)

    def trust(self, steps: int) -> None:
        """Count the checkpoint of a step as whole without reading it: the run resumes from it."""
        if rank() == 0:
            self._verified.trust(target_of(self._folder, steps))

    def prepare(self, state: LogicalState) -> None:
        """Make room for copies of a state before the first step: touching fresh memory takes longer than a copy."""
        if self._rule.mode == "async":
            self._copy.take(state.tensors)

    def save(self, state: LogicalState, steps: int, run_state: dict[str, Any], **more: Any) -> None:
        """Save the state after `steps` steps; `more` goes into the record. Returns when training may go on.

        CheckpointError when a save failed and the one before it had failed too.
        """
        save = Save(steps, target_of(self._folder, steps), time.perf_counter())
        self.wait()
        self._last = save
        self._untold.append(save)
        record = {"steps": steps, "updates": state.steps, "run": run_state, **more}
        if self._rule.mode == "async":
            copies = self._copy.take(state.tensors)
            self._thread = threading.Thread(target=self._write, args=(save, copies, record), name="save", daemon=True)
            self._thread.start()
            save.stalled_seconds = time.perf_counter() - save.began
        else:
            self._write(save, state.tensors, record)
            save.stalled_seconds = save.seconds
            self._judge(save)

    def wait(self) -> None:
        """Wait for the save that is on its way, if one is. Raises as `save` does."""
        if self._thread is not None and self._last is not None:
            self._thread.join()
            self._thread = None
            self._judge(self._last)

    def finish(self) -> None:
        """Wait for the last save. Its failure is raised, since none comes after it."""
        self.wait()
        if self._last is not None and self._last.failure is not None:
            raise self._last.failure

    def news(self) -> list[Save]:
        """The saves that have ended and were not told yet. Not collective."""
        told = [save for save in self._untold if save.ended]
        self._untold = [save for save in self._untold if not save.ended]
        return told

    def close(self) -> None:
        """Give a save that is on its way the time to end, whatever else went wrong. Raises nothing."""
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _write(self, save: Save, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        try:
            write_sharded(tensors, save.folder, record, self._crew)
            if rank() == 0:
                self._verified.trust(save.folder)
                retire(self._folder, self._rule, self._verified)
        except BaseException as failure:  # it is raised where all ranks meet; CheckpointException is no Exception
            save.failure = failure
        save.seconds = time.perf_counter() - save.began
        save.ended = True

    def _judge(self, save: Save) -> None:
        """Let the run go on after one failure that a person can mend; every rank has met the same one."""
        if save.failure is None:
            self._failures = 0
            return
        self._failures += 1
        if self._failures > 1 or not isinstance(save.failure, CheckpointError):
            raise save.failure
