"""Write a checkpoint: into a hidden folder, with checksums, synced, and published by one rename.

Every rank writes its shards into `.step-00000100.partial` and computes the checksums of its files.
Rank 0 writes `state.json` with all checksums, syncs, and renames the folder to `step-00000100`.

Invariants:
- A folder without a leading dot is complete.
- A failure in any phase leaves older checkpoints as they were.
"""

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from llmsys.errors import CheckpointError, LlmsysError, to_data_error
from llmsys.parallel.control_group import ControlGroup
from llmsys.parallel.process_group import get_rank, get_world_size
from llmsys.storage.atomic_write import sync_folder
from llmsys.train.checkpoint_plan import RankPlanner
from llmsys.train.checkpoint_record import (
    compute_digests,
    find_checkpoint_error,
    is_present,
    list_rank_files,
    write_record,
)
from llmsys.train.checkpoint_storage import CheckpointWriter, RankWriter
from llmsys.train.remote_run import find_remote_run

PARTIAL = ".step-*.partial"
REMOVED = ".step-*.removed"
REPLACED = ".step-*.replaced"


def get_checkpoint_path(folder: Path, steps: int) -> Path:
    """Return the path of a checkpoint.

    Args:
        folder: The folder `checkpoints` of a run.
        steps: Steps of data that were done.

    Returns:
        `folder/step-N`, with N in eight digits, so that names sort by step.
    """
    return folder / f"step-{steps:08d}"


def write_sharded_checkpoint(
    tensors: dict[str, Tensor], target: Path, record: dict[str, Any], control_group: ControlGroup
) -> None:
    """Write and publish a checkpoint. Collective.

    Args:
        tensors: tensors or DTensors by name.
        target: path of the published checkpoint.
        record: content of `state.json` without the checksums.
        control_group: the group that ranks communicate in, independent of training.

    Raises:
        CheckpointError: on every rank, if the disk is the cause.
    """
    partial = target.with_name(f".{target.name}.partial")
    remote = find_remote_run(target.parent.parent)
    try:
        control_group.run_on_first_rank(lambda: _recreate_folder(partial))
        _write_tensors(tensors, partial, control_group)
        if remote is not None:
            control_group.run_on_first_rank(lambda: remote.withdraw_checkpoint(target))
            control_group.run_on_all_ranks(
                lambda: remote.upload_rank_files(list_rank_files(partial, get_rank()), target)
            )
        digests = control_group.run_on_all_ranks(
            lambda: compute_digests(list_rank_files(partial, get_rank()))
        )
        files = {name: digest for found in digests for name, digest in found.items()}
        control_group.run_on_first_rank(
            lambda: publish_checkpoint(partial, target, record | {"files": files})
        )
    except (CheckpointException, OSError, RuntimeError, LlmsysError) as error:
        raise build_save_error(target, error) from error


def _write_tensors(tensors: dict[str, Tensor], partial: Path, control_group: ControlGroup) -> None:
    """Write the tensors: each rank its own files, with an index of them. Collective."""
    if get_world_size() == 1:
        save_tensors(tensors, partial)
        return
    planner = RankPlanner(tensors, control_group)
    control_group.run_on_all_ranks(lambda: save_rank_tensors(tensors, partial, planner))


