"""The kind of data parallelism that `engine.data_parallel=auto` is: plain where nothing forbids it
and it fits, else FSDP.

Plain runs no hooks and copies nothing, but holds whole weights and gradient sums on every rank. One
rank then has the bits of FSDP; several exchange gradients once a step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from llmsys.config.combinations import find_refused_combinations
from llmsys.config.engine import TorchEngineConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError
from llmsys.estimate.device_profile import DeviceProfile
from llmsys.estimate.memory_timeline import GIB
from llmsys.estimate.peak_memory import (
    USABLE_SHARE,
    estimate_peak_memory,
    find_largest_micro_batch,
)
from llmsys.estimate.software_profile import OURS, MemoryProfile

# Beyond a machine the reduction of a whole step shows; FSDP2 hides its messages behind layers.
MAX_PLAIN_RANKS = 8


@dataclass(frozen=True)
class DataParallelChoice:
    """The kind that `auto` is, and the reason."""

    name: Literal["fsdp", "plain"]
    reason: str


def is_data_parallel_open(config: RunConfig) -> bool:
    """Return whether the config leaves the kind of data parallelism to us.

    Args:
        config: config of a run.

    Returns:
        True under `engine.data_parallel=auto`.
    """
    engine = config.engine
    return isinstance(engine, TorchEngineConfig) and engine.data_parallel == "auto"


def choose_data_parallel(
    config: RunConfig,
    layout: ParallelLayout,
    get_memory_bytes: Callable[[], int],
    system: MemoryProfile,
    *,
    is_one_machine: bool = True,
) -> DataParallelChoice:
    """Choose between plain and FSDP.

    Args:
        config: config of a run with `engine.data_parallel=auto`.
        layout: resolved layout, as `ParallelLayout.resolve` returns it.
        get_memory_bytes: returns the memory of one rank; called where nothing else decides.
        system: training program and device, as in `estimate_peak_memory`.
        is_one_machine: whether all ranks are on one machine.

    Returns:
        The choice; its reason names what forbids plain.
    """
    plain = config.resolve_data_parallel("plain").model_copy(update={"layout": layout})
    # As `auto` the config has passed the same checks.
    for violation in find_refused_combinations(plain):
        return DataParallelChoice("fsdp", f"{violation.key}: {violation.message}")
    ranks = layout.world_size
    if ranks > MAX_PLAIN_RANKS or not is_one_machine:
        where = "" if is_one_machine else " on several machines"
        return DataParallelChoice(
            "fsdp",
            f"{ranks} ranks{where} hide their messages behind layers, which plain does on no rank; "
            f"it is for at most {MAX_PLAIN_RANKS} of one machine",
        )
    return _choose_by_memory(config, plain, layout, get_memory_bytes(), system)


def resolve_data_parallel_for_profile(
    config: RunConfig, layout: ParallelLayout, device: DeviceProfile | None
) -> RunConfig:
    """Resolve `engine.data_parallel=auto` as training does on devices of a profile.

    Args:
        config: config of a run, with its precision resolved.
        layout: resolved layout.
        device: profile; None: unknown.

    Returns:
        The config with plain or fsdp instead of `auto`, which stays where no device is known and
        counts as fsdp.
    """
    if device is None or not is_data_parallel_open(config):
        return config
    choice = choose_data_parallel(
        config,
        layout,
        lambda: int(device.memory_bytes),
        OURS,
        is_one_machine=layout.world_size <= device.node_devices,
    )
    return config.resolve_data_parallel(choice.name)


def _choose_by_memory(
    config: RunConfig,
    plain: RunConfig,
    layout: ParallelLayout,
    memory_bytes: int,
    system: MemoryProfile,
) -> DataParallelChoice:
    fitting = DataParallelChoice("plain", "whole weights fit, and no wrapper is in their way")
    if config.batch.micro_sequences == "auto":
        sharded = config.resolve_data_parallel("fsdp")
        ours, theirs = (
            _find_micro_sequences(one, layout, memory_bytes, system) for one in (plain, sharded)
        )
        if ours >= theirs:
            return fitting
        return DataParallelChoice(
            "fsdp",
            f"whole weights would leave room for {ours} sequences in a micro-batch, shards for "
            f"{theirs}",
        )
    memory = estimate_peak_memory(plain, layout, system=system)
    peak = memory.peak_bytes + memory.driver_bytes
    if peak <= USABLE_SHARE * memory_bytes:
        return fitting
    return DataParallelChoice(
        "fsdp",
        f"whole weights take {peak / GIB:.2f} GiB {memory.peak_instant}, of which "
        f"{USABLE_SHARE * memory_bytes / GIB:.2f} GiB are usable",
    )


def _find_micro_sequences(
    config: RunConfig, layout: ParallelLayout, memory_bytes: int, system: MemoryProfile
) -> int:
    """Return the sequences of the largest micro-batch; 0 where none fits."""
    try:
        return find_largest_micro_batch(config, layout, memory_bytes, system).sequences
    except ConfigError:
        return 0
