"""Processes that save a small state and die, or meet a full disk, in a phase of the save; light
to start by fork.
"""

import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from llmsys.config.checkpoint import CheckpointConfig
from llmsys.engine.engine import EngineState
from llmsys.errors import CheckpointError
from llmsys.train import checkpoint_saver, checkpoint_write
from llmsys.train.checkpoint_saver import CheckpointSaver
from llmsys.train.checkpoint_write import publish_checkpoint

PHASES = {
    "copying": "copy",
    "making the folder": "folder",
    "writing tensors": "tensors",
    "digesting": "digest",
    "writing the record": "record",
    "between the renames": "replaced",
    "renamed, not flushed": "renamed",
    "removing an older one": "removal",
}


def build_state(step: int) -> EngineState:
    """A state that says which step it is of."""
    return EngineState(
        {"parameter/w": torch.full((64, 64), float(step)), "first_moment/w": torch.ones(64)}, step
    )


def save(folder: Path, step: int, mode: str = "async") -> CheckpointSaver:
    """Save the state of a step with the run's own saver, and wait for it."""
    made = CheckpointSaver(folder, CheckpointConfig.model_validate({"keep_last": 2, "mode": mode}))
    made.save_state(build_state(step), step, {"seed": 1})
    made.finish_saves()
    return made


def die_in(folder: Path, step: int, phase: str) -> None:
    """Save in the background, and be killed in the given phase."""
    torch.set_num_threads(1)
    place, name, before = {
        "copy": (checkpoint_saver.HostStateCopy, "copy_from_device", True),
        "folder": (checkpoint_write, "_recreate_folder", False),
        "tensors": (checkpoint_write, "_write_tensors", False),
        "digest": (checkpoint_write, "compute_digests", False),
        "record": (checkpoint_write, "write_record", False),
        "replaced": (Path, "rename", False),
        "renamed": (checkpoint_write, "sync_folder", True),
        "removal": (shutil, "rmtree", True),
    }[phase]
    real = getattr(place, name)
    setattr(place, name, _wrap_with_death(real, before, _build_trigger(phase)))
    save(folder, step)


def _wrap_with_death(
    real: Callable[..., Any], before: bool, when: Callable[..., bool]
) -> Callable[..., Any]:
    def dying(*arguments: Any, **named: Any) -> Any:
        if before and when(*arguments):
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*arguments, **named)
        if when(*arguments):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return dying


def _build_trigger(phase: str) -> Callable[..., bool]:
    if phase == "removal":
        return lambda path, *_, **__: str(path).endswith(".removed") and path.exists()
    if phase == "replaced":
        return lambda path, target: str(target).endswith(".replaced")
    return lambda *_: True


def save_with_little_room(folder: Path, step: int, answer: Any) -> None:
    """Save where no file may grow beyond a few kilobytes; sends what the save said."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    said = ""
    for mode in ("sync", "async"):
        try:
            save(folder, step, mode)
        except CheckpointError as error:
            said += f"{error}\n"
    answer.send(said)


def publish_empty_checkpoint(folder: Path, step: int, score: float | None = None) -> Path:
    """Publish a checkpoint without tensors, with the loss of its evaluation, and return its
    folder.
    """
    partial = folder / f".step-{step:08d}.partial"
    partial.mkdir(parents=True)
    evaluation = None if score is None else {"loss": score}
    target = folder / f"step-{step:08d}"
    publish_checkpoint(
        partial, target, {"steps": step, "run": {}, "files": {}, "evaluation": evaluation}
    )
    return target
