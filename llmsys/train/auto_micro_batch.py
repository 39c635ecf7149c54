"""Resolve `batch.micro_sequences: auto` to the largest micro-batch that the estimate fits into
every rank's memory.

Reads the accelerator's properties, `/proc/meminfo` and the limits of the cgroup.
"""

import os
from pathlib import Path

import torch

from llmsys.config.run import RunConfig
from llmsys.estimate.peak_memory import find_largest_micro_batch
from llmsys.estimate.software_profile import MemoryProfile
from llmsys.log import get_logger
from llmsys.parallel.process_group import all_gather_object, get_world_size, run_on_rank_zero

log = get_logger(__name__)

CGROUP = Path("/sys/fs/cgroup")


def resolve_micro_sequences(config: RunConfig, device: torch.device) -> RunConfig:
    """Return the config with a number instead of `auto`, the same on every rank. Collective.

    Args:
        config: The config of the run.
        device: The device of this rank, whose memory counts.

    Returns:
        The config; the given one where it has a number already.
    """
    if config.batch.micro_sequences != "auto":
        return config
    # The smallest rank decides: the micro-batch must be the same on all.
    memory = min(all_gather_object(get_rank_memory(device)))
    system = MemoryProfile(device="cuda" if device.type == "cuda" else "cpu")

    def choose_micro_sequences() -> str:
        layout = config.resolve_layout(get_world_size())
        choice = find_largest_micro_batch(config, layout, memory, system)
        log.info("%s", choice)
        return str(choice.sequences)

    micro = int(run_on_rank_zero(choose_micro_sequences))
    return config.model_copy(
        update={"batch": config.batch.model_copy(update={"micro_sequences": micro})}
    )


def get_rank_memory(device: torch.device) -> int:
    """Return the bytes this rank may use: all of its accelerator, or its share of the machine's
    free memory.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return get_free_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def get_free_memory() -> int:
    """Return the memory that processes of this machine or container can still allocate.

    Returns:
        Bytes: `MemAvailable`, bounded by what the memory limit of the cgroup leaves.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _read_lines(Path("/proc/meminfo")):
        # includes memory that the kernel can reclaim, such as cached files
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
    # cgroup v2; "max" means no limit.
    limit, used = (_read_lines(CGROUP / name) for name in ("memory.max", "memory.current"))
    if limit and used and limit[0].isdigit():
        free = min(free, max(0, int(limit[0]) - int(used[0])))
    return free


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().split("\n")
    except OSError:
        return []
