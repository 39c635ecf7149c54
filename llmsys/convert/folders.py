"""Recognize the folders of a conversion, and publish a converted one in one rename.

A converted run folder holds `hugging_face/`: config.json, the tokenizer's and every other small
file unchanged, and `record.json` with names and shards of the tensors, so that an unchanged model
is exported as the same files. A run that continues it gets a copy (llmsys/train/run_files.py).
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmsys.config.export.kept_folder import HUGGING_FACE, IMPORT_RECORD_NAME
from llmsys.errors import CheckpointError, ConfigError
from llmsys.storage.atomic_write import sync_folder
from llmsys.train.checkpoint_record import RECORD as CHECKPOINT_RECORD

KEPT, RECORD, UNUSED = HUGGING_FACE, IMPORT_RECORD_NAME, "unused.safetensors"
RUN_CONFIG, CHECKPOINTS = "config.yaml", "checkpoints"


def is_hugging_face_folder(source: Path) -> bool:
    """Return whether a folder has a config.json and no run of ours.

    Args:
        source: An existing folder.

    Returns:
        True for a folder to import, False for one to export.
    """
    return (source / "config.json").is_file() and not (source / RUN_CONFIG).exists()


def require_run_folder(source: Path) -> None:
    """Check that a folder is a run or one of its checkpoints.

    Args:
        source: An existing folder.

    Raises:
        ConfigError: It is neither.
    """
    if not any((source / name).is_file() for name in (CHECKPOINT_RECORD, RUN_CONFIG)):
        raise ConfigError(
            f"{source} is neither a Hugging Face folder (no config.json) nor a run folder (no "
            f"{RUN_CONFIG}). Name one of these, or one checkpoint of a run."
        )


def find_checkpoint(source: Path) -> tuple[Path, Path]:
    """Return the run and the checkpoint that a path names.

    Args:
        source: a run folder, of which the newest complete checkpoint is taken, or a checkpoint.

    Returns:
        The run folder and the folder of the checkpoint.

    Raises:
        ConfigError: the path is neither.
        CheckpointError: there is no complete checkpoint, or the named one is incomplete.
    """
    from llmsys.train.checkpoint_load import find_newest_checkpoint
    from llmsys.train.checkpoint_record import find_checkpoint_error

    require_run_folder(source)
    if (source / CHECKPOINT_RECORD).is_file():
        problem = find_checkpoint_error(source)
        if problem is not None:
            raise CheckpointError(f"{source} cannot be used: {problem}. Use another checkpoint.")
        return source.resolve().parent.parent, source
    found = find_newest_checkpoint(source / CHECKPOINTS)
    if found is None:
        raise CheckpointError(
            f"{source / CHECKPOINTS} has no complete checkpoint. Train first, or name another run."
        )
    return source, found


@contextmanager
def publish_folder(destination: Path) -> Iterator[Path]:
    """Yield a temporary folder to write into; rename it to `destination` when the block succeeds.

    Raises ConfigError where the destination exists: a conversion never overwrites.
    """
    require_absent(destination)
    # next to the destination: a rename is atomic within one file system only
    partial = destination.absolute().parent / f".{destination.name}.partial"
    if partial.is_symlink():
        # rmtree refuses a link, and what it leads to is not ours
        partial.unlink()
    shutil.rmtree(partial, ignore_errors=True)  # of a conversion that was killed
    partial.mkdir(parents=True)
    try:
        yield partial
        _flush_folder(partial)
        if destination.is_dir():
            destination.rmdir()
        partial.rename(destination)
        sync_folder(partial.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def require_absent(destination: Path) -> None:
    """Check that the destination is free: absent, or an empty folder.

    Args:
        destination: Folder that a conversion will create.

    Raises:
        ConfigError: It exists.
    """
    if destination.is_symlink():
        raise ConfigError(
            f"{destination} is a link. Name the target folder: llmsys does not write through links."
        )
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise ConfigError(
            f"{destination} exists already. Name another destination, or remove it first."
        )


def _flush_folder(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
