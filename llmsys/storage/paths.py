"""Parse and check the paths of files and folders.

`Path("s3://bucket/run")` would be a folder called `s3:`, so URLs are rejected where a local path is
meant, and a remote folder is named by the local path of its copy. A file name that was read is
untrusted: it may be `../x` or `/etc/x`.
"""

import argparse
import os
import re
from pathlib import Path

import llmsys
from llmsys.errors import ConfigError
from llmsys.log import redact_secrets


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
    """Find why a path is not a local one.

    Args:
        path: A path as a user wrote it, or a Path made of it.

    Returns:
        A sentence with the URL and what to do; None for a local path.
    """
    if (found := _URL.match(text := str(path))) is None:
        return None
    scheme = found.group()[:-2]
    rest = text[found.end() :].lstrip("/")
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


def parse_folder_argument(text: str) -> Path:
    """Parse a folder, which may be `s3://bucket/folder`, as a `type=` for argparse.

    Args:
        text: The command-line argument.

    Returns:
        The path; the local path of a remote folder's copies.

    Raises:
        argparse.ArgumentTypeError: The text is another URL.
    """
    try:
        return Path(str(parse_folder(text)))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}.") from None


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


def find_import_root() -> Path:
    """Return the folder from which this process imports llmsys.

    Returns:
        The checkout, or the folder of installed packages.
    """
    return Path(llmsys.__file__).resolve().parent.parent
