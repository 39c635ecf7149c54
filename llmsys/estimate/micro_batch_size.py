"""The largest micro-batch that the estimate says fits a rank's memory: `batch.micro_sequences: auto`.

Larger micro-batches keep the processor busier and repeat FSDP's gathering of weights less often; what a forward pass
keeps grows with them. Every step is cut into equal ones, so the choice is among the divisors of a rank's share.
"""

from dataclasses import dataclass
from math import gcd

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.config.violation import list_divisors
from llmsys.errors import ConfigError
from llmsys.estimate.memory_timeline import GIB
from llmsys.estimate.peak_memory import estimate_peak_memory
from llmsys.estimate.software_profile import MemoryProfile

USABLE_SHARE = 0.9
"""Usable share of the memory; the rest is for what the estimate does not count, such as fragmentation."""


@dataclass(frozen=True)
class MicroBatchChoice:
    """Windows of one forward pass of one rank, of the `share` it has in a full step, and the bytes that go with it."""

    sequences: int
    share: int
    peak_bytes: int
    memory_bytes: int

    def __str__(self) -> str:
        """For the log."""
        return (
            f"batch.micro_sequences=auto selects {self.sequences} of a rank's {self.share} sequences per "
            f"forward pass: an estimated {self.peak_bytes / GIB:.2f} GiB of {self.memory_bytes / GIB:.2f} GiB, "
            f"of which {USABLE_SHARE:.0%} is usable."
        )


def find_largest_micro_batch(
    config: RunConfig, layout: ParallelLayout, memory_bytes: int, system: MemoryProfile
) -> MicroBatchChoice:
    """Find the largest micro-batch whose estimated peak fits each rank.

    Args:
        config: resolved config of a run.
        layout: resolved layout, as `ParallelLayout.resolve` returns it.
        memory_bytes: memory of one rank; USABLE_SHARE of it is usable.
        system: training program and device, as in `estimate_peak_memory`.

    Returns:
        The choice, with the bytes behind it.

    Raises:
        ConfigError: one window does not fit, with suggested fixes.
    """
    share = config.batch.sequences_per_step // layout.data_parallel_size
    # every size of a ramp is cut into equal micro-batches
    for sequences in reversed(list_divisors(gcd(*config.batch.step_sizes) // layout.data_parallel_size)):
        batch = config.batch.model_copy(update={"micro_sequences": sequences})
        ledger = estimate_peak_memory(config.model_copy(update={"batch": batch}), layout, system=system)
        peak = ledger.peak_bytes + ledger.driver_bytes
        if peak <= USABLE_SHARE * memory_bytes:
            return MicroBatchChoice(sequences, share, peak, memory_bytes)
    told = ledger.compute_fit_result(int(USABLE_SHARE * memory_bytes)).text
    raise ConfigError(f"batch.micro_sequences=auto finds no size that fits; with one sequence at a time {told}")
