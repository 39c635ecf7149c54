"""A toy config and hosts for launch plans."""

from pathlib import Path
from typing import Any

import yaml

from llmsys.config.run import RunConfig
from llmsys.launch.hosts.hostfile import Host

HOSTS = (Host("10.9.8.1", 2), Host("me@10.9.8.2", 2))
SMALL = {"batch": {"sequence_length": 8, "sequences": 8}}


def build_toy_config(folder: Path, **more: Any) -> RunConfig:
    """Return a small config with its run folder in `folder`."""
    return RunConfig.model_validate(
        SMALL | {"run": {"name": "a toy", "folder": str(folder / "run")}} | more
    )


def write_toy_config(folder: Path) -> str:
    """Write the small config to `folder` and return its path."""
    path = folder / "toy.yaml"
    path.write_text(
        yaml.safe_dump(SMALL | {"run": {"name": "a toy", "folder": str(folder / "run")}})
    )
    return str(path)
