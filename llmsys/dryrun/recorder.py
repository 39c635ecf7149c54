"""All that a dry run records: memory, collectives, waits and operations, and the phase that they
belong to.
"""

from collections import Counter
from dataclasses import dataclass, field

from llmsys.dryrun.categories import BACKWARD, FORWARD, LOSS, PARAMETERS
from llmsys.dryrun.collective_log import CollectiveLog
from llmsys.dryrun.host_waits import HostWaitLog
from llmsys.dryrun.memory_tracker import MemoryTracker
from llmsys.dryrun.module_names import is_inside_block
from llmsys.dryrun.position_probe import PositionProbe


@dataclass
class Phase:
    """Names of the current part of the run, for the timeline, the logs and new storages."""

    name: str = "build"
    category: str = PARAMETERS
    repeated: str = "step"
    """`first`, `last` micro-batch of a step, or `step` for what happens once."""


@dataclass
class DryRunRecorder:
    """All that is recorded.

    Attributes:
        memory: storages of the device.
        collectives: calls between ranks.
        waits: waits of the host.
        operations: calls by (phase, operation) on the device.
        flops: FLOPs of products and attention by (phase, operation).
        attention_flops: FLOPs that attention kernels compute, by (phase, operation).
        squares: tables of positions by positions, by (owner, type and shape, code that makes it).
        block_runs: forward passes of blocks by (phase, name); repeated ones of a backward are none.
        products: FLOPs of products in forward passes by (phase, innermost module).
        block_operations: operations on the device by `forward`, for those of blocks, and
            `backward`, for all of it.
        phase: the current phase.
        modules: names of the modules whose forward is running, innermost last.
    """

    memory: MemoryTracker = field(default_factory=MemoryTracker)
    collectives: CollectiveLog = field(default_factory=CollectiveLog)
    waits: HostWaitLog = field(default_factory=HostWaitLog)
    operations: Counter[tuple[str, str]] = field(default_factory=Counter)
    flops: Counter[tuple[str, str]] = field(default_factory=Counter)
    attention_flops: Counter[tuple[str, str]] = field(default_factory=Counter)
    squares: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    block_runs: Counter[tuple[str, str]] = field(default_factory=Counter)
    products: Counter[tuple[str, str]] = field(default_factory=Counter)
    block_operations: Counter[str] = field(default_factory=Counter)
    phase: Phase = field(default_factory=Phase)
    modules: list[str] = field(default_factory=list)
    probe: PositionProbe | None = None
    """Set while a step runs that looks for tables of positions by positions."""
    is_paused: bool = False
    """Set while torch computes on full-size tensors that no device holds, such as for DTensor's
    sharding rules.
    """

    def __post_init__(self) -> None:
        self.waits.modules = self.modules

    def count_block(self, name: str) -> None:
        """Count the forward of a block, where it is none that a backward repeats.

        Args:
            name: Name of the block, such as `blocks.3`.
        """
        if self.waits.is_recording and self.phase.category in (FORWARD, LOSS):
            self.block_runs[self.phase.repeated, name] += 1

    def count_operation(self, name: str, flops: int) -> None:
        """Count one operation on the device.

        Args:
            name: The operation.
            flops: Of a product, else 0.
        """
        repeated = self.phase.repeated
        self.operations[repeated, name] += 1
        if flops:
            self.flops[repeated, name] += flops
        module = self.modules[-1] if self.modules else ""
        if self.phase.category in (FORWARD, LOSS):
            self.block_operations["forward"] += is_inside_block(module)
            if flops:
                self.products[repeated, module] += flops
        elif self.phase.category == BACKWARD:
            self.block_operations["backward"] += 1

    def start_recording(self) -> None:
        """Record collectives, waits and operations from here on, and forget those of the step
        before.
        """
        for one in (self.collectives.messages, self.collectives.events, self.waits.counts):
            one.clear()
        for counts in (self.operations, self.flops, self.attention_flops, self.products):
            counts.clear()
        self.block_runs.clear()
        self.block_operations.clear()
        self.collectives.is_recording = self.waits.is_recording = True

    def stop_recording(self) -> None:
        """Stop recording; memory is tracked on."""
        self.collectives.is_recording = self.waits.is_recording = False

    def enter_phase(self, name: str, category: str, repeated: str = "step") -> None:
        """Begin a phase of the timeline; a probe is none."""
        if self.probe is not None:
            return
        self.phase.name = name
        self.phase.category = category
        self.phase.repeated = repeated
        self.memory.mark_phase(name)