def save_rank_tensors(tensors: dict[str, Tensor], folder: Path, planner: RankPlanner) -> None:
    """Write the files of this rank. Other ranks may fail meanwhile.

    Args:
        tensors: tensors or DTensors by name.
        folder: folder of the checkpoint, which exists.
        planner: the chunks of this rank.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(
            tensors,
            storage_writer=RankWriter(folder, get_rank()),
            planner=planner,
            no_dist=True,
            use_collectives=False,
        )


def publish_weights(
    folder: Path,
    write: Callable[[Path], None],
    steps: int = 0,
    run_state: dict[str, Any] | None = None,
) -> Path:
    """Publish a checkpoint of weights alone. For one process, without a process group.

    Evaluation and generation read it like any other; a run starts from it by `train.init_from`.

    Args:
        folder: parent of the new checkpoint.
        write: writes the tensor files into the folder it is given.
        steps: step in the checkpoint's name.
        run_state: identity of the run that trained the weights.

    Returns:
        The published checkpoint.
    """
    target = get_checkpoint_path(folder, steps)
    partial = target.with_name(f".{target.name}.partial")
    _recreate_folder(partial)
    write(partial)
    files = compute_digests(sorted(partial.iterdir()))
    publish_checkpoint(
        partial,
        target,
        {"steps": steps, "weights_only": True, "run": run_state or {}, "files": files},
    )
    return target


def save_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write plain tensors as the files of a checkpoint. For one process, without a process group.

    Args:
        tensors: Tensors by name.
        folder: The folder that gets the files; the record comes later (`publish_checkpoint`).
    """
    with warnings.catch_warnings():
        # one process by design
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(tensors, storage_writer=CheckpointWriter(folder), no_dist=True)


def publish_checkpoint(partial: Path, target: Path, record: dict[str, Any]) -> None:
    """Publish a checkpoint: write its record and rename its folder, both synced.

    Args:
        partial: The folder of tensor files.
        target: The path of the checkpoint. One that is there is replaced.
        record: Content of `state.json`.
    """
    write_record(partial, record)
    replaced = target.with_name(f".{target.name}.replaced")
    if target.exists():  # the step again, after a rewind or since its checkpoint was damaged
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    # The rename is atomic; sync_folder makes it durable before the old checkpoint is removed.
    partial.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint. One rename hides it first, so that no reader finds half of it.

    Args:
        checkpoint: The published checkpoint.
    """
    aside = checkpoint.with_name(f".{checkpoint.name}.removed")
    shutil.rmtree(aside, ignore_errors=True)
    # rmtree is not atomic: a reader would take half a folder for damage.
    checkpoint.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def restore_replaced(folder: Path) -> None:
    """Restore a checkpoint that a killed save had renamed, if its replacement is missing or
    damaged.

    For the holder of the run folder's lock, before a checkpoint to resume from is searched.
    Removes nothing.

    Args:
        folder: The folder `checkpoints` of a run.
    """
    for replaced in sorted(folder.glob(REPLACED)):
        target = replaced.with_name(replaced.name.removeprefix(".").removesuffix(".replaced"))
        if is_present(target):
            if find_checkpoint_error(target) is None or find_checkpoint_error(replaced) is not None:
                continue
            aside = target.with_name(f".{target.name}.removed")
            shutil.rmtree(aside, ignore_errors=True)
            target.rename(aside)
        replaced.rename(target)  # killed between the two renames, or the new one was damaged since
        sync_folder(folder)


def remove_partial_checkpoints(folder: Path) -> None:
    """Remove what a killed save or removal left. For the holder of the run folder's lock.

    Args:
        folder: The folder `checkpoints` of a run.
    """
    restore_replaced(folder)
    for pattern in (PARTIAL, REMOVED, REPLACED):
        for left in folder.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)


def _recreate_folder(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def build_save_error(target: Path, error: BaseException) -> BaseException:
    """Turn the failure of a save into an error with a next step.

    Args:
        target: The checkpoint that was written.
        error: The failure.

    Returns:
        A CheckpointError for a full, read-only or forbidden disk; any other failure unchanged.
    """
    causes = (
        [cause for cause, _ in error.failures.values()]
        if isinstance(error, CheckpointException)
        else [error]
    )
    for cause in causes:
        reason = _find_disk_reason(cause)
        if reason is not None:
            return CheckpointError(
                f"{target} could not be saved: {reason}. Earlier checkpoints are intact. Free "
                "space or lower checkpoint.keep_last, then run the same command again to "
                "continue from the newest one."
            )
    return error


def _find_disk_reason(cause: BaseException) -> str | None:
    if isinstance(cause, OSError) and to_data_error(cause) is not None:
        return cause.strerror
    if isinstance(cause, LlmsysError):
        return str(cause)
    # torch's zip writer reports its position and hides the error of the system that stopped it.
    return "its files were partially written" if "unexpected pos" in str(cause) else None
