"""Average the weights of the last checkpoints into one model (Vaswani 2017, 6.1).

Reads `checkpoints/` of a run folder; writes `averaged/step-N`, a checkpoint of weights alone. N is
the step of the newest one averaged.

Invariants:
- Tensors are read one at a time and added in float64, so memory stays near one model.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmsys.config.run import RunConfig
from llmsys.errors import CheckpointError, ConfigError
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
from llmsys.train.recorded_changes import is_batch_measured

log = get_logger(__name__)

AVERAGED = "averaged"


def require_enough_saves(config: RunConfig) -> None:
    """Raise unless a run saves the checkpoints whose weights it averages at its end.

    Args:
        config: the config of the run.

    Raises:
        ConfigError: the budget has fewer saves than `checkpoint.average_last`.
    """
    count = config.checkpoint.average_last
    every = config.checkpoint.every_steps
    steps = config.num_steps
    if is_batch_measured(config):  # fewest steps: the batch may double early
        steps = -(-config.train.tokens // config.batch.tokens_per_step)
    saves = -(-steps // every) if every else 1
    if count > saves:
        raise ConfigError(
            f"checkpoint.average_last={count} needs as many checkpoints, and {steps} steps with "
            f"checkpoint.every_steps={every} save {saves}. Use "
            f"checkpoint.every_steps={max(1, steps // count)} or less, or set "
            "checkpoint.average_last=0."
        )


def average_checkpoints(run_folder: Path, count: int) -> Path:
    """Return the checkpoint with the mean of the last `count` checkpoints of a run; write it unless
    it exists.

    For one process. If the run removes a checkpoint during the read, the newest ones are read
    again.

    Args:
        run_folder: folder of the run, which may still be training.
        count: `checkpoint.average_last`.

    Raises:
        CheckpointError: the run has fewer checkpoints, or one of them is damaged.
    """
    for _ in range(MAX_READ_ATTEMPTS):
        checkpoints = _list_last_checkpoints(run_folder / "checkpoints", count)
        try:
            return _write_average(checkpoints, run_folder)
        except READ_FAILURES:
            if all(checkpoint.exists() for checkpoint in checkpoints):
                raise
            log.info(
                "a checkpoint was removed by its run during averaging; using the newest ones now"
            )
    raise CheckpointError(
        f"{MAX_READ_ATTEMPTS} times a checkpoint was removed by its run while it was averaged. "
        "Raise checkpoint.keep_last or checkpoint.every_steps of that run, wait for its end, or "
        "set checkpoint.average_last=0."
    )


def _list_last_checkpoints(folder: Path, count: int) -> list[Path]:
    checkpoints = list_complete_checkpoints(folder)[-count:]
    if len(checkpoints) < count:
        raise CheckpointError(
            f"{folder} has {len(checkpoints)} checkpoints, and checkpoint.average_last={count} of "
            "them are needed. Train longer, save more often (checkpoint.every_steps, keep_last), "
            "or set it to 0."
        )
    return checkpoints


def _write_average(checkpoints: list[Path], run_folder: Path) -> Path:
    """Write the mean of checkpoints, unless it is there: the record of an average has the
    identities of its checkpoints.
    """
    identities = {"averaged": [_read_identity(checkpoint) for checkpoint in checkpoints]}
    target = run_folder / AVERAGED / checkpoints[-1].name
    if (
        target.exists()
        and find_checkpoint_error(target) is None
        and _read_averaged_identities(target) == identities
    ):
        return target
    _require_complete(checkpoints)
    tensors = {
        name: average_tensor(name, like, checkpoints)
        for name, like in read_tensor_metadata(checkpoints[-1]).items()
        if _is_model_tensor(name)
    }
    steps = int(read_record(checkpoints[-1])["steps"])
    run_state = {**read_run_state(checkpoints[-1]), **identities}
    published = publish_weights(
        target.parent, lambda folder: save_tensors(tensors, folder), steps, run_state
    )
    log.info("%s is the mean of the last %d checkpoints", published, len(checkpoints))
    return published


def list_checkpoints_to_average(run_folder: Path, count: int) -> list[Path]:
    """Return the last `count` checkpoints of a run, verified, for a reader that averages without
    writing.

    Args:
        run_folder: folder of the run.
        count: number of checkpoints.

    Returns:
        Folders of complete checkpoints, oldest first.

    Raises:
        CheckpointError: the run has fewer, or one of them is damaged.
    """
    checkpoints = _list_last_checkpoints(run_folder / "checkpoints", count)
    _require_complete(checkpoints)
    return checkpoints


def _require_complete(checkpoints: list[Path]) -> None:
    for checkpoint in checkpoints:
        if (problem := find_checkpoint_error(checkpoint)) is not None:
            raise CheckpointError(
                f"{checkpoint} cannot be averaged: {problem}. Train longer, or set "
                "checkpoint.average_last=0."
            )


def _is_model_tensor(name: str) -> bool:
    return name.startswith(("parameter/", "buffer/"))


def average_tensor(name: str, like: Tensor, checkpoints: list[Path]) -> Tensor:
    """Return the mean of one tensor over checkpoints.

    Args:
        name: name in the checkpoints.
        like: a tensor of its shape and dtype; its device may be meta.
        checkpoints: complete checkpoints, oldest first.

    Returns:
        The mean in the dtype of `like`, added in float64; for integers the last value.
    """
    total = torch.zeros(like.shape, dtype=torch.float64)
    value = torch.empty(like.shape, dtype=like.dtype)
    for checkpoint in checkpoints:
        load_tensors({name: value}, checkpoint)
        total += value
    # A mean of counters and other integers has no meaning.
    return (total / len(checkpoints)).to(like.dtype) if like.is_floating_point() else value


def _read_identity(checkpoint: Path) -> list[Any]:
    """Return the checkpoint's name and the checksums of its files, which tell it from another of
    the same name.
    """
    return [checkpoint.name, read_record(checkpoint)["files"]]


def _read_averaged_identities(checkpoint: Path) -> dict[str, Any]:
    return {"averaged": read_record(checkpoint)["run"].get("averaged")}
