"""Parse paths of this machine and reject URLs: `Path("s3://bucket/run")` would be a folder called `s3:`.

A file name read from a record, index or manifest is untrusted: it may be `../x` or `/etc/x`.
"""

import argparse
import re
from pathlib import Path

from llmsys.errors import ConfigError
from llmsys.redact import redact_secrets


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


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+(?:::[A-Za-z][A-Za-z0-9+.\-]+)*:/")
"""One slash is enough: that is what a Path has left of two. A single letter is a drive."""


def find_url_violation(path: object) -> str | None:
    """Return why a path is a URL and what to do. None when it is a local path."""
    text = str(path)
    found = _URL.match(text)
    if found is None:
        return None
    scheme, rest = found.group()[:-2], text[found.end() :].lstrip("/")
    shown = redact_secrets(f"{scheme}://{rest}")
    if scheme.lower() == "file":
        return f"{shown} is a URL, but a local path is needed. Write it as /{rest}"
    return (
        f"{shown} is a URL, but a local path is needed. Copy the file, or mount the storage, and give that "
        f"path (a folder that is really called {scheme}: needs its absolute path)"
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
