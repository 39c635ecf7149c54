"""What a step holds: its micro-batches for one data rank, of windows or of groups of similar length.

A step's content is a function of data, seed and step; the number of ranks, the size of micro-batches and how windows
are dealt change only who handles which row. Every rank has the same number of micro-batches, since the ranks meet in
each of them.
"""

from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from llmsys.data.batch import Batch, build_batch
from llmsys.data.deal import assign_balanced, compute_imbalance, assign_sequentially
from llmsys.data.grouping import LengthBuckets, compute_padding_stats
from llmsys.data.masking import TokenMasker
from llmsys.data.pairs import MakeBatch, SequencePairs
from llmsys.data.plan import RunPlan
from llmsys.data.windows import WindowDataset

ALL = slice(None)


class StepBatches(Protocol):
    """The micro-batches of each step for one data rank."""

    def get_micro_batches(self, step: int, which: slice = ALL) -> list[Batch]:
        """The micro-batches of step `get_micro_batches`, counted from 0, or only `which` of them."""
        ...

    def count_micro_batches(self, step: int) -> int:
        """How many there are, on every rank."""
        ...

    def get_step_metrics(self, step: int) -> dict[str, Any]:
        """Numbers about the whole step, over all ranks, for the log."""
        ...

    def get_packing_stats(self) -> dict[str, Any]:
        """What batches of this kind cost: padding, and tokens that no step sees, in one epoch."""
        ...


class WindowStepBatches:
    """Windows over packed documents: step n has the sequences that follow those of all steps before it.

    With `masking`, some tokens of each window are to be predicted from all others; else each token from those before.
    """

    def __init__(
        self,
        windows: WindowDataset,
        plan: RunPlan,
        *,
        separate_documents: bool,
        masking: TokenMasker | None = None,
        deal: Literal["in_order", "balanced"] = "in_order",
    ) -> None:
        self.windows, self.plan, self.masking, self.deal = windows, plan, masking, deal
        self.separate_documents = separate_documents

    def get_micro_batches(self, step: int, which: slice = ALL) -> list[Batch]:
        """See Steps."""
        numbers_RMS = self.get_assignment(step)
        return [self._build_batch(numbers) for numbers in numbers_RMS[self.plan.data_rank][which]]

    def count_micro_batches(self, step: int) -> int:
        """See Steps."""
        return self.plan.get_step_plan(step)[1].num_micro_batches

    def get_assignment(self, step: int) -> NDArray[np.int64]:
        """The sequence numbers of every rank's micro-batches in step `get_micro_batches`, (ranks, micro-batches, sequences)."""
        first, plan = self.plan.get_step_plan(step)
        shape = plan.data_ranks, plan.num_micro_batches
        if self.deal == "in_order" or plan.sequences == plan.micro_sequences:
            return first + assign_sequentially(*shape, plan.micro_sequences)
        return first + assign_balanced(self.windows.compute_attention_cost(np.arange(first, first + plan.sequences)), *shape)

    def get_step_metrics(self, step: int) -> dict[str, Any]:
        """See Steps: how far the data are read, and how unevenly attention is dealt (1 is even), beside in order."""
        first, plan = self.plan.get_step_plan(step)
        found = self.windows.get_progress(first + plan.sequences)
        if not self.separate_documents or plan.sequences == plan.micro_sequences:
            return found
        work_N = self.windows.compute_attention_cost(np.arange(first, first + plan.sequences))
        straight = assign_sequentially(plan.data_ranks, plan.num_micro_batches, plan.micro_sequences)
        dealt = self.get_assignment(step) - first if self.deal == "balanced" else straight
        found["attention_imbalance"] = round(compute_imbalance(work_N, dealt), 4)
        if self.deal == "balanced":
            found["attention_imbalance_in_order"] = round(compute_imbalance(work_N, straight), 4)
        return found

    def get_packing_stats(self) -> dict[str, Any]:
        """See Steps."""
        return {"kind": "windows", **self.windows.get_packing_stats()}

    def _build_batch(self, numbers: NDArray[np.int64]) -> Batch:
        batch = build_batch(self.windows.get_rows(numbers), separate_documents=self.separate_documents)
        return batch if self.masking is None else self.masking.mask_batch(batch, numbers.tolist())


class BucketedStepBatches:
    """Pairs in groups of similar length; each group is one micro-batch, its rows dealt over the ranks in turn.

    A rank that gets no row of a small group has a row that counts for nothing there.
    """

    def __init__(self, pairs: SequencePairs, grouping: LengthBuckets, make: MakeBatch, *, data_ranks: int, data_rank: int) -> None:
        self.pairs, self.grouping, self.make = pairs, grouping, make
        self.data_ranks, self.data_rank = data_ranks, data_rank

    def get_micro_batches(self, step: int, which: slice = ALL) -> list[Batch]:
        """See Steps."""
        return [
            self.make(self.pairs, group[self.data_rank :: self.data_ranks].tolist())
            for group in self.grouping.get_step_buckets(step)[which]
        ]

    def count_micro_batches(self, step: int) -> int:
        """See Steps."""
        return self.grouping.buckets_per_step

    def get_step_metrics(self, step: int) -> dict[str, Any]:
        """See Steps: tokens of sources and targets, and what padding takes if each group is one batch."""
        found = compute_padding_stats(self.grouping.get_step_buckets(step), self.pairs.sources.lengths, self.pairs.targets.lengths)
        source, target = found["tokens"]
        return {"source_tokens": source, "target_tokens": target, "padding_share": found["padding_share"]}

    def get_packing_stats(self) -> dict[str, Any]:
        """See Steps: of the first epoch, as if each group were one batch. Every pair is in a step: nothing is lost."""
        groups = [group for step in range(self.grouping.steps_per_epoch) for group in self.grouping.get_step_buckets(step)]
        found = compute_padding_stats(groups, self.pairs.sources.lengths, self.pairs.targets.lengths)
        return {
            "kind": "groups",
            "tokens_per_epoch": sum(found["tokens"]),
            "sequences_per_epoch": len(self.pairs),
            "padding_tokens_per_epoch": found["padding"],
            "lost_tokens_per_epoch": 0,
        }
