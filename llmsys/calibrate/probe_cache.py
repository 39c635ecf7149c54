"""Files of the probes of machines, and when one is fresh.

Reads and writes one file for each machine, and number of processes and threads, in the cache folder
($LLMSYS_CACHE or ~/.cache/llmsys, machine-….yaml).

Invariants:
- A cached probe is used for the same processor or accelerators, cores, processes, threads, torch
  and format alone, and for `MAX_AGE_DAYS`. One that was measured beside other work is used once.
"""

import datetime
import os
import platform
from hashlib import sha256
from pathlib import Path

import torch

from llmsys.config.loading.yaml_files import dump_yaml
from llmsys.errors import ConfigError
from llmsys.estimate.device_profile import DeviceProfile, load_device_profile
from llmsys.log import get_logger
from llmsys.storage.atomic_write import write_bytes_atomically
from llmsys.storage.paths import get_cache_folder
from llmsys.train.precision import find_bf16_support

log = get_logger(__name__)

MAX_AGE_DAYS = 30
FORMAT = 1
# Source of a profile that was measured beside other work.
BUSY = "busy"


def get_cache_file(workers: str = "") -> Path:
    """Return the file of this machine's probe; it may not exist.

    Args:
        workers: Processes and threads that it is measured with; "" for one process that may use
            the whole machine.

    Returns:
        A path whose name holds the fingerprint of the machine.
    """
    described = describe_machine() + (f", {workers}" if workers else "")
    digest = sha256(described.encode()).hexdigest()[:16]
    return get_cache_folder() / f"machine-{digest}.yaml"


def describe_machine() -> str:
    """Describe what the speed of this machine depends on.

    Returns:
        Processor, cores, threads of torch and versions, in one line.
    """
    return ", ".join(
        (
            _read_processor_name(),
            f"{os.cpu_count()} cores",
            f"bf16 {find_bf16_support(torch.device('cpu')).is_native}",
            platform.system(),
            f"torch {torch.__version__}",
            f"probe format {FORMAT}",
        )
    )


def _read_processor_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def load_cached_probe(path: Path) -> DeviceProfile | None:
    """Load a probe that is fresh.

    Args:
        path: From `get_cache_file`.

    Returns:
        The profile; None where there is none, or it is old, cannot be read, or was measured beside
        other work.
    """
    if not path.is_file():
        return None
    try:
        profile = load_device_profile(str(path))
        probed = datetime.date.fromisoformat(profile.sources["probed"])
    except (ConfigError, KeyError, ValueError):
        log.info("%s is no probe of this machine, which is probed again", path)
        return None
    age = (datetime.datetime.now(datetime.UTC).date() - probed).days
    is_fresh = 0 <= age <= MAX_AGE_DAYS and BUSY not in profile.sources
    return profile if is_fresh else None


def write_probe(path: Path, profile: DeviceProfile) -> None:
    """Write a probe.

    Args:
        path: From `get_cache_file`.
        profile: The profile of this machine.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomically(path, dump_yaml(profile.model_dump(mode="json")).encode())
