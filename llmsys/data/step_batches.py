"""Who handles which window of a step: so that all ranks do about the same work in attention, or one after another.

A window always has as many tokens as another, but attention within documents costs the sum of their squared lengths:
a window of one long document costs as much as many of short ones. Ranks wait for each other in every micro-batch.
Reads the work of a step's windows, gives their places; promises that this is a function of the step alone, whoever
asks, and that every window has one place. What a step sees never changes, only the order of its sums.

What a step holds: its micro-batches for one data rank, of windows or of groups of similar length.

A step's content is a function of data, seed and step; the number of ranks, the size of micro-batches and how windows
are dealt change only who handles which row. Every rank has the same number of micro-batches, since the ranks meet in
each of them.

A fixed list of micro-batches for each step, taken in turns: rank r of R has r, R + r, 2R + r, …

Which sequences meet in a micro-batch then depends on the config alone, and never on the number of ranks.
"""

import heapq
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from llmsys.data.batch import Batch, build_batch
from llmsys.data.length_buckets import LengthBuckets, compute_padding_stats
from llmsys.data.masking import TokenMasker
from llmsys.data.packed_windows import WindowDataset
from llmsys.data.sequence_pairs import MakeBatch, SequencePairs
from llmsys.data.step_plan import RunPlan

# N windows of a step, R data ranks, M micro-batches of a rank, S windows of a micro-batch: N = R * M * S


def assign_sequentially(ranks: int, micro_batches: int, size: int) -> NDArray[np.int64]:
    """Places in the step, (R, M, S): each rank takes its windows one after another."""
    return np.arange(ranks * micro_batches * size).reshape(ranks, micro_batches, size)


def assign_balanced(work_N: NDArray[np.int64], ranks: int, micro_batches: int) -> NDArray[np.int64]:
    """Places in the step, (R, M, S), such that micro-batches cost about the same.

    The costliest window left goes to the cheapest micro-batch that has room (Graham 1969, longest processing time
    first, with room for S). Then micro-batches of like cost meet in the same round, since there ranks wait for each
    other, and in each round the rank that did least so far takes the costliest.
    """
    size = len(work_N) // (ranks * micro_batches)
    members: list[list[int]] = [[] for _ in range(ranks * micro_batches)]
    cheapest = [(0, number) for number in range(len(members))]
    for window in np.lexsort((np.arange(len(work_N)), -work_N)).tolist():
        cost, number = heapq.heappop(cheapest)
        members[number].append(window)
        if len(members[number]) < size:
            heapq.heappush(cheapest, (cost + int(work_N[window]), number))
    bins = np.sort(np.array(members), axis=1)
    costs = work_N[bins].sum(1)
    rounds = bins[np.lexsort((bins[:, 0], -costs))].reshape(micro_batches, ranks, size)
    dealt, done = np.empty((ranks, micro_batches, size), np.int64), np.zeros(ranks, np.int64)
    for number, meeting in enumerate(rounds):
        takers = np.lexsort((np.arange(ranks), done))
        dealt[takers, number] = meeting
        done[takers] += work_N[meeting].sum(1)
    return dealt


def compute_imbalance(work_N: NDArray[np.int64], dealt_RMS: NDArray[np.int64]) -> float:
    """How long the ranks' attention takes together, over what it would if all micro-batches cost the same; 1 is even.

    In every round all wait for the costliest micro-batch of the round.
    """
    costs_RM = work_N[dealt_RMS].sum(2)
    return float(costs_RM.max(0).sum() * len(costs_RM) / max(int(costs_RM.sum()), 1))


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
        deal: Literal["sequential", "balanced"] = "sequential",
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
        """The sequence numbers of every rank's micro-batches in step `get_micro_batches`, (ranks, micro-batches,
        sequences).
        """
        first, plan = self.plan.get_step_plan(step)
        shape = plan.data_ranks, plan.num_micro_batches
        if self.deal == "sequential" or plan.sequences == plan.micro_sequences:
            return first + assign_sequentially(*shape, plan.micro_sequences)
        return first + assign_balanced(
            self.windows.compute_attention_cost(np.arange(first, first + plan.sequences)), *shape
        )

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

    def __init__(
        self, pairs: SequencePairs, grouping: LengthBuckets, make: MakeBatch, *, data_ranks: int, data_rank: int
    ) -> None:
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
        found = compute_padding_stats(
            self.grouping.get_step_buckets(step), self.pairs.sources.lengths, self.pairs.targets.lengths
        )
        source, target = found["tokens"]
        return {"source_tokens": source, "target_tokens": target, "padding_share": found["padding_share"]}

    def get_packing_stats(self) -> dict[str, Any]:
        """See Steps: of the first epoch, as if each group were one batch. Every pair is in a step: nothing is lost."""
        groups = [
            group for step in range(self.grouping.steps_per_epoch) for group in self.grouping.get_step_buckets(step)
        ]
        found = compute_padding_stats(groups, self.pairs.sources.lengths, self.pairs.targets.lengths)
        return {
            "kind": "groups",
            "tokens_per_epoch": sum(found["tokens"]),
            "sequences_per_epoch": len(self.pairs),
            "padding_tokens_per_epoch": found["padding"],
            "lost_tokens_per_epoch": 0,
        }


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
