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

from llmsys.errors import CheckpointError, LlmsysError, disk_problem
from llmsys.parallel.crew import Crew
from llmsys.parallel.group import rank
from llmsys.publish import sync_folder
from llmsys.train.checkpoint_record import digests_of, files_of, is_present, problem_of, write_record
from llmsys.train.checkpoint_storage import CheckpointWriter

PARTIAL = ".step-*.partial"
REMOVED = ".step-*.removed"
REPLACED = ".step-*.replaced"


def target_of(folder: Path, steps: int) -> Path:
    """Where the checkpoint after so many steps is published."""
    return folder / f"step-{steps:08d}"


def write_sharded(tensors: dict[str, Tensor], target: Path, record: dict[str, Any], crew: Crew) -> None:
    """Write and publish `target`. Collective. CheckpointError on every rank where the disk is to blame."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        crew.first(lambda: _empty(partial))
        _write_tensors(tensors, partial, crew)
        digests = crew.each(lambda: digests_of(files_of(partial, rank())))
        files = {name: digest for found in digests for name, digest in found.items()}
        crew.first(lambda: publish(partial, target, record | {"files": files}))
    except (CheckpointException, OSError, LlmsysError) as error:
        raise not_saved(target, error) from error


def _write_tensors(tensors: dict[str, Tensor], partial: Path, crew: Crew) -> None:
    dcp.save(tensors, storage_writer=CheckpointWriter(partial), process_group=crew.group)


def publish_weights(
    folder: Path, write: Callable[[Path], None], steps: int = 0, run_state: dict[str, Any] | None = None
) -> Path:
    """Publish a checkpoint of weights alone: `write` fills a folder aside. For one process, without a group.

    Evaluation and generation read it like any other; a run begins with it by `train.start_from`.
    """
    target = target_of(folder, steps)
    partial = target.with_name(f".{target.name}.partial")
    _empty(partial)
    write(partial)
    files = digests_of(sorted(partial.iterdir()))
    publish(partial, target, {"steps": steps, "weights_only": True, "run": run_state or {}, "files": files})
    return target


def save_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write plain tensors as the files of a checkpoint. For one process, without a group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is the intent
        dcp.save(tensors, storage_writer=CheckpointWriter(folder), no_dist=True)


def publish(partial: Path, target: Path, record: dict[str, Any]) -> None:
    """Make a folder of files a checkpoint: its record, then the rename, both flushed to disk."""
    write_record(partial, record)
    replaced = target.with_name(f".{target.name}.replaced")
    if target.exists():  # the same step once more, after a rewind or because it was found damaged
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    partial.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def set_aside(checkpoint: Path) -> None:
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
            if problem_of(target) is None or problem_of(replaced) is not None:
                continue
            aside = target.with_name(f".{target.name}.removed")
            shutil.rmtree(aside, ignore_errors=True)
            target.rename(aside)
        replaced.rename(target)  # killed between the two renames, or the new one was damaged since
        sync_folder(folder)


def sweep(folder: Path) -> None:
    """Remove what a killed save or removal left behind. For the holder of the run folder's lock."""
    restore_replaced(folder)
    for pattern in (PARTIAL, REMOVED, REPLACED):
        for left in folder.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)


def _empty(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def not_saved(target: Path, error: BaseException) -> BaseException:
    """A full, read-only or forbidden disk as one message; any other failure as it is."""
    causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    for cause in causes:
        reason = _disk_reason(cause)
        if reason is not None:
            return CheckpointError(
                f"{target} could not be saved: {reason}. The checkpoints before it are whole. Free space or "
                f"lower checkpoint.keep_last, then run the same command again: it continues from the newest of them."
            )
    return error


def _disk_reason(cause: BaseException) -> str | None:
    if isinstance(cause, OSError) and disk_problem(cause) is not None:
        return cause.strerror
    if isinstance(cause, LlmsysError):
        return str(cause)
    # torch's zip writer complains about the place it got to, and hides the system's error that stopped it.
    return "its files were written only in part" if "unexpected pos" in str(cause) else None
