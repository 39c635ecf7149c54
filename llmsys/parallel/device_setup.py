"""Set up the host side of this rank's accelerator: the processors that are near to it, and what its
allocator holds.

Reads /sys and /proc. Changes nothing for a rank on the CPU.

Invariants:
- A rank never gets a processor that it could not use before: taskset, Slurm and containers decide
  first.
"""

import os
from pathlib import Path
from typing import Any

import torch

from llmsys.log import get_logger

log = get_logger(__name__)

SYSTEM, NVIDIA_DRIVER = Path("/sys"), Path("/proc/driver/nvidia")
# Values of CUDA_VISIBLE_DEVICES that hide every device on purpose.
HIDDEN = ("", "-1", "NoDevFiles")


def warn_about_unused_gpus(device: torch.device, driver: Path = NVIDIA_DRIVER) -> None:
    """Log a warning where this rank runs on the CPU of a machine with NVIDIA GPUs, which this torch
    cannot use.

    Args:
        device: Device of this rank.
        driver: Where Linux lists the GPUs of NVIDIA's driver.
    """
    gpus = list((driver / "gpus").glob("*"))
    if device.type != "cpu" or not gpus or os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN:
        return
    build, remedy = (
        f"is built for CUDA {torch.version.cuda}",
        "Check nvidia-smi: the driver may be too old for it",
    )
    if torch.version.cuda is None:
        build, remedy = (
            "is a build for CPUs",
            f"Install torch {torch.__version__.partition('+')[0]} with CUDA, from PyPI",
        )
    log.warning(
        "this machine has %d NVIDIA GPUs and torch %s %s: the CPU is used instead. %s, or hide "
        "the GPUs with CUDA_VISIBLE_DEVICES=-1.",
        len(gpus),
        torch.__version__,
        build,
        remedy,
    )


def bind_to_near_processors(device: torch.device, system: Path = SYSTEM) -> None:
    """Restrict this process to the processors of the NUMA node that its accelerator is attached to.

    Memory that the process touches later comes from that node too, so copies to the device do not
    cross sockets. To be called before threads are started: they inherit the processors.

    Args:
        device: Device of this rank.
        system: Where Linux describes devices.
    """
    if device.type != "cuda":
        return
    address = _format_pci_address(device)
    node = _read_text(system / "bus/pci/devices" / address / "numa_node")
    processors = (
        _read_text(system / f"devices/system/node/node{node}/cpulist") if node.isdigit() else ""
    )
    # Linux writes -1 where the firmware names no node.
    if not processors:
        reason = (
            "its NUMA node is unknown"
            if not node.isdigit()
            else f"node {node} has no list of processors"
        )
        log.info("%s at %s: %s, so this rank may use any processor", device, address, reason)
        return
    allowed = os.sched_getaffinity(0)
    near = allowed & parse_processor_list(processors)
    if not near:
        log.info(
            "%s is at NUMA node %s, of which this rank may use no processor; nothing is changed",
            device,
            node,
        )
        return
    os.sched_setaffinity(0, near)
    log.info(
        "%s is at NUMA node %s: this rank uses %d of %d processors",
        device,
        node,
        len(near),
        len(allowed),
    )


def parse_processor_list(text: str) -> set[int]:
    """Return the numbers of Linux's list format.

    Args:
        text: Such as `0-3,8`.

    Returns:
        Numbers of processors, such as {0, 1, 2, 3, 8}.
    """
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _format_pci_address(device: torch.device) -> str:
    # torch does not declare all of its fields
    properties: Any = torch.cuda.get_device_properties(device)
    bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}"
    # Function 0: torch knows domain, bus and device.
    return f"{bus}:{properties.pci_device_id:02x}.0"


def _read_text(path: Path) -> str:
    """Return the stripped text of a file; "" where it cannot be read, as in many containers."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def trim_allocator(device: torch.device) -> None:
    """Give memory that torch's allocator holds without a tensor in it back to the device.

    Initial values, a loaded checkpoint and the tuning of compiled kernels need buffers of sizes
    that no step has. What they leave would stay cut into their sizes, and the step would get new
    memory in addition.

    Args:
        device: Device of this rank.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
