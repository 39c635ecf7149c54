"""Paths of this machine, which a URL is not: `Path("s3://bucket/run")` is a folder called `s3:`.

Reads what a person wrote; gives a `Path`, or refuses it with what to do.
"""

import argparse
import re
from pathlib import Path

from llmsys.errors import ConfigError
from llmsys.redact import redact_secrets

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+(?:::[A-Za-z][A-Za-z0-9+.\-]+)*:/")
"""One slash is enough: that is what a Path has left of two. A single letter is a drive."""


def find_url_violation(path: object) -> str | None:
    """Return why a path cannot be meant as one on this machine, with what to do; None where it can."""
    text = str(path)
    found = _URL.match(text)
    if found is None:
        return None
    scheme, rest = found.group()[:-2], text[found.end() :].lstrip("/")
    shown = redact_secrets(f"{scheme}://{rest}")
    if scheme.lower() == "file":
        return f"{shown} is a URL, and a path of this machine is needed. Write it as /{rest}"
    return (
        f"{shown} is a URL, and a path of this machine is needed. Copy it here, or mount the storage, and give that "
        f"path (a folder that is really called {scheme}: needs its absolute path)"
    )


def check_local_path(value: object) -> object:
    """Return the value as it came; ValueError where it is a URL (a validator for pydantic)."""
    if isinstance(value, str | Path) and (problem := find_url_violation(value)):
        raise ValueError(problem)
    return value


def require_local_path(text: str, asked_by: str) -> Path:
    """Return the path that a text means; ConfigError that names who asks where the text is a URL."""
    if problem := find_url_violation(text):
        raise ConfigError(f"{asked_by}: {problem}.")
    return Path(text)


def parse_local_path(text: str) -> Path:
    """Return the path that a word of the command line names (a `type=` for argparse)."""
    if problem := find_url_violation(text):
        raise argparse.ArgumentTypeError(f"{problem}.")
    return Path(text)
