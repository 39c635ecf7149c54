"""A copy of the training state in host memory, taken between two steps and written while training goes on.

The buffers are made at the first copy and used again for every later one: fresh memory costs more to touch than to
fill. On an accelerator they are pinned, so that the copy runs at the speed of the bus.

Saves a run's state, at once or in the background, and says what became of each save.

Reads an engine's logical state, publishes `step-…` folders (see checkpoint_write.py) and retires old ones. One save is
on its way at a time; the next waits for it. A save that fails leaves the checkpoints before it as they were and the run
goes on; the second failure in a row ends the run, as does a failure of the last save.
"""

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from llmsys.config.checkpoint import CheckpointConfig
from llmsys.engine.engine import EngineState
from llmsys.errors import CheckpointError
from llmsys.parallel.control_group import ControlGroup
from llmsys.parallel.process_group import get_rank
from llmsys.train.checkpoint_retention import remove_old_checkpoints
from llmsys.train.checkpoint_write import get_checkpoint_path, remove_partial_checkpoints, write_sharded_checkpoint
from llmsys.train.verified_checkpoints import VerifiedCheckpoints


class HostStateCopy:
    """Room for one copy of a rank's share of the state."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy_from_device(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as they are now, sharded as they are, on the host. The next call overwrites them."""
        copies = {name: self._copy_tensor(name, tensor.detach()) for name, tensor in tensors.items()}
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return copies

    def _copy_tensor(self, name: str, tensor: Tensor) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            self._buffers[name] = buffer
        buffer.copy_(local, non_blocking=True)
        if not isinstance(tensor, DTensor):
            return buffer
        # Not from_local, which would send the buffer back to the device of the mesh.
        return DTensor(buffer, tensor._spec, requires_grad=False)


CLOSE_SECONDS = 120
"""How long the end of a run that failed waits for a save in the background."""


@dataclass
class SaveResult:
    """One save: for how long it held the step up, how long it took, and why it failed if it did. Times in seconds."""

    steps: int
    folder: Path
    start_time: float
    stalled_seconds: float = 0.0
    seconds: float = 0.0
    failure: BaseException | None = None
    is_finished: bool = False


class CheckpointSaver:
    """Saves into `folder` by the rule of the config. Making it is collective, and so are `save_state` and
    `wait_for_save`.
    """

    def __init__(self, folder: Path, rule: CheckpointConfig) -> None:
        self.folder, self._rule = folder, rule
        self._control_group = ControlGroup()
        self._copy = HostStateCopy()
        self._thread: threading.Thread | None = None
        self._last: SaveResult | None = None
        self._unreported: list[SaveResult] = []
        self._failures = 0
        self._verified = VerifiedCheckpoints()
        if get_rank() == 0:
            remove_partial_checkpoints(folder)

    def mark_verified(self, steps: int) -> None:
        """Count the checkpoint of a step as whole without reading it: the run resumes from it."""
        if get_rank() == 0:
            self._verified.mark_verified(get_checkpoint_path(self.folder, steps))

    def allocate_buffers(self, state: EngineState) -> None:
        """Make room for copies of a state before the first step: touching fresh memory takes longer than a copy."""
        if self._rule.mode == "async":
            self._copy.copy_from_device(state.tensors)

    def save_state(self, state: EngineState, steps: int, run_state: dict[str, Any], **more: Any) -> None:
        """Save the state after `steps` steps; `more` goes into the record. Returns when training may go on.

        CheckpointError when a save failed and the one before it had failed too.
        """
        save = SaveResult(steps, get_checkpoint_path(self.folder, steps), time.perf_counter())
        self.wait_for_save()
        self._last = save
        self._unreported.append(save)
        record = {"steps": steps, "updates": state.steps, "run": run_state, **more}
        if self._rule.mode == "async":
            copies = self._copy.copy_from_device(state.tensors)
            self._thread = threading.Thread(
                target=self._write_checkpoint, args=(save, copies, record), name="save", daemon=True
            )
            self._thread.start()
            save.stalled_seconds = time.perf_counter() - save.start_time
        else:
            self._write_checkpoint(save, state.tensors, record)
            save.stalled_seconds = save.seconds
            self._check_save(save)

    def wait_for_save(self) -> None:
        """Wait for the save that is on its way, if one is. Raises as `save_state` does."""
        if self._thread is not None and self._last is not None:
            self._thread.join()
            self._thread = None
            self._check_save(self._last)

    def finish_saves(self) -> None:
        """Wait for the last save. Its failure is raised, since none comes after it."""
        self.wait_for_save()
        if self._last is not None and self._last.failure is not None:
            raise self._last.failure

    def pop_finished_saves(self) -> list[SaveResult]:
        """The saves that have ended and were not told yet. Not collective."""
        finished = [save for save in self._unreported if save.is_finished]
        self._unreported = [save for save in self._unreported if not save.is_finished]
        return finished

    def close_quietly(self) -> None:
        """Give a save that is on its way the time to end, whatever else went wrong. Raises nothing."""
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _write_checkpoint(self, save: SaveResult, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        try:
            write_sharded_checkpoint(tensors, save.folder, record, self._control_group)
            if get_rank() == 0:
                self._verified.mark_verified(save.folder)
                remove_old_checkpoints(self.folder, self._rule, self._verified)
        except BaseException as failure:  # it is raised where all ranks meet; CheckpointException is no Exception
            save.failure = failure
        save.seconds = time.perf_counter() - save.start_time
        save.is_finished = True

    def _check_save(self, save: SaveResult) -> None:
        """Let the run go on after one failure that a person can mend; every rank has met the same one."""
        if save.failure is None:
            self._failures = 0
            return
        self._failures += 1
        if self._failures > 1 or not isinstance(save.failure, CheckpointError):
            raise save.failure
