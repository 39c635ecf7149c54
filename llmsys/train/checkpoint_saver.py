"""Save the state of a run, at once or in the background, and report the result of each save.

Reads an engine's state; publishes `step-N` folders (`checkpoint_write.py`) and removes old ones.

Invariants:
- One save runs at a time; the next waits for it.
- The state does not change while it is copied: the trainer calls `wait_for_copy` before each
  optimizer step.
- A failed save leaves older checkpoints as they were, and the run continues.
- The second failure in a row ends the run, and so does a failure of the last save.
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
from llmsys.parallel.process_group import get_local_device, get_rank
from llmsys.train.checkpoint_retention import VerifiedCheckpoints, remove_old_checkpoints
from llmsys.train.checkpoint_write import (
    get_checkpoint_path,
    remove_partial_checkpoints,
    write_sharded_checkpoint,
)
from llmsys.train.remote_run import find_remote_run


class HostStateCopy:
    """A copy of a rank's share of the state in host memory, made after one step and written during
    later ones.

    Buffers are allocated at the first copy and reused: fresh memory costs more to touch than to
    fill. From an accelerator the copy runs on a separate stream while the next step computes,
    until `wait`.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    def copy_from_device(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors to the host, sharded as they are.

        Call `wait` before the tensors change, and before the copies are read.

        Args:
            tensors: Tensors by name, plain or DTensors. A name keeps its buffer while shape and
                dtype stay the same.

        Returns:
            The copies by name. The next call overwrites them.
        """
        device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
        if device is None:
            return {
                name: self._copy_tensor(name, tensor.detach()) for name, tensor in tensors.items()
            }
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            copies = {
                name: self._copy_tensor(name, tensor.detach()) for name, tensor in tensors.items()
            }
            self._copied = self._stream.record_event()
        return copies

    def wait(self) -> None:
        """Wait for the last copy from an accelerator."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy_tensor(self, name: str, tensor: Tensor) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            self._buffers[name] = buffer
        buffer.copy_(local, non_blocking=True)
        if local.is_cuda and self._stream is not None:
            # An engine may have made the tensor for this save alone; its memory is not to be reused
            # before it is read.
            local.record_stream(self._stream)
        if not isinstance(tensor, DTensor):
            return buffer
        # DTensor.from_local would move the buffer to the device of the mesh.
        return DTensor(buffer, tensor._spec, requires_grad=False)


CPU = torch.device("cpu")
# Seconds that a failed run waits for a save in the background.
CLOSE_SECONDS = 120


@dataclass
class SaveResult:
    """One save. `stalled_seconds` is the time training waited, `seconds` the time of the whole
    save.
    """

    steps: int
    folder: Path
    start_time: float
    stalled_seconds: float = 0.0
    seconds: float = 0.0
    failure: BaseException | None = None
    is_finished: bool = False


class CheckpointSaver:
    """A saver into one folder. Construction, `save_state` and `wait_for_save` are collective."""

    def __init__(self, folder: Path, rule: CheckpointConfig) -> None:
        self.folder = folder
        self._rule = rule
        # A separate group: the background thread must not interleave with collectives of
        # training.
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
        """Count the checkpoint of a step as complete without reading it."""
        if get_rank() == 0:
            self._verified.mark_verified(get_checkpoint_path(self.folder, steps))

    def allocate_buffers(self, state: EngineState) -> None:
        """Allocate the buffers for copies of a state, so that the first save does not stall
        longer than later ones.
        """
        if self._rule.mode == "async":
            self._copy.copy_from_device(state.tensors)
            self._copy.wait()

    def save_state(
        self, state: EngineState, steps: int, run_state: dict[str, Any], **more: Any
    ) -> None:
        """Save the state after `steps` data steps; return when training may continue. Collective.

        Args:
            state: the engine's state.
            steps: data steps done.
            run_state: identity of the run.
            more: further keys of the record.

        Raises:
            CheckpointError: a save failed, and the one before it had failed too.
        """
        save = SaveResult(steps, get_checkpoint_path(self.folder, steps), time.perf_counter())
        self.wait_for_save()
        self._last = save
        self._unreported.append(save)
        record = {"steps": steps, "updates": state.steps, "run": run_state, **more}
        if self._rule.mode == "async":
            copies = self._copy.copy_from_device(state.tensors)
            self._thread = threading.Thread(
                # A daemon: a failed run must not wait for its save longer than CLOSE_SECONDS.
                target=self._write_checkpoint,
                args=(save, copies, record, get_local_device()),
                name="save",
                daemon=True,
            )
            self._thread.start()
            save.stalled_seconds = time.perf_counter() - save.start_time
        else:
            self._write_checkpoint(save, state.tensors, record)
            save.stalled_seconds = save.seconds
            self._check_save(save)

    def wait_for_copy(self) -> None:
        """Wait until the state that is being saved may change. Not collective."""
        began = time.perf_counter()
        self._copy.wait()
        if self._last is not None and not self._last.is_finished:
            self._last.stalled_seconds += time.perf_counter() - began

    def wait_for_save(self) -> None:
        """Wait for the save in the background, if there is one. Raises as `save_state` does.
        Collective.
        """
        if self._thread is not None and self._last is not None:
            self._thread.join()
            self._thread = None
            self._check_save(self._last)

    def finish_saves(self) -> None:
        """Wait for the last save and raise its failure, since no later save makes up for it."""
        self.wait_for_save()
        if self._last is not None and self._last.failure is not None:
            raise self._last.failure

    def pop_finished_saves(self) -> list[SaveResult]:
        """Return the saves that have ended since the last call. Not collective."""
        finished = [save for save in self._unreported if save.is_finished]
        self._unreported = [save for save in self._unreported if not save.is_finished]
        return finished

    def close_quietly(self) -> None:
        """Wait up to `CLOSE_SECONDS` for a save in the background. Raises nothing."""
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _write_checkpoint(
        self,
        save: SaveResult,
        tensors: dict[str, Tensor],
        record: dict[str, Any],
        device: torch.device = CPU,
    ) -> None:
        """Write the tensors; `device` is that of a copy, whose end has to come first."""
        try:
            if device.type == "cuda":
                # A new thread begins on device 0, where every rank of this host would open a
                # context.
                torch.cuda.set_device(device)
            self._copy.wait()
            write_sharded_checkpoint(tensors, save.folder, record, self._control_group)
            if get_rank() == 0:
                self._verified.mark_verified(save.folder)
                remove_old_checkpoints(self.folder, self._rule, self._verified)
            if (remote := find_remote_run(self.folder.parent)) is not None:
                self._control_group.run_on_first_rank(remote.upload)
        # raised in _check_save; torch's CheckpointException is no Exception
        except BaseException as failure:
            save.failure = failure
        save.seconds = time.perf_counter() - save.start_time
        save.is_finished = True

    def _check_save(self, save: SaveResult) -> None:
        """Raise the failure of a save if it is the second in a row or no CheckpointError. All
        ranks have the same.
        """
        if save.failure is None:
            self._failures = 0
            return
        self._failures += 1
        if self._failures > 1 or not isinstance(save.failure, CheckpointError):
            raise save.failure
