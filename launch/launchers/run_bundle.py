"""What travels with a run to its hosts, in `launch/` of the run folder, so that the folder alone can start it again.

config.yaml (resolved), environment.sh and .deepspeed_env (what the user set for the libraries), hostfile, code.json and
code.diff (the commit, and what was changed since), and run.sh (the commands). Secrets stay where they are.
"""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from launch.hosts.hostfile import Host
from launch.launchers.local import SCRIPT
from llmsys import __version__
from llmsys.atomic_write import PRIVATE, write_bytes_atomically
from llmsys.config.run import RunConfig
from llmsys.errors import LaunchError
from llmsys.redact import has_secret, is_secret_name, redact_values

ROOT = SCRIPT.parent.parent
PREFIXES = ("CUDA_", "DS_", "FI_", "GLOO_", "HF_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_", "UCX_", "WANDB_")
ON_THIS_HOST_ONLY = ("CUDA_VISIBLE_DEVICES", "DS_ENV_FILE")
DEEPSPEED_NAME = ".deepspeed_env"
PDSH = "PDSH_SSH_ARGS_APPEND"
PDSH_OPTIONS = "-o BatchMode=yes -o ConnectTimeout=8 -o ServerAliveInterval=15"
"""Left alone, pdsh waits for hours for a host that is gone."""
SHELL_MEANS_SOMETHING = re.compile(r'(["$`\\])')
OURS = ("llmsys", "data_pipeline", "launch", "configs", "pyproject.toml")
"""What a run depends on in a checkout."""


def get_bundle_folder(config: RunConfig) -> Path:
    """Where it lies, as an absolute path: the same on every host."""
    return (config.run.folder / "launch").absolute()


def write_run_bundle(config: RunConfig, hosts: Sequence[Host], environment: Mapping[str, str] = os.environ) -> Path:
    """Fill `launch/` of the run folder, all but run.sh. Returns the folder.

    Raises LaunchError for a variable that cannot travel.
    """
    folder = get_bundle_folder(config)
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(redact_values(config.model_dump(mode="json")), sort_keys=False, allow_unicode=True)
    write_bytes_atomically(folder / "config.yaml", text.encode())
    write_bytes_atomically(folder / "hostfile", "".join(f"{host.name} slots={host.slots}\n" for host in hosts).encode())
    travelling = build_rank_environment(environment, folder)
    shell = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in travelling.items())
    write_bytes_atomically(folder / "environment.sh", shell.encode(), PRIVATE)
    write_bytes_atomically(
        folder / DEEPSPEED_NAME, format_deepspeed_environment(travelling, _list_user_files()).encode(), PRIVATE
    )
    state, difference = read_code_state(ROOT)
    write_bytes_atomically(folder / "code.json", json.dumps(redact_values(state), indent=2).encode(), PRIVATE)
    write_bytes_atomically(folder / "code.diff", difference, PRIVATE)
    return folder


def build_rank_environment(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The variables that the ranks of every host get: the libraries' own, without secrets, and where our code is."""
    chosen = {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(PREFIXES) and name not in ON_THIS_HOST_ONLY and not _is_secret(name, value)
    }
    for name, value in chosen.items():
        if "\n" in value:
            raise LaunchError(
                f"the environment variable {name} has several lines, and .deepspeed_env has one for each variable. "
                f"Unset it, or write its value in one line."
            )
    chosen.setdefault(PDSH, environment.get(PDSH, PDSH_OPTIONS))
    paths = dict.fromkeys([str(ROOT), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))])
    return chosen | {"PYTHONPATH": os.pathsep.join(paths), "DS_ENV_FILE": str(folder / DEEPSPEED_NAME)}


def list_withheld_secrets(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Variables that would travel if they did not look like secrets, those of the user's own files too."""
    theirs = [
        (name.strip(), value)
        for name, _, value in (line.partition("=") for line in _read_variable_lines(_list_user_files()))
    ]
    ours = [(name, value) for name, value in environment.items() if name.startswith(PREFIXES)]
    return sorted({name for name, value in (*ours, *theirs) if _is_secret(name, value)})


def _is_secret(name: str, value: str) -> bool:
    """Whether a variable stays on this host: by its name, or by what it holds, such as a URL with a password."""
    return is_secret_name(name) or has_secret(value)


def format_deepspeed_environment(travelling: Mapping[str, str], before: Sequence[Path]) -> str:
    """`.deepspeed_env` as DeepSpeed reads it: NAME=value lines and nothing else, the user's own files first.

    Secrets in those stay there: the run folder is shared, and copied with its run.

    Its launcher puts a value between double quotes for the remote shell where need be; what means something there even
    so is escaped.
    """
    theirs = [line for line in _read_variable_lines(before) if not _is_secret(*line.split("=", 1))]
    escaped = {name: SHELL_MEANS_SOMETHING.sub(r"\\\1", value) for name, value in travelling.items()}
    quoted = [f"{name}={value}" for name, value in escaped.items()]
    return "".join(f"{line}\n" for line in (*theirs, *quoted))


def _read_variable_lines(files: Sequence[Path]) -> list[str]:
    return [line for path in files for line in path.read_text().splitlines() if "=" in line]


def _list_user_files() -> list[Path]:
    """Where DeepSpeed would look, since it now looks into the run folder alone."""
    return [path for path in (Path.home() / DEEPSPEED_NAME, Path.cwd() / DEEPSPEED_NAME) if path.is_file()]


def read_code_state(root: Path) -> tuple[dict[str, Any], bytes]:
    """What code this is, and the difference of our files to the commit, new files too, as `git apply` takes it.

    Outside a checkout (an installed package) the version says it all, and there is no difference.
    """
    state: dict[str, Any] = {
        "llmsys": __version__,
        "root": str(root),
        "python": platform.python_version(),
        "interpreter": sys.executable,
        "working_directory": str(Path.cwd()),
        "command": sys.argv,
    }
    if not (root / ".git").exists() or (commit := _run_git(root, "rev-parse", "HEAD")) is None:
        return state | {"commit": None}, b""
    branch = _run_git(root, "rev-parse", "--abbrev-ref", "HEAD") or b""
    difference = _read_code_difference(root)
    known = {"commit": commit.decode().strip(), "branch": branch.decode().strip(), "changed": bool(difference)}
    return state | known, difference


def _read_code_difference(root: Path) -> bytes:
    present = [name for name in OURS if (root / name).exists()]
    changed = _run_git(root, "diff", "--binary", "HEAD", "--", *present) or b""
    new = (_run_git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", *present) or b"").split(b"\0")
    added = [
        _run_git(root, "diff", "--binary", "--no-index", "--", os.devnull, os.fsdecode(name)) for name in new if name
    ]
    return changed + b"".join(filter(None, added))


def _run_git(root: Path, *arguments: str) -> bytes | None:
    """What git prints; None without git. `diff --no-index` leaves with 1 where there is a difference."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode in (0, 1) else None
