"""Collect the facts of one host for `llmsys preflight`; ssh runs `python -m
llmsys.launch.preflight.host_probe REQUEST`.

Reads a request in JSON (config, overrides, rank, hosts, …); prints one line of JSON. Writes one
file, by which the other hosts see that the folder is shared.

Invariants:
- An error becomes a field `…_problem`, so that every other fact is still reported.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmsys.dataset.manifest_section import MANIFEST_NAME
from llmsys.errors import LlmsysError, to_data_error
from llmsys.launch.preflight.hardware_probe import collect_hardware_facts
from llmsys.parallel.port import EVERYWHERE, describe_port_conflict, find_free_port
from llmsys.storage.folder_lock import lock_folder
from llmsys.storage.mount import find_mount
from llmsys.storage.paths import find_folder_url

PACKAGES = ("torch", "deepspeed", "accelerate", "numpy", "pyarrow")


def collect_host_facts(request: dict[str, Any]) -> dict[str, Any]:
    """Return every fact. A field ending in `_problem` holds the message of a fact that could not
    be collected.
    """
    facts: dict[str, Any] = {
        "versions": read_versions(),
        "commit": read_commit(),
        "code": compute_code_digest(),
    }
    facts |= _collect_fact("address", lambda: resolve_address(request["first"]))
    if request["port"] and request["rank"] == 0:
        facts |= _collect_fact("port", lambda: require_port(request["port"]))
    facts |= _collect_fact("free_port", lambda: find_free_port(EVERYWHERE))
    facts |= _collect_fact(
        "folder", lambda: write_marker(Path(request["folder"]), request["marker"], request["rank"])
    )
    facts |= _collect_fact("data", lambda: read_datasets(request))
    facts |= _collect_fact("hardware", collect_hardware_facts)
    facts |= _collect_fact("devices", read_devices)
    facts |= _collect_fact("batch", lambda: read_first_batch(request))
    return facts


def read_versions() -> dict[str, str]:
    """Return the versions of Python, llmsys and the packages that ranks must agree on; "missing"
    if not installed.
    """
    import llmsys

    found = {"python": platform.python_version(), "llmsys": llmsys.__version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def read_commit() -> str:
    """Return the commit of the checkout that holds the code, 12 digits; "" outside a checkout."""
    from llmsys.train.source_code import read_source

    return str(read_source()["commit"] or "")[:12]


def compute_code_digest() -> str:
    """Return a hash of every Python file that a rank may import from llmsys."""
    import llmsys

    package = Path(llmsys.__file__).resolve().parent
    # In a checkout the last two are links, into which rglob does not descend.
    folders = (package, package / "data_pipeline", package / "launch")
    files = {path.relative_to(package): path for one in folders for path in one.rglob("*.py")}
    digest = hashlib.blake2b(digest_size=6)
    for name in sorted(files):
        digest.update(f"{name}\n".encode() + files[name].read_bytes())
    return digest.hexdigest()


def resolve_address(name: str) -> str:
    """Return the address by which this host would reach the first one."""
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_UNSPEC, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise LlmsysError(
            f"cannot resolve {name} ({error.strerror}). Add it to /etc/hosts here, or use "
            "addresses in nodes=."
        ) from None


def require_port(wanted: int) -> None:
    """Raise LlmsysError when the rendezvous port is in use."""
    if reason := describe_port_conflict(wanted, EVERYWHERE):
        raise LlmsysError(
            f"port {wanted} is not available ({reason}). Set another launch.port, or end the "
            "process that uses it."
        )


def write_marker(folder: Path, marker: str, rank: int) -> dict[str, Any]:
    """Write a file that the other hosts read; return the free bytes and the type of its file
    system.
    """
    try:
        (folder / marker).mkdir(parents=True, exist_ok=True)
        (folder / marker / str(rank)).write_text(format_marker(marker, rank))
        with lock_folder(folder / marker):  # a run locks its folder
            pass
    except OSError as error:
        raise to_data_error(error) or error from None
    return {"free_bytes": shutil.disk_usage(folder).free, "file_system": find_mount(folder)[0]}


def format_marker(marker: str, rank: int) -> str:
    """Return what a host writes into its marker.

    Args:
        marker: Name of the folder of the markers, new in each preflight.
        rank: Number of the host.

    Returns:
        One line, which no earlier preflight wrote.
    """
    return f"{marker}:{rank}\n"


def read_datasets(request: dict[str, Any]) -> dict[str, Any]:
    """Return a hash of the manifests of the run's datasets, and the types of the file systems
    that they are on.
    """
    from llmsys.config.data import list_dataset_folders
    from llmsys.config.loading.load import load_run_config

    digest, kinds = hashlib.blake2b(digest_size=6), []
    for folder in list_dataset_folders(
        load_run_config(request["config"], request["overrides"]).data
    ):
        if (url := find_folder_url(folder)) is not None:
            digest.update(url.encode())
            kinds.append(url.partition(":")[0])
            continue
        try:
            digest.update((folder / MANIFEST_NAME).read_bytes())
        except OSError as error:
            raise LlmsysError(
                f"{folder / MANIFEST_NAME} cannot be read ({error.strerror}). Prepare the "
                "dataset, copy it to this host, or share its folder."
            ) from None
        kinds.append(find_mount(folder)[0])
    return {"digest": digest.hexdigest(), "file_systems": sorted(set(kinds))}


def read_devices() -> dict[str, Any]:
    """Return the accelerators with their memory, the host's memory and cores, and its bf16
    support.
    """
    import torch

    from llmsys.parallel.process_group import get_local_device
    from llmsys.train.auto_micro_batch import get_free_memory
    from llmsys.train.precision import find_bf16_support

    found = []
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        found.append(
            {"name": torch.cuda.get_device_name(number), "free_bytes": free, "total_bytes": total}
        )
    native = find_bf16_support(get_local_device())._asdict()
    return {
        "accelerators": found,
        "memory_bytes": get_free_memory(),
        "cores": os.cpu_count() or 1,
        "bf16": native,
    }


def read_first_batch(request: dict[str, Any]) -> dict[str, Any]:
    """Read the first batch of this host's first rank as training would; return its size."""
    from llmsys.config.loading.load import load_run_config
    from llmsys.train.build_objective import build_step_batches

    config = load_run_config(request["config"], request["overrides"])
    layout = config.resolve_layout(request["ranks"])
    steps = build_step_batches(
        config, layout.data_parallel_size, layout.get_data_rank(request["first_rank"])
    )
    steps.get_micro_batches(0)
    return {
        "micro_batches": steps.count_micro_batches(0),
        "tokens_per_step": config.batch.tokens_per_step,
    }


def _collect_fact(name: str, find: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {name: find()}
    except LlmsysError as error:
        return {f"{name}_problem": str(error)}
    except Exception as error:
        return {
            f"{name}_problem": (
                f"{type(error).__name__}: {error}. This is not a known problem: "
                "check it on the host."
            )
        }


if __name__ == "__main__":
    print(json.dumps(collect_host_facts(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # no clean-up of a library may hold the answer up
