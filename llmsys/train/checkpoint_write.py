"""Writing a checkpoint: aside, digested, flushed, and published by one rename.

Every rank writes its shards into `.step-00000100.partial` and digests its own files; rank 0 writes `state.json` with
all digests, flushes, and renames to `step-00000100`. So a folder without a dot is whole by construction, and a failure
in any phase leaves the folders before it as they were.
"""

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from llmsys.atomic_write import sync_folder
from llmsys.errors import CheckpointError, LlmsysError, to_data_error
from llmsys.parallel.control_group import ControlGroup
from llmsys.parallel.process_group import get_rank
from llmsys.train.checkpoint_record import (
    compute_digests,
    find_checkpoint_error,
    is_present,
    list_rank_files,
    write_record,
)
from llmsys.train.checkpoint_storage import CheckpointWriter

PARTIAL = ".step-*.partial"
REMOVED = ".step-*.removed"
REPLACED = ".step-*.replaced"


def get_checkpoint_path(folder: Path, steps: int) -> Path:
    """Where the checkpoint after so many steps is published."""
    return folder / f"step-{steps:08d}"


def write_sharded_checkpoint(
    tensors: dict[str, Tensor], target: Path, record: dict[str, Any], control_group: ControlGroup
) -> None:
    """Write and publish `target`. Collective. CheckpointError on every rank where the disk is to blame."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        control_group.run_on_first_rank(lambda: _recreate_folder(partial))
        _write_tensors(tensors, partial, control_group)
        digests = control_group.run_on_all_ranks(lambda: compute_digests(list_rank_files(partial, get_rank())))
        files = {name: digest for found in digests for name, digest in found.items()}
        control_group.run_on_first_rank(lambda: publish_checkpoint(partial, target, record | {"files": files}))
    except (CheckpointException, OSError, LlmsysError) as error:
        raise build_save_error(target, error) from error


def _write_tensors(tensors: dict[str, Tensor], partial: Path, control_group: ControlGroup) -> None:
    dcp.save(tensors, storage_writer=CheckpointWriter(partial), process_group=control_group.group)


def publish_weights(
    folder: Path, write: Callable[[Path], None], steps: int = 0, run_state: dict[str, Any] | None = None
) -> Path:
    """Publish a checkpoint of weights alone: `write` fills a folder aside. For one process, without a group.

    Evaluation and generation read it like any other; a run begins with it by `train.start_from`.
    """
    target = get_checkpoint_path(folder, steps)
    partial = target.with_name(f".{target.name}.partial")
    _recreate_folder(partial)
    write(partial)
    files = compute_digests(sorted(partial.iterdir()))
    publish_checkpoint(partial, target, {"steps": steps, "weights_only": True, "run": run_state or {}, "files": files})
    return target


def save_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write plain tensors as the files of a checkpoint. For one process, without a group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is the intent
        dcp.save(tensors, storage_writer=CheckpointWriter(folder), no_dist=True)


def publish_checkpoint(partial: Path, target: Path, record: dict[str, Any]) -> None:
    """Make a folder of files a checkpoint: its record, then the rename, both flushed to disk."""
    write_record(partial, record)
    replaced = target.with_name(f".{target.name}.replaced")
    if target.exists():  # the same step once more, after a rewind or because it was found damaged
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    partial.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint: out of sight by one rename, so that no reader takes half of it for a damaged one."""
    aside = checkpoint.with_name(f".{checkpoint.name}.removed")
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def restore_replaced(folder: Path) -> None:
    """Give back what a killed save had put aside, where what it was replaced by is missing or damaged.

    For the holder of the run folder's lock, before a checkpoint to resume from is looked for. Removes nothing.
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
    """Remove what a killed save or removal left behind. For the holder of the run folder's lock."""
    restore_replaced(folder)
    for pattern in (PARTIAL, REMOVED, REPLACED):
        for left in folder.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)


def _recreate_folder(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def build_save_error(target: Path, error: BaseException) -> BaseException:
    """A full, read-only or forbidden disk as one message; any other failure as it is."""
    causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    for cause in causes:
        reason = _find_disk_reason(cause)
        if reason is not None:
            return CheckpointError(
                f"{target} could not be saved: {reason}. The checkpoints before it are whole. Free space or "
                f"lower checkpoint.keep_last, then run the same command again: it continues from the newest of them."
            )
    return error


def _find_disk_reason(cause: BaseException) -> str | None:
    if isinstance(cause, OSError) and to_data_error(cause) is not None:
        return cause.strerror
    if isinstance(cause, LlmsysError):
        return str(cause)
    # torch's zip writer complains about the place it got to, and hides the system's error that stopped it.
    return "its files were written only in part" if "unexpected pos" in str(cause) else None
