"""All that a dry run records: memory, collectives, waits and operations, and the phase that they
belong to.
"""

from collections import Counter
from dataclasses import dataclass, field

from llmsys.dryrun.categories import PARAMETERS
from llmsys.dryrun.collective_log import CollectiveLog
from llmsys.dryrun.host_waits import HostWaitLog
from llmsys.dryrun.memory_tracker import MemoryTracker
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
        squares: tables of positions by positions, by (owner, type and shape).
        phase: the current phase.
        modules: names of the modules whose forward is running, innermost last.
    """

    memory: MemoryTracker = field(default_factory=MemoryTracker)
    collectives: CollectiveLog = field(default_factory=CollectiveLog)
    waits: HostWaitLog = field(default_factory=HostWaitLog)
    operations: Counter[tuple[str, str]] = field(default_factory=Counter)
    flops: Counter[tuple[str, str]] = field(default_factory=Counter)
    attention_flops: Counter[tuple[str, str]] = field(default_factory=Counter)
    squares: Counter[tuple[str, str]] = field(default_factory=Counter)
    phase: Phase = field(default_factory=Phase)
    modules: list[str] = field(default_factory=list)
    probe: PositionProbe | None = None
    """Set while a step runs that looks for tables of positions by positions."""
    is_paused: bool = False
    """Set while torch computes on full-size tensors that no device holds, such as for DTensor's
    sharding rules.
    """

    def start_recording(self) -> None:
        """Record collectives, waits and operations from here on."""
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
