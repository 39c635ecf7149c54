"""Write a small file so that no reader sees a part of it.

Writes: a temporary file in the folder of the file that is written.

Invariants:
- A reader of an atomically written file sees the old file or the complete new one.
"""

import contextlib
import os
from pathlib import Path

from llmsys.errors import DataError

# Files that record an environment, which may hold secrets, are readable by their owner only.
PRIVATE = 0o600


def write_bytes_atomically(path: Path, data: bytes, mode: int | None = None) -> None:
    """Write a small file to a temporary name, sync it and rename it.

    Args:
        path: The final name. Its folder is created when missing.
        data: The complete content.
        mode: The permissions from the first byte on. None leaves them to the umask.

    Raises:
        DataError: The file cannot be written. The temporary file is removed.
    """
    aside = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.unlink(missing_ok=True)  # one of an earlier process would keep its mode
        with open(
            aside, "wb", opener=lambda name, flags: os.open(name, flags, mode or 0o666)
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
    """Return the error message for a file that could not be written.

    Args:
        path: The final name of the file.
        error: The cause.

    Returns:
        The cause and the next step.
    """
    if path.is_dir():
        return f"{path} is a folder, not a file. Name a file in it, such as {path / 'page.html'}."
    return (
        f"{path} could not be written: {error.strerror or error}. No partial file was left under "
        "that name. Free space or repair the folder, then run the same command again to continue."
    )


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that a rename in it survives a power failure.

    Args:
        folder: The folder of the renamed file.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
