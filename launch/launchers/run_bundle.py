"""Write the files that start a run on its hosts into `launch/` of the run folder; the folder alone
can restart it.

Writes config.yaml (resolved), environment.sh and .deepspeed_env (the user's library settings),
hostfile, code.json and code.diff (the commit, and changes since).

Invariants:
- No secret is written; see `list_withheld_secrets`.
- Files with variables or commands have mode 0600.
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

from llmsys import __version__
from llmsys.config.loading.config_files import format_recorded_config
from llmsys.config.run import RunConfig
from llmsys.errors import LaunchError
from llmsys.launch.hosts.hostfile import Host
from llmsys.log import has_secret, is_secret_name, redact_values
from llmsys.storage.atomic_write import PRIVATE, write_bytes_atomically
from llmsys.storage.paths import find_import_root

# Settings of libraries; those that choose kernels decide bits, so all hosts must have the same.
PREFIXES = (
    *(
        "ATEN_",
        "CUDA_",
        "DNNL_",
        "DS_",
        "FI_",
        "GLOO_",
        "HF_",
        "KMP_",
        "MKL_",
        "NCCL_",
        "OMP_",
        "ONEDNN_",
        "OPENBLAS_",
    ),
    *("PYTORCH_", "TORCH_", "UCX_", "WANDB_"),
    # the consent to code of the config, which this process has checked
    "LLMSYS_TRUST_CODE",
)
ON_THIS_HOST_ONLY = ("CUDA_VISIBLE_DEVICES", "DS_ENV_FILE")
DEEPSPEED_NAME = ".deepspeed_env"
PDSH = "PDSH_SSH_ARGS_APPEND"
# Without these options pdsh waits for hours for a host that is gone.
PDSH_OPTIONS = "-o BatchMode=yes -o ConnectTimeout=8 -o ServerAliveInterval=15"
SHELL_MEANS_SOMETHING = re.compile(r'(["$`\\])')
# Paths of a checkout that a run depends on.
OURS = ("llmsys", "data_pipeline", "launch", "configs", "pyproject.toml")


def get_bundle_folder(config: RunConfig) -> Path:
    """Return the bundle's absolute path, which is the same on every host."""
    return (config.run.folder / "launch").absolute()


def write_run_bundle(
    config: RunConfig, hosts: Sequence[Host], environment: Mapping[str, str] = os.environ
) -> Path:
    """Write every file of the bundle except run.sh.

    Args:
        config: The resolved run; secrets in URLs are redacted.
        hosts: The hosts and their slots.
        environment: Variables to take the libraries' settings from; by default this process's.

    Returns:
        `launch/` of the run folder.

    Raises:
        LaunchError: A variable has several lines.
    """
    folder = get_bundle_folder(config)
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes_atomically(
        folder / "config.yaml", format_recorded_config(config.model_dump(mode="json")).encode()
    )
    write_bytes_atomically(
        folder / "hostfile", "".join(f"{host.name} slots={host.slots}\n" for host in hosts).encode()
    )
    travelling = build_rank_environment(environment, folder)
    shell = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in travelling.items())
    write_bytes_atomically(folder / "environment.sh", shell.encode(), PRIVATE)
    write_bytes_atomically(
        folder / DEEPSPEED_NAME,
        format_deepspeed_environment(travelling, _list_user_files()).encode(),
        PRIVATE,
    )
    state, difference = read_code_state(find_import_root())
    write_bytes_atomically(
        folder / "code.json", json.dumps(redact_values(state), indent=2).encode(), PRIVATE
    )
    write_bytes_atomically(folder / "code.diff", difference, PRIVATE)
    return folder


