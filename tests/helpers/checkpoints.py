"""Checkpoints of an engine, records with the right digests of changed files, and pickles that
betray being read.
"""

import pickle
from pathlib import Path
from typing import Any

from llmsys.config.checkpoint import CheckpointConfig
from llmsys.engine.engine import Engine
from llmsys.train.checkpoint_record import RECORD, compute_digests, write_record
from llmsys.train.checkpoint_saver import CheckpointSaver


def save_checkpoint(
    engine: Engine, folder: Path, run_state: dict[str, Any], keep_last: int
) -> Path:
    """Save the engine's state with `run_state` as `folder/step-N` and keep the newest
    `keep_last`. Collective.
    """
    state = engine.get_state()
    saver = CheckpointSaver(folder, CheckpointConfig(keep_last=keep_last))
    saver.save_state(state, state.steps, run_state)
    saver.finish_saves()
    return folder / f"step-{state.steps:08d}"


def write_signed_record(checkpoint: Path, record: dict[str, Any]) -> Path:
    """Write a record with the right digests of all files of the folder: they find damage, not
    malice.
    """
    files = compute_digests(file for file in sorted(checkpoint.iterdir()) if file.name != RECORD)
    write_record(checkpoint, {**record, "files": files})
    return checkpoint


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        """Call Path.touch."""
        return Path.touch, (self.file,)


def pickle_touch(file: Path) -> bytes:
    """Return a pickle that makes `file` when it is read."""
    return pickle.dumps(Touch(file))
