"""A fixed list of micro-batches for each step, taken in turns: rank r of R has r, R + r, 2R + r, …

Which sequences meet in a micro-batch then depends on the config alone, and never on the number of ranks.
"""

from dataclasses import dataclass
from typing import Any

from llmsys.data.batch import Batch
from llmsys.data.steps import ALL, StepBatches


@dataclass(frozen=True)
class StridedStepBatches:
    """Every `ranks`-th micro-batch of the steps that a single rank would have; `ranks` divides their number."""

    whole: StepBatches
    ranks: int
    data_rank: int

    def get_micro_batches(self, step: int, which: slice = ALL) -> list[Batch]:
        """See Steps."""
        assert which == ALL, "turns are not cut again"
        return self.whole.get_micro_batches(step, slice(self.data_rank, None, self.ranks))

    def count_micro_batches(self, step: int) -> int:
        """See Steps."""
        return self.whole.count_micro_batches(step) // self.ranks

    def get_step_metrics(self, step: int) -> dict[str, Any]:
        """See Steps."""
        return self.whole.get_step_metrics(step)

    def get_packing_stats(self) -> dict[str, Any]:
        """See Steps."""
        return self.whole.get_packing_stats()
