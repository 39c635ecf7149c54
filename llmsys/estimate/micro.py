"""The largest micro-batch that the estimate says fits a rank's memory: `batch.micro_sequences: auto`.

Larger micro-batches keep the processor busier and repeat FSDP's gathering of weights less often; what a forward pass
keeps grows with them. Every step is cut into equal ones, so the choice is among the divisors of a rank's share.
"""

from dataclasses import dataclass
from math import gcd

from llmsys.config.layout import Layout
from llmsys.config.rule import divisors
from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError
from llmsys.estimate.instants import GIB
from llmsys.estimate.memory_peak import peak_memory
from llmsys.estimate.system import System

USABLE_SHARE = 0.9
"""Of the memory: the rest is for what no estimate counts, fragments among it."""


@dataclass(frozen=True)
class MicroChoice:
    """Windows of one forward pass of one rank, of the `share` it has in a full step, and the bytes that go with it."""

    sequences: int
    share: int
    peak_bytes: int
    memory_bytes: int

    def __str__(self) -> str:
        """For the log."""
        return (
            f"batch.micro_sequences=auto takes {self.sequences} of a rank's {self.share} windows in one forward pass: "
            f"an estimated {self.peak_bytes / GIB:.2f} GiB of {self.memory_bytes / GIB:.2f} GiB, of which "
            f"{USABLE_SHARE:.0%} may be used."
        )


def largest_micro(config: RunConfig, layout: Layout, memory_bytes: int, system: System) -> MicroChoice:
    """The largest micro-batch of a resolved layout whose estimated peak fits `memory_bytes` of each rank.

    Raises ConfigError when not even one window does, with what would help.
    """
    share = config.batch.sequences_per_step // layout.data_ranks
    for sequences in reversed(divisors(gcd(*config.batch.sizes) // layout.data_ranks)):
        batch = config.batch.model_copy(update={"micro_sequences": sequences})
        ledger = peak_memory(config.model_copy(update={"batch": batch}), layout, system=system)
        peak = ledger.peak_bytes + ledger.outside_bytes
        if peak <= USABLE_SHARE * memory_bytes:
            return MicroChoice(sequences, share, peak, memory_bytes)
    told = ledger.verdict(int(USABLE_SHARE * memory_bytes)).text
    raise ConfigError(f"batch.micro_sequences=auto finds no size that fits, with one window at a time {told}")