def build_rank_environment(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the variables for the ranks of every host: library settings without secrets, and
    our PYTHONPATH.
    """
    chosen = {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(PREFIXES)
        and name not in ON_THIS_HOST_ONLY
        and not _is_secret(name, value)
    }
    for name, value in chosen.items():
        if "\n" in value:
            raise LaunchError(
                f"the environment variable {name} has several lines, but .deepspeed_env allows "
                "one per variable. Unset it, or write its value in one line."
            )
    chosen.setdefault(PDSH, environment.get(PDSH, PDSH_OPTIONS))
    paths = dict.fromkeys(
        [
            str(find_import_root()),
            *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)),
        ]
    )
    return chosen | {
        "PYTHONPATH": os.pathsep.join(paths),
        "DS_ENV_FILE": str(folder / DEEPSPEED_NAME),
    }


def list_withheld_secrets(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the variables that are left out of the bundle because they look like secrets.

    Args:
        environment: Variables of the launch; those of the user's own `.deepspeed_env` are looked at
            too.

    Returns:
        Their names, sorted.
    """
    theirs = [
        (name.strip(), value)
        for name, _, value in (
            line.partition("=") for line in _read_variable_lines(_list_user_files())
        )
    ]
    ours = [(name, value) for name, value in environment.items() if name.startswith(PREFIXES)]
    return sorted({name for name, value in (*ours, *theirs) if _is_secret(name, value)})


def _is_secret(name: str, value: str) -> bool:
    """Return whether a variable looks like a secret, by its name or by its value, such as a URL
    with a password.
    """
    return is_secret_name(name) or has_secret(value)


def format_deepspeed_environment(travelling: Mapping[str, str], before: Sequence[Path]) -> str:
    """Return the text of `.deepspeed_env`: NAME=value lines, the user's files first.

    Secrets in the user's files are left out, because the run folder is shared. Characters that the
    remote shell expands inside double quotes are escaped, because DeepSpeed's launcher quotes
    values that way.
    """
    theirs = [line for line in _read_variable_lines(before) if not _is_secret(*line.split("=", 1))]
    escaped = {
        name: SHELL_MEANS_SOMETHING.sub(r"\\\1", value) for name, value in travelling.items()
    }
    quoted = [f"{name}={value}" for name, value in escaped.items()]
    return "".join(f"{line}\n" for line in (*theirs, *quoted))


def _read_variable_lines(files: Sequence[Path]) -> list[str]:
    return [line for path in files for line in path.read_text().splitlines() if "=" in line]


def _list_user_files() -> list[Path]:
    """Return the files that DeepSpeed would read, since DS_ENV_FILE leads it to the run folder
    alone.
    """
    return [
        path
        for path in (Path.home() / DEEPSPEED_NAME, Path.cwd() / DEEPSPEED_NAME)
        if path.is_file()
    ]


def read_code_state(root: Path) -> tuple[dict[str, Any], bytes]:
    """Return the commit and versions of this code, and the diff to the commit (new files too) as
    `git apply` takes it.

    Outside a checkout, as in an installed package, the version identifies the code and the diff is
    empty.
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
    known = {
        "commit": commit.decode().strip(),
        "branch": branch.decode().strip(),
        "changed": bool(difference),
    }
    return state | known, difference


def _read_code_difference(root: Path) -> bytes:
    present = [name for name in OURS if (root / name).exists()]
    # --binary: `git apply` can then restore files that are not text
    changed = _run_git(root, "diff", "--binary", "HEAD", "--", *present) or b""
    # git diff leaves out files that were never added
    new = (
        _run_git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", *present) or b""
    ).split(b"\0")
    added = [
        _run_git(root, "diff", "--binary", "--no-index", "--", os.devnull, os.fsdecode(name))
        for name in new
        if name
    ]
    return changed + b"".join(filter(None, added))


def _run_git(root: Path, *arguments: str) -> bytes | None:
    """Return the output of git; None without git. `diff --no-index` exits with 1 where there is
    a difference.
    """
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, check=False
        )
    except OSError:
        return None
    # `diff --no-index` exits with 1 where there is a difference
    return done.stdout if done.returncode in (0, 1) else None
