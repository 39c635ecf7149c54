"""The run folder: what it holds, who may write to it, and the record of where the run came from.

config.yaml (resolved), environment.json (versions, git state, host), events.jsonl, checkpoints/, report.html, .lock.
"""

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import yaml

from llmsys.config.run import RunConfig
from llmsys.publish import publish_bytes

RECORDED_PACKAGES = ("torch", "deepspeed", "accelerate", "sentencepiece", "pyarrow", "numpy", "pydantic")


def record(config: RunConfig, data_fingerprint: str, world_size: int) -> None:
    """Write the resolved config and the environment. Called by rank 0 at each start."""
    folder = config.run.folder
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    publish_bytes(folder / "config.yaml", text.encode())
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
    publish_bytes(folder / "environment.json", json.dumps(environment, indent=2).encode())


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
