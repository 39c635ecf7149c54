"""Checkpoints as llmsys wrote them in format 1, with torch's own writer and its pickled
`.metadata`.
"""

import pickle
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor

from llmsys.train.checkpoint_record import RECORD, compute_digests, write_record


def write_format_one(checkpoint: Path, tensors: dict[str, Tensor], steps: int, **more: Any) -> Path:
    """Write a checkpoint of format 1; `more` goes into its record."""
    checkpoint.mkdir(parents=True)
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(checkpoint), no_dist=True)
    return write_signed_record(
        checkpoint, {"format": 1, "steps": steps, "updates": steps, "run": {"seed": 1}, **more}
    )


def write_signed_record(checkpoint: Path, record: dict[str, Any]) -> Path:
    """Write a record with the right digests of whatever lies there: they find damage, not
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
