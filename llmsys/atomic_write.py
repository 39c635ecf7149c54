"""Small files whole or not at all: written aside, synced, renamed into place."""

import contextlib
import os
from pathlib import Path

from llmsys.errors import DataError

PRIVATE = 0o600
"""For files that say what an environment held: their owner alone reads them."""


def write_bytes_atomically(path: Path, data: bytes, mode: int | None = None) -> None:
    """Write a small file aside, sync it and rename it into place: a reader sees the old file or the whole new one.

    `mode` holds from the first byte on; without one the umask decides.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.unlink(missing_ok=True)  # one of an earlier process would keep its mode
        with open(
            aside, "wb", opener=lambda name, flags: os.open(name, flags, 0o666 if mode is None else mode)
        ) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # nothing was made where nothing may be removed
            aside.unlink(missing_ok=True)
        raise DataError(describe_write_error(path, error)) from error
    sync_folder(path.parent)


def describe_write_error(path: Path, error: OSError) -> str:
    """Say that a file could not be written, why, and that nothing half-written stays behind."""
    return (
        f"{path} could not be written: {error.strerror or error}. Nothing half-written was left under that name. "
        f"Free space or mend the folder, then run the same command again: it continues where it stopped."
    )


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
