"""A fixed list of micro-batches for each step, taken in turns: rank r of R has r, R + r, 2R + r, …

Which sequences meet in a micro-batch then depends on the config alone, and never on the number of ranks.
"""

from dataclasses import dataclass
from typing import Any

from llmsys.data.batch import Batch
from llmsys.data.steps import ALL, Steps


@dataclass(frozen=True)
class StepsInTurns:
    """Every `ranks`-th micro-batch of the steps that a single rank would have; `ranks` divides their number."""

    whole: Steps
    ranks: int
    data_rank: int

    def step(self, step: int, which: slice = ALL) -> list[Batch]:
        """See Steps."""
        assert which == ALL, "turns are not cut again"
        return self.whole.step(step, slice(self.data_rank, None, self.ranks))

    def micro_batches(self, step: int) -> int:
        """See Steps."""
        return self.whole.micro_batches(step) // self.ranks

    def describe(self, step: int) -> dict[str, Any]:
        """See Steps."""
        return self.whole.describe(step)

    def packing(self) -> dict[str, Any]:
        """See Steps."""
        return self.whole.packing()
