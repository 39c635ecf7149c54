"""Identify the running code: the checkout it was imported from, or the installed version.

Reads: the package's own folder, git, and the record of its installer; never the working directory.
"""

import importlib.metadata
import json
import subprocess
from pathlib import Path
from typing import Any

import llmsys

PACKAGE = Path(llmsys.__file__).resolve().parent


def read_source(package: Path = PACKAGE) -> dict[str, Any]:
    """Return the version and folder of the code, and its commit, branch and uncommitted changes.

    The folder is a checkout only when git tracks the package: an environment may lie inside an
    unrelated repository.

    Args:
        package: The folder of the package.

    Returns:
        The keys version, folder, branch, commit and uncommitted_changes. The last three are None
        for an installed package, except that pip records the commit of a package from a repository.
    """
    installed = _read_installed_commit() if package == PACKAGE else None
    source = {"version": llmsys.__version__, "folder": str(package.parent), "branch": None}
    found = source | {"commit": installed, "uncommitted_changes": None}
    # an environment may lie inside an unrelated repository
    if _ask_git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return found
    commit = _ask_git(package, "rev-parse", "HEAD")
    if commit is None:  # a repository without a commit yet
        return found
    # `:(top)`: the whole checkout, and not the folder that git is asked in.
    changes = _ask_git(package, "status", "--porcelain", "--", ":(top)")
    return found | {
        "commit": commit,
        "branch": _ask_git(package, "rev-parse", "--abbrev-ref", "HEAD"),
        "uncommitted_changes": None if changes is None else bool(changes),
    }


def _ask_git(folder: Path, *arguments: str) -> str | None:
    """Return the output of git. None when it fails or is not installed."""
    # git sets these in hooks, and they would lead it to another repository
    command = [
        "env",
        "-u",
        "GIT_DIR",
        "-u",
        "GIT_WORK_TREE",
        "-u",
        "GIT_INDEX_FILE",
        "git",
        "-C",
        str(folder),
    ]
    try:
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _read_installed_commit() -> str | None:
    """Return the commit in direct_url.json (PEP 610), which pip writes for a package from a
    repository.
    """
    try:
        text = importlib.metadata.distribution("llmsys").read_text("direct_url.json")
        noted = json.loads(text or "{}").get("vcs_info", {}).get("commit_id")
    except (importlib.metadata.PackageNotFoundError, ValueError, AttributeError):
        return None
    return str(noted) if noted else None
