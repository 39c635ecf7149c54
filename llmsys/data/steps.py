"""What a step holds: its micro-batches for one data rank, of windows or of groups of similar length.

A step's content is a function of data, seed and step; the number of ranks, the size of micro-batches and how windows
are dealt change only who handles which row. Every rank has the same number of micro-batches, since the ranks meet in
each of them.
"""

from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from llmsys.data.batch import Batch, make_batch
from llmsys.data.deal import balanced, imbalance, in_order
from llmsys.data.grouping import Grouping, counts
from llmsys.data.masking import Masking
from llmsys.data.pairs import MakeBatch, Pairs
from llmsys.data.plan import RunPlan
from llmsys.data.windows import Windows

ALL = slice(None)


class Steps(Protocol):
    """The micro-batches of each step for one data rank."""

    def step(self, step: int, which: slice = ALL) -> list[Batch]:
        """The micro-batches of step `step`, counted from 0, or only `which` of them."""
        ...

    def micro_batches(self, step: int) -> int:
        """How many there are, on every rank."""
        ...

    def describe(self, step: int) -> dict[str, Any]:
        """Numbers about the whole step, over all ranks, for the log."""
        ...

    def packing(self) -> dict[str, Any]:
        """What batches of this kind cost: padding, and tokens that no step sees, in one epoch."""
        ...


class WindowSteps:
    """Windows over packed documents: step n has the sequences that follow those of all steps before it.

    With `masking`, some tokens of each window are to be predicted from all others; else each token from those before.
    """

    def __init__(
        self,
        windows: Windows,
        plan: RunPlan,
        *,
        separate_documents: bool,
        masking: Masking | None = None,
        deal: Literal["in_order", "balanced"] = "in_order",
    ) -> None:
        self.windows, self.plan, self.masking, self.deal = windows, plan, masking, deal
        self.separate_documents = separate_documents

    def step(self, step: int, which: slice = ALL) -> list[Batch]:
        """See Steps."""
        numbers_RMS = self.dealt(step)
        return [self._batch(numbers) for numbers in numbers_RMS[self.plan.data_rank][which]]

    def micro_batches(self, step: int) -> int:
        """See Steps."""
        return self.plan.at(step)[1].micro_batches

    def dealt(self, step: int) -> NDArray[np.int64]:
        """The sequence numbers of every rank's micro-batches in step `step`, (ranks, micro-batches, sequences)."""
        first, plan = self.plan.at(step)
        shape = plan.data_ranks, plan.micro_batches
        if self.deal == "in_order" or plan.sequences == plan.micro_sequences:
            return first + in_order(*shape, plan.micro_sequences)
        return first + balanced(self.windows.work(np.arange(first, first + plan.sequences)), *shape)

    def describe(self, step: int) -> dict[str, Any]:
        """See Steps: how far the data are read, and how unevenly attention is dealt (1 is even), beside in order."""
        first, plan = self.plan.at(step)
        found = self.windows.seen(first + plan.sequences)
        if not self.separate_documents or plan.sequences == plan.micro_sequences:
            return found
        work_N = self.windows.work(np.arange(first, first + plan.sequences))
        straight = in_order(plan.data_ranks, plan.micro_batches, plan.micro_sequences)
        dealt = self.dealt(step) - first if self.deal == "balanced" else straight
        found["attention_imbalance"] = round(imbalance(work_N, dealt), 4)
        if self.deal == "balanced":
            found["attention_imbalance_in_order"] = round(imbalance(work_N, straight), 4)
        return found

    def packing(self) -> dict[str, Any]:
        """See Steps."""
        return {"kind": "windows", **self.windows.packing()}

    def _batch(self, numbers: NDArray[np.int64]) -> Batch:
        batch = make_batch(self.windows.rows(numbers), separate_documents=self.separate_documents)
        return batch if self.masking is None else self.masking.masked(batch, numbers.tolist())


class GroupedSteps:
    """Pairs in groups of similar length; each group is one micro-batch, its rows dealt over the ranks in turn.

    A rank that gets no row of a small group has a row that counts for nothing there.
    """

    def __init__(self, pairs: Pairs, grouping: Grouping, make: MakeBatch, *, data_ranks: int, data_rank: int) -> None:
        self.pairs, self.grouping, self.make = pairs, grouping, make
        self.data_ranks, self.data_rank = data_ranks, data_rank

    def step(self, step: int, which: slice = ALL) -> list[Batch]:
        """See Steps."""
        return [
            self.make(self.pairs, group[self.data_rank :: self.data_ranks].tolist())
            for group in self.grouping.step(step)[which]
        ]

    def micro_batches(self, step: int) -> int:
        """See Steps."""
        return self.grouping.groups_per_step

    def describe(self, step: int) -> dict[str, Any]:
        """See Steps: tokens of sources and targets, and what padding takes if each group is one batch."""
        found = counts(self.grouping.step(step), self.pairs.sources.lengths, self.pairs.targets.lengths)
        source, target = found["tokens"]
        return {"source_tokens": source, "target_tokens": target, "padding_share": found["padding_share"]}

    def packing(self) -> dict[str, Any]:
        """See Steps: of the first epoch, as if each group were one batch. Every pair is in a step: nothing is lost."""
        groups = [group for step in range(self.grouping.steps_per_epoch) for group in self.grouping.step(step)]
        found = counts(groups, self.pairs.sources.lengths, self.pairs.targets.lengths)
        return {
            "kind": "groups",
            "tokens_per_epoch": sum(found["tokens"]),
            "sequences_per_epoch": len(self.pairs),
            "padding_tokens_per_epoch": found["padding"],
            "lost_tokens_per_epoch": 0,
        }
