"""What one host knows of itself, for `llmsys preflight`: started there by ssh as `python -m launch.facts REQUEST`.

Reads a request in JSON (config, words, rank, hosts, …); prints one line of JSON. What goes wrong on the way is a field
of it, so that every other fact still gets told. Writes one file, by which the others see that the folder is shared.
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

from llmsys.errors import LlmsysError, disk_problem
from llmsys.port import EVERYWHERE, free_port, why_taken

PACKAGES = ("torch", "deepspeed", "accelerate", "numpy", "pyarrow")


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Every fact; a field that ends in `problem` holds the message of what could not be had."""
    facts: dict[str, Any] = {"versions": versions(), "commit": commit(), "code": code_digest()}
    facts |= _told("address", lambda: address_of(request["first"]))
    if request["port"] and request["rank"] == 0:
        facts |= _told("port", lambda: require_port(request["port"]))
    facts |= _told("free_port", lambda: free_port(EVERYWHERE))
    facts |= _told("folder", lambda: mark(Path(request["folder"]), request["marker"], request["rank"]))
    facts |= _told("devices", devices)
    facts |= _told("batch", lambda: dry_batch(request))
    return facts


def versions() -> dict[str, str]:
    """Versions of Python, llmsys and the packages that ranks must agree on; "missing" for what is not installed."""
    import llmsys

    found = {"python": platform.python_version(), "llmsys": llmsys.__version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def commit() -> str:
    """The commit of the checkout that the code lies in; "" where it is not a checkout."""
    from llmsys.source_code import read_source

    return str(read_source()["commit"] or "")[:12]


def code_digest() -> str:
    """A digest of every file of code that a rank may import from the three rooms."""
    rooms, whole = Path(__file__).resolve().parent.parent, hashlib.blake2b(digest_size=6)
    for room in ("data_pipeline", "launch", "llmsys"):
        for path in sorted((rooms / room).rglob("*.py")):
            whole.update(f"{path.relative_to(rooms)}\n".encode() + path.read_bytes())
    return whole.hexdigest()


def address_of(name: str) -> str:
    """The address by which this host would reach the first one."""
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_UNSPEC, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise LlmsysError(
            f"does not know the name {name} ({error.strerror}). Give it an address in /etc/hosts here, or use "
            f"addresses in nodes=."
        ) from None


def require_port(wanted: int) -> None:
    """Ask whether the port that ranks will meet at can be had."""
    if reason := why_taken(wanted, EVERYWHERE):
        raise LlmsysError(f"port {wanted} cannot be had ({reason}). Set launch.port to another, or end what holds it.")


def mark(folder: Path, marker: str, rank: int) -> dict[str, int]:
    """Leave a file for the others to see; the bytes that are free there."""
    try:
        (folder / marker).mkdir(parents=True, exist_ok=True)
        (folder / marker / str(rank)).write_text("seen\n")
    except OSError as error:
        raise disk_problem(error) or error from None
    return {"free_bytes": shutil.disk_usage(folder).free}


def devices() -> dict[str, Any]:
    """Accelerators with their memory, the memory and cores of the host, and whether it multiplies bf16 natively."""
    import torch

    from llmsys.parallel.group import device_of_this_rank
    from llmsys.train.micro import free_memory
    from llmsys.train.precision import find_bf16_support

    found = []
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        found.append({"name": torch.cuda.get_device_name(number), "free_bytes": free, "total_bytes": total})
    native = find_bf16_support(device_of_this_rank())._asdict()
    return {"accelerators": found, "memory_bytes": free_memory(), "cores": os.cpu_count() or 1, "bf16": native}


def dry_batch(request: dict[str, Any]) -> dict[str, Any]:
    """The first batch of this host's first rank, read as training would; its size."""
    from llmsys.config.load import load_run
    from llmsys.train.objective import steps_of

    config = load_run(request["config"], request["overrides"])
    layout = config.fitted_layout(request["ranks"])
    steps = steps_of(config, layout.data_ranks, layout.data_rank(request["first_rank"]))
    steps.step(0)
    return {"micro_batches": steps.micro_batches(0), "tokens_per_step": config.batch.tokens_per_step}


def _told(name: str, find: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {name: find()}
    except LlmsysError as error:
        return {f"{name}_problem": str(error)}
    except Exception as error:
        return {f"{name}_problem": f"{type(error).__name__}: {error}. This is not a known problem: look into it there."}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # no clean-up of a library may hold the answer up
