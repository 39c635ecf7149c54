"""The mean of the last checkpoints as a model of its own (Vaswani 2017, 6.1): steadier than the last one alone.

Reads `checkpoints/` of a run folder, writes `averaged/`: a checkpoint of weights alone, named after the step it ends
at. Tensors are read one at a time and added in float64, so memory stays near one model.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmsys.errors import CheckpointError
from llmsys.log import get_logger
from llmsys.train.checkpoint_load import (
    MAX_READ_ATTEMPTS,
    READ_FAILURES,
    list_complete_checkpoints,
    load_tensors,
    read_run_state,
    read_tensor_metadata,
)
from llmsys.train.checkpoint_record import find_checkpoint_error, read_record
from llmsys.train.checkpoint_write import publish_weights, save_tensors

log = get_logger(__name__)

AVERAGED = "averaged"


def average_checkpoints(run_folder: Path, count: int) -> Path:
    """The checkpoint that is the mean of the last `count` of a run; made unless it is there. For one process.

    Raises CheckpointError when the run has fewer, or one of them is damaged. A run that still trains may remove one
    while it is read: then the last ones there are now are taken.
    """
    for _ in range(MAX_READ_ATTEMPTS):
        names = _list_last_checkpoints(run_folder / "checkpoints", count)
        try:
            return _write_average(names, run_folder)
        except READ_FAILURES:
            if all(name.exists() for name in names):
                raise
            log.info("a checkpoint was removed by its run while it was averaged; taking the newest there are now")
    raise CheckpointError(
        f"{MAX_READ_ATTEMPTS} times a checkpoint was removed by its run while it was averaged. "
        f"Raise checkpoint.keep_last or checkpoint.every_steps of that run, wait for its end, or set checkpoint.average_last=0."
    )


def _list_last_checkpoints(folder: Path, count: int) -> list[Path]:
    names = list_complete_checkpoints(folder)[-count:]
    if len(names) < count:
        raise CheckpointError(
            f"{folder} has {len(names)} checkpoints, and checkpoint.average_last={count} of them "
            f"are to be averaged. Train on, save more often (checkpoint.every_steps, keep_last), or set it to 0."
        )
    return names


def _write_average(names: list[Path], run_folder: Path) -> Path:
    facts = {"averaged": [_read_identity(name) for name in names]}
    target = run_folder / AVERAGED / names[-1].name
    if target.exists() and find_checkpoint_error(target) is None and _read_averaged_identities(target) == facts:
        return target
    _check_whole(names)
    tensors = {
        name: _average_tensor(name, like, names)
        for name, like in read_tensor_metadata(names[-1]).items()
        if _is_model_tensor(name)
    }
    steps = int(read_record(names[-1])["steps"])
    run_state = {**read_run_state(names[-1]), **facts}
    made = publish_weights(target.parent, lambda folder: save_tensors(tensors, folder), steps, run_state)
    log.info("%s is the mean of the last %d checkpoints", made, len(names))
    return made


def list_checkpoints_to_average(run_folder: Path, count: int) -> list[Path]:
    """Return the last `count` checkpoints of a run, whole ones, for a reader that averages them without writing.

    Raises:
        CheckpointError: the run has fewer, or one of them is damaged.
    """
    names = _list_last_checkpoints(run_folder / "checkpoints", count)
    _check_whole(names)
    return names


def read_mean(name: str, like: Tensor, checkpoints: list[Path]) -> Tensor:
    """Return the mean of one tensor over checkpoints, as `average_checkpoints` writes it; `like` has its shape and
    type.
    """
    return _average_tensor(name, like, checkpoints)


def _check_whole(names: list[Path]) -> None:
    for name in names:
        if (problem := find_checkpoint_error(name)) is not None:
            raise CheckpointError(f"{name} cannot be averaged: {problem}. Train on, or set checkpoint.average_last=0.")


def _is_model_tensor(name: str) -> bool:
    return name.startswith(("parameter/", "buffer/"))


def _average_tensor(name: str, like: Tensor, checkpoints: list[Path]) -> Tensor:
    """The mean of a tensor over checkpoints, in its own type; of integers the last value."""
    total, one = torch.zeros(like.shape, dtype=torch.float64), torch.empty(like.shape, dtype=like.dtype)
    for checkpoint in checkpoints:
        load_tensors({name: one}, checkpoint)
        total += one
    return (total / len(checkpoints)).to(like.dtype) if like.is_floating_point() else one


def _read_identity(checkpoint: Path) -> list[Any]:
    """What tells a checkpoint from another of the same name: the digests of its files."""
    return [checkpoint.name, read_record(checkpoint)["files"]]


def _read_averaged_identities(checkpoint: Path) -> dict[str, Any]:
    return {"averaged": read_record(checkpoint)["run"].get("averaged")}
