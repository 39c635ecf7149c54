"""Files of this machine: parse their paths, write them atomically, and lock a folder for one
writer.

`Path("s3://bucket/run")` would be a folder called `s3:`, so URLs are rejected where a local path is
meant, and a remote folder is named by the local path of its copy. A file name that was read is
untrusted: it may be `../x` or `/etc/x`.

Reads/Writes: `.lock` in a locked folder; a temporary file next to a file that is written.

Invariants:
- A reader of an atomically written file sees the old file or the complete new one.
- Two commands never write one folder at the same time. The error of the second names the process
  that holds the lock.
- The kernel releases the lock when its holders die, so a crash leaves nothing to clean up.
"""

import argparse
import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import llmsys
from llmsys.errors import ConfigError, DataError, LockedFolderError
from llmsys.log import get_logger, redact_secrets


def is_plain_file_name(name: object) -> bool:
    """Return True for the name of a file in one folder: no separator, no parent, nothing absolute.

    Args:
        name: A value of any type, as read.

    Returns:
        False for control characters too.
    """
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    return not any(character in "/\\" or ord(character) < ord(" ") for character in name)


_REMOTE = re.compile(r"[a-z][a-z0-9+.\-]*(?:::[a-z][a-z0-9+.\-]*)*://", re.IGNORECASE)


def is_remote(path: str) -> bool:
    """Return whether an input is a URL and not a path.

    Args:
        path: a path or URL; chained URLs of fsspec (`simplecache::s3://…`) count.

    Returns:
        True for a URL.
    """
    return _REMOTE.match(path) is not None


# One slash is enough: that is what a Path has left of two. A single letter is a drive.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+(?:::[A-Za-z][A-Za-z0-9+.\-]+)*:/")


def find_url_violation(path: object) -> str | None:
    """Return why a path is a URL and what to do. None when it is a local path."""
    if (found := _URL.match(text := str(path))) is None:
        return None
    scheme, rest = found.group()[:-2], text[found.end() :].lstrip("/")
    shown = redact_secrets(f"{scheme}://{rest}")
    if scheme.lower() == "file":
        return f"{shown} is a URL, but a local path is needed. Write it as /{rest}"
    return (
        f"{shown} is a URL, but a local path is needed. Copy the file, or mount the storage, and "
        f"give that path (a folder that is really called {scheme}: needs its absolute path)"
    )


def check_local_path(value: object) -> object:
    """Validate a local path, as a pydantic validator.

    Args:
        value: The value of a field, of any type.

    Returns:
        The value, unchanged.

    Raises:
        ValueError: The value is a URL.
    """
    if isinstance(value, str | Path) and (problem := find_url_violation(value)):
        raise ValueError(problem)
    return value


_FOLDER_URL = re.compile(r"s3://([a-z0-9][a-z0-9.\-]+(?:/(?!\.)[^/?#*\\]+)+)/?")


def get_cache_folder() -> Path:
    """Return the folder for copies of remote files.

    Returns:
        LLMSYS_CACHE, or else `~/.cache/llmsys`.
    """
    return Path(os.environ.get("LLMSYS_CACHE") or Path.home() / ".cache" / "llmsys").absolute()


def parse_folder(value: object) -> object:
    """Validate the path of a folder, which may be `s3://bucket/folder`, as a pydantic validator.

    Args:
        value: The value of a field, of any type.

    Returns:
        The local path of a remote folder's copies; any other value.

    Raises:
        ValueError: The value is another URL.
    """
    if isinstance(value, str) and (found := _FOLDER_URL.fullmatch(value)):
        return get_cache_folder() / "s3" / found[1]
    return check_local_path(value)


def find_folder_url(folder: Path) -> str | None:
    """Find the URL of a remote folder, or of a file in it.

    Args:
        folder: The local path of its copy.

    Returns:
        The URL, None for any other path.
    """
    root = get_cache_folder() / "s3"
    return f"s3://{folder.relative_to(root).as_posix()}" if folder.is_relative_to(root) else None


def format_folder(folder: Path) -> str:
    """Return the name of a folder for people.

    Args:
        folder: A local path.

    Returns:
        Its URL or path.
    """
    return find_folder_url(folder) or str(folder)


def require_local_path(text: str, asked_by: str) -> Path:
    """Parse a local path.

    Args:
        text: The path as the user wrote it.
        asked_by: The option or key, for the error message.

    Returns:
        The path.

    Raises:
        ConfigError: The text is a URL.
    """
    if problem := find_url_violation(text):
        raise ConfigError(f"{asked_by}: {problem}.")
    return Path(text)


def parse_local_path(text: str) -> Path:
    """Parse a local path, as a `type=` for argparse.

    Args:
        text: The command-line argument.

    Returns:
        The path.

    Raises:
        argparse.ArgumentTypeError: The text is a URL.
    """
    if problem := find_url_violation(text):
        raise argparse.ArgumentTypeError(f"{problem}.")
    return Path(text)


PRIVATE = 0o600  # of files that record an environment: readable only by their owner


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


LOCK_NAME = ".lock"


@contextmanager
def lock_folder(folder: Path, wait_seconds: float = 10.0) -> Iterator[int]:
    """Hold the lock of a folder for the `with` block.

    Args:
        folder: The folder. Created when missing.
        wait_seconds: Seconds to wait for a lock that another process holds.

    Yields:
        The file descriptor of the lock. Child processes may keep it open.

    Raises:
        DataError: The folder cannot be written or its file system cannot lock.
        DataError: The lock is not free after `wait_seconds`. The message names the process id of
            the holder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DataError(
            f"{folder} is not a writable folder: {error.strerror}. Use another folder (run.folder, "
            "data.folder), or make this one writable."
        ) from None
    try:
        _acquire_lock(handle, folder, wait_seconds)
        # only the holder writes here, so that the number names it
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield handle
    finally:
        os.close(handle)


def _acquire_lock(handle: int, folder: Path, wait_seconds: float) -> None:
    deadline = time.monotonic() + wait_seconds
    is_logged = False
    while True:
        try:
            # it belongs to the open file, so children that inherit the descriptor hold it too
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                # almost every file system can lock
                from llmsys.storage.mount import describe_lockless_folder

                raise DataError(describe_lockless_folder(folder, error)) from None
            holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
        if time.monotonic() >= deadline:
            raise LockedFolderError(
                f"{folder} is being written by process {holder}, and two commands cannot write "
                f"one folder. Wait until it finishes, or end it (kill {holder}), then run the "
                "same command again."
            )
        if not is_logged:
            get_logger(__name__).info("waiting for process %s, which writes %s", holder, folder)
            is_logged = True
        time.sleep(0.05)


def find_import_root() -> Path:
    """Return the folder from which this process imports llmsys.

    Returns:
        The checkout, or the folder of installed packages.
    """
    return Path(llmsys.__file__).resolve().parent.parent
