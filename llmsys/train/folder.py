"""The run folder: what it holds, who may write to it, and the record of where the run came from.

config.yaml (resolved), environment.json (versions, git state, host), events.jsonl, checkpoints/, report.html, .lock.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from llmsys.config.run import RunConfig
from llmsys.errors import LaunchError
from llmsys.log import logger

LOCK_SECONDS = 60
RECORDED_PACKAGES = ("torch", "deepspeed", "accelerate", "sentencepiece", "pyarrow", "numpy", "pydantic")

log = logger(__name__)


@contextlib.contextmanager
def locked(folder: Path, wait_seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold the folder for this process. The lock dies with the process, however it dies; no stale lock can remain."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as file:
        _wait_for_lock(file, folder, wait_seconds)
        file.truncate(0)
        file.write(f"{os.getpid()} on {platform.node()}")
        file.flush()
        yield


def _wait_for_lock(file: Any, folder: Path, wait_seconds: float) -> None:
    deadline = time.monotonic() + wait_seconds
    told = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            file.seek(0)
            holder = file.read() or "unknown"
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{folder} is in use by process {holder}. Only one run may write to a folder. "
                    f"Wait for it, stop it, or set run.folder to another path."
                ) from None
            if not told:
                log.warning("%s is in use by process %s; waiting up to %.0f s", folder, holder, wait_seconds)
                told = True
            time.sleep(0.2)


def record(config: RunConfig, data_fingerprint: str, world_size: int) -> None:
    """Write the resolved config and the environment. Called by rank 0 at each start."""
    folder = config.run.folder
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    (folder / "config.yaml").write_text(text)
    environment = {
        "packages": {name: _version(name) for name in ("llmsys", *RECORDED_PACKAGES)},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "world_size": world_size,
        "git": git_state(Path.cwd()),
        "data_fingerprint": data_fingerprint,
    }
    (folder / "environment.json").write_text(json.dumps(environment, indent=2))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, branch and whether there are uncommitted changes; None outside a checkout or without git."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "branch": git("rev-parse", "--abbrev-ref", "HEAD"),
            "uncommitted_changes": bool(git("status", "--porcelain")),
        }
    except (OSError, subprocess.CalledProcessError):
        return None
