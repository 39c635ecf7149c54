"""Read the network and the accelerators of this host for `llmsys preflight`, from /sys, /proc and
nvidia-smi.

Imports no torch and changes nothing. What a host does not have is left out; what cannot be read is
None.

Invariants:
- Every path begins at `root` and every program is run by `run`, so that a test can pretend a host.
"""

import hashlib
import os
import re
import resource
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsys.log import has_secret, is_secret_name

RUN_SECONDS = 10
# Library settings that decide how hosts talk to each other.
VARIABLES = ("FI_", "GLOO_", "NCCL_")
NCCL_FILES = ("etc/nccl.conf",)
# Where aws-ofi-nccl, NCCL's plugin for EFA, installs itself.
PLUGIN_FOLDERS = (
    "opt/amazon/ofi-nccl",
    "opt/aws-ofi-nccl",
    "usr/local/lib",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib64",
)
PLUGIN_NAMES = "libnccl-net*.so*"
XID = re.compile(r"NVRM: Xid \(PCI:(?P<place>[0-9a-fA-F:.]+)\): (?P<number>\d+)")
THROTTLES = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")

Runner = Callable[[Sequence[str]], str | None]


def run_program(words: Sequence[str]) -> str | None:
    """Run a program; return its output, or None where it is missing, fails or takes long.

    Args:
        words: The program and its arguments.

    Returns:
        The standard output.
    """
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=RUN_SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def collect_hardware_facts(
    root: Path = Path("/"), run: Runner = run_program, environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Return what NCCL, gloo and the accelerators depend on.

    Args:
        root: Root of the file system.
        run: Runs a program.
        environment: Variables of a rank of this host.

    Returns:
        JSON values: `interfaces` (name → state), `variables`, `nccl_conf`, `ports` of InfiniBand
        devices, `plugins`, `memlock_bytes` (None: unlimited), `shared_memory_bytes`, `gpus` and
        `xids` (None: not readable).
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shared_memory = root / "dev" / "shm"
    return {
        "interfaces": read_interfaces(root),
        "variables": select_network_variables(environment),
        "nccl_conf": _hash_files([root / name for name in NCCL_FILES]),
        "ports": read_infiniband_ports(root),
        "plugins": find_network_plugins(root, environment),
        "memlock_bytes": None if soft == resource.RLIM_INFINITY else soft,
        "shared_memory_bytes": shutil.disk_usage(shared_memory).total
        if shared_memory.is_dir()
        else 0,
        "gpus": read_gpu_health(run),
        "xids": read_xids(run),
    }


def read_interfaces(root: Path) -> dict[str, str]:
    """Return the state of each network interface: up, down or unknown.

    Args:
        root: Root of the file system.

    Returns:
        Name → state, as the kernel gives it.
    """
    folder = root / "sys" / "class" / "net"
    return {
        path.name: _read_text(path / "operstate")
        for path in sorted(folder.glob("*"))
        if path.is_dir()
    }


def select_network_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of NCCL, gloo and libfabric, without secrets.

    Args:
        environment: Variables of a process.

    Returns:
        Name → value.
    """
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(VARIABLES) and not is_secret_name(name) and not has_secret(value)
    }


def read_infiniband_ports(root: Path) -> list[dict[str, str]]:
    """Return the ports of InfiniBand, RoCE and EFA devices, as /sys/class/infiniband lists them.

    Args:
        root: Root of the file system.

    Returns:
        Device, driver, port, state, physical state, link layer and rate of each.
    """
    found = []
    for path in sorted((root / "sys" / "class" / "infiniband").glob("*/ports/*")):
        device = path.parents[1]
        found.append(
            {
                "device": device.name,
                "driver": (device / "device" / "driver").resolve().name,
                "port": path.name,
                # such as `4: ACTIVE` and `5: LinkUp`
                "state": _read_text(path / "state").rpartition(" ")[2],
                "physical": _read_text(path / "phys_state").rpartition(" ")[2],
                "layer": _read_text(path / "link_layer"),
                "rate": _read_text(path / "rate"),
            }
        )
    return found


def find_network_plugins(root: Path, environment: Mapping[str, str]) -> list[str]:
    """Return the paths of NCCL's network plugins, which EFA needs.

    Args:
        root: Root of the file system.
        environment: Has LD_LIBRARY_PATH.

    Returns:
        Paths, sorted.
    """
    own = [Path(one) for one in environment.get("LD_LIBRARY_PATH", "").split(os.pathsep) if one]
    found = [path for folder in own for path in folder.glob(PLUGIN_NAMES)]
    found += [path for name in PLUGIN_FOLDERS for path in (root / name).glob(PLUGIN_NAMES)]
    found += [
        path
        for name in PLUGIN_FOLDERS[:2]
        for path in (root / name).glob(f"lib*/**/{PLUGIN_NAMES}")
    ]
    return sorted({str(path) for path in found})


def read_gpu_health(run: Runner) -> list[dict[str, Any]] | None:
    """Return the health of each NVIDIA GPU by `nvidia-smi -q -x`.

    Args:
        run: Runs a program.

    Returns:
        Place on the PCI bus, name, uncorrectable ECC errors since the start of the driver, rows
        that wait for a repair, active slowdowns, width of the link and its maximum; None without
        nvidia-smi.
    """
    text = run(["nvidia-smi", "-q", "-x"])
    if text is None:
        return None
    try:
        log = ElementTree.fromstring(text)
    except ElementTree.ParseError:
        return None
    return [_parse_gpu(gpu) for gpu in log.findall("gpu")]


def _parse_gpu(gpu: ElementTree.Element) -> dict[str, Any]:
    counters = [one for one in gpu.findall("ecc_errors/volatile/*") if "uncorrectable" in one.tag]
    # of drivers for Volta and older
    counters += gpu.findall("ecc_errors/volatile/double_bit/total")
    pending = [
        _find_text(gpu, "remapped_rows/remapped_row_pending"),
        _find_text(gpu, "retired_pages/pending_retirement"),
        _find_text(gpu, "retired_pages/pending_blacklist"),
    ]
    # newer drivers say events where older ones said throttle
    reasons = [*gpu.findall("clocks_event_reasons/*"), *gpu.findall("clocks_throttle_reasons/*")]
    active = [one.tag for one in reasons if one.text == "Active"]
    return {
        "place": gpu.get("id", ""),
        "name": _find_text(gpu, "product_name"),
        "uncorrected_errors": sum(_parse_number(one.text) for one in counters),
        "has_pending_repair": "Yes" in pending,
        "has_failed_repair": _find_text(gpu, "remapped_rows/remapped_row_failure") == "Yes",
        "slowdowns": [name for name in THROTTLES if any(tag.endswith(name) for tag in active)],
        "temperature": _find_text(gpu, "temperature/gpu_temp"),
        "link_width": _parse_number(
            _find_text(gpu, "pci/pci_gpu_link_info/link_widths/current_link_width")
        ),
        "max_link_width": _parse_number(
            _find_text(gpu, "pci/pci_gpu_link_info/link_widths/max_link_width")
        ),
    }


def read_xids(run: Runner) -> list[tuple[str, int]] | None:
    """Return the Xid errors in the kernel's log: place on the PCI bus and number.

    Args:
        run: Runs a program.

    Returns:
        One entry per error; None where the log is not readable.
    """
    text = run(["dmesg"])
    return (
        None
        if text is None
        else [(found["place"], int(found["number"])) for found in XID.finditer(text)]
    )


def _hash_files(paths: Sequence[Path]) -> str:
    present = [path.read_bytes() for path in paths if path.is_file()]
    return hashlib.blake2b(b"\0".join(present), digest_size=6).hexdigest() if present else ""


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _find_text(gpu: ElementTree.Element, path: str) -> str:
    return (gpu.findtext(path) or "").strip()


def _parse_number(text: str | None) -> int:
    """Return the leading digits of a text such as `16x`; 0 for `N/A`."""
    found = re.match(r"\d+", text or "")
    return int(found[0]) if found else 0
