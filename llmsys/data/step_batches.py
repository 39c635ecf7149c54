"""The micro-batches of each step for one data rank, from windows or from length buckets.

Invariants:
- The content of a step is a function of data, seed and step. Ranks, the size of micro-batches and
  the assignment of windows change only who handles which row, hence the order of sums.
- Every rank has the same number of micro-batches, because the ranks synchronize in each of them.
"""

import heapq
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, assert_never

import numpy as np
from numpy.typing import NDArray

from llmsys.data.batch import Batch, build_batch
from llmsys.data.length_buckets import LengthBuckets, compute_padding_stats
from llmsys.data.masking import WindowTransform
from llmsys.data.packed_windows import WindowDataset
from llmsys.data.sequence_pairs import MakeBatch, SequencePairs
from llmsys.data.step_plan import RunPlan
from llmsys.data.target_documents import build_target_documents
from llmsys.vocabulary.chat_tokens import StoredChats

# N windows of a step, R data ranks, M micro-batches of a rank, S windows of a micro-batch: N = R *
# M * S


def assign_sequentially(ranks: int, micro_batches: int, size: int) -> NDArray[np.int64]:
    """Assign the windows of a step in order: each rank takes consecutive ones.

    Args:
        ranks: Data-parallel ranks, R.
        micro_batches: Micro-batches of a rank, M.
        size: Windows of a micro-batch, S.

    Returns:
        Positions in the step, int64 (R, M, S).
    """
    return np.arange(ranks * micro_batches * size).reshape(ranks, micro_batches, size)


def assign_balanced(cost_N: NDArray[np.int64], ranks: int, micro_batches: int) -> NDArray[np.int64]:
    """Assign the windows of a step so that micro-batches cost about the same.

    A window always has as many tokens as another, but attention within documents costs the sum
    of their squared lengths. The costliest remaining window goes to the cheapest micro-batch
    with fewer than S (Graham 1969, longest processing time first). Then micro-batches of similar
    cost are put into the same round, where ranks wait for each other, and in each round the rank
    with the least work so far takes the costliest.

    Args:
        cost_N: Cost of each window; N = R · M · S.
        ranks: Data-parallel ranks, R.
        micro_batches: Micro-batches of a rank, M.

    Returns:
        Positions in the step, int64 (R, M, S).
    """
    size = len(cost_N) // (ranks * micro_batches)
    members: list[list[int]] = [[] for _ in range(ranks * micro_batches)]
    cheapest = [(0, number) for number in range(len(members))]
    # Ties by index, so that every rank computes the same assignment.
    for window in np.lexsort((np.arange(len(cost_N)), -cost_N)).tolist():
        cost, number = heapq.heappop(cheapest)
        members[number].append(window)
        if len(members[number]) < size:
            heapq.heappush(cheapest, (cost + int(cost_N[window]), number))
    bins = np.sort(np.array(members), axis=1)
    costs = cost_N[bins].sum(1)
    rounds = bins[np.lexsort((bins[:, 0], -costs))].reshape(micro_batches, ranks, size)
    assigned = np.empty((ranks, micro_batches, size), np.int64)
    work = np.zeros(ranks, np.int64)
    for number, members_of_round in enumerate(rounds):
        by_work = np.lexsort((np.arange(ranks), work))
        assigned[by_work, number] = members_of_round
        work[by_work] += cost_N[members_of_round].sum(1)
    return assigned


def compute_imbalance(cost_N: NDArray[np.int64], assigned_RMS: NDArray[np.int64]) -> float:
    """Compute how much longer attention takes than with micro-batches of equal cost.

    In every round all ranks wait for the costliest micro-batch.

    Args:
        cost_N: Cost of each window.
        assigned_RMS: Positions in the step of each micro-batch.

    Returns:
        Time of attention over all rounds, relative to an even share; 1 is even.
    """
    costs_RM = cost_N[assigned_RMS].sum(2)
    return float(costs_RM.max(0).sum() * len(costs_RM) / max(int(costs_RM.sum()), 1))


def divide_sequences(batch: Batch, length: int) -> Batch:
    """Return a batch whose rows are divided into rows of `length` tokens, which do not see each
    other.

    Args:
        batch: Rows of next-token prediction, whose length is a multiple of `length`.
        length: Tokens of a row.

    Returns:
        The same tokens and targets in more rows.
    """
    return batch.map_tensors(lambda tensor_BT: tensor_BT.reshape(-1, length))


ALL = slice(None)


class StepBatches(Protocol):
    """The micro-batches of each step for one data rank."""

    def get_micro_batches(self, step: int, which: slice = ALL) -> list[Batch]:
        """Read micro-batches of this rank.

        Args:
            step: The step, counted from 0.
            which: Only these micro-batches of the step.

        Returns:
            The batches, in order. A function of data, seed and step: any step can be read at any
            time.
        """
        ...

    def count_micro_batches(self, step: int) -> int:
        """Count the micro-batches of this rank in a step.

        Args:
            step: The step, counted from 0; a growing batch has fewer at first.

        Returns:
            The number, the same on every rank.
        """
        ...

    def get_step_metrics(self, step: int) -> dict[str, Any]:
        """Describe the data of a step, for the log.

        Args:
            step: The step, counted from 0.

        Returns:
            Fields of the `step` event.
        """
        ...

    def get_packing_stats(self) -> dict[str, Any]:
        """Return the padding and the unseen tokens of one epoch."""
        ...


class WindowStepBatches:
    """Windows over packed documents: step n has the sequences that follow those of all steps before
    it.

    With `masking`, some tokens of each window are predicted from all others; otherwise each token
    from those before it. With `chats`, the windows have stored ids
    (llmsys/vocabulary/chat_tokens.py).
    """

    def __init__(
        self,
        windows: WindowDataset,
        plan: RunPlan,
        *,
        separate_documents: bool,
        masking: WindowTransform | None = None,
        deal: Literal["sequential", "balanced"] = "sequential",
        chats: StoredChats | None = None,
        names_documents: bool = False,
    ) -> None:
        """Combine windows with the plan of a run. Nothing is read yet.

        Args:
            windows: Numbered windows over the packed documents.
            plan: Sequences of each step and micro-batch, and the data rank that these batches are
                for.
            separate_documents: Tokens attend only within their document.
            masking: Hides tokens of each window and makes them the targets. Default: None, each
                token is predicted from those before it.
            deal: "sequential" gives ranks and micro-batches their windows in order, "balanced"
                evens out the cost of attention among them. The windows of a step are the same.
                Default: "sequential".
            chats: Splits stored ids, where the windows hold chats. Default: None, they hold
                documents.
            names_documents: Batches name the document of each target, to record losses by document.
                Default: False.
        """
        self.windows = windows
        self.plan = plan
        self.masking = masking
        self.deal = deal
        self.chats = chats
        self.separate_documents = separate_documents
        self.names_documents = names_documents

    def get_micro_batches(self, step: int, which: slice = ALL) -> list[Batch]:
        """Implement `StepBatches.get_micro_batches`."""
        numbers_RMS = self.get_assignment(step)
        length = self.plan.batch.get_step_length(step)
        batches = [
            self._build_batch(numbers) for numbers in numbers_RMS[self.plan.data_rank][which]
        ]
        return (
            batches
            if length == self.windows.length
            else [divide_sequences(batch, length) for batch in batches]
        )

    def count_micro_batches(self, step: int) -> int:
        """Implement `StepBatches.count_micro_batches`."""
        return self.plan.get_step_plan(step)[1].num_micro_batches

    def get_assignment(self, step: int) -> NDArray[np.int64]:
        """Return the sequences of all ranks in a step.

        Args:
            step: The step, counted from 0.

        Returns:
            Numbers of sequences, int64 (ranks, micro-batches, sequences).
        """
        first, plan = self.plan.get_step_plan(step)
        shape = plan.data_ranks, plan.num_micro_batches
        # A single micro-batch leaves nothing to choose.
        match "sequential" if plan.sequences == plan.micro_sequences else self.deal:
            case "sequential":
                return first + assign_sequentially(*shape, plan.micro_sequences)
            case "balanced":
                cost_N = self.windows.compute_attention_cost(
                    np.arange(first, first + plan.sequences)
                )
                return first + assign_balanced(cost_N, *shape)
            case unreachable:
                assert_never(unreachable)

    def get_step_metrics(self, step: int) -> dict[str, Any]:
        """Return the read progress and the imbalance of attention (1 is even), as assigned and
        in order.
        """
        first, plan = self.plan.get_step_plan(step)
        metrics = self.windows.get_progress(first + plan.sequences)
        if self.plan.batch.length_stages:
            metrics["sequence_length"] = self.plan.batch.get_step_length(step)
        if not self.separate_documents or plan.sequences == plan.micro_sequences:
            return metrics
        cost_N = self.windows.compute_attention_cost(np.arange(first, first + plan.sequences))
        sequential = assign_sequentially(
            plan.data_ranks, plan.num_micro_batches, plan.micro_sequences
        )
        assigned = self.get_assignment(step) - first
        metrics["attention_imbalance"] = round(compute_imbalance(cost_N, assigned), 4)
        if self.deal == "balanced":
            metrics["attention_imbalance_sequential"] = round(
                compute_imbalance(cost_N, sequential), 4
            )
        return metrics

    def get_packing_stats(self) -> dict[str, Any]:
        """Implement `StepBatches.get_packing_stats`."""
        return {"kind": "windows", **self.windows.get_packing_stats()}

    def _build_batch(self, numbers: NDArray[np.int64]) -> Batch:
        rows = self.windows.get_rows(numbers)
        batch = build_batch(rows, separate_documents=self.separate_documents, chats=self.chats)
        if self.names_documents:
            identified = self.windows.identify_documents(numbers.flatten(), rows.documents[:, :-1])
            batch = replace(batch, target_documents=build_target_documents(identified))
        return batch if self.masking is None else self.masking.mask_batch(batch, numbers.tolist())


class BucketedStepBatches:
    """Pairs in length buckets. Each bucket is one micro-batch, with its rows assigned to ranks
    round-robin.

    A rank without a row in a small bucket runs a padding row without targets.

    Args:
        pairs: The training split.
        grouping: The buckets of every step.
        make: Builds a batch from pairs.
        data_ranks: Data-parallel ranks.
        data_rank: This rank among them.
        augmentation: Changes the rows of every epoch in another way. None: rows stay as they
            are.
    """

    def __init__(
        self,
        pairs: SequencePairs,
        grouping: LengthBuckets,
        make: MakeBatch,
        *,
        data_ranks: int,
        data_rank: int,
        augmentation: WindowTransform | None = None,
    ) -> None:
        self.pairs = pairs
        self.grouping = grouping
        self.make = make
        self.augmentation = augmentation
        self.data_ranks = data_ranks
        self.data_rank = data_rank

    def get_micro_batches(self, step: int, which: slice = ALL) -> list[Batch]:
        """Implement `StepBatches.get_micro_batches`."""
        groups = self.grouping.get_step_buckets(step)[which]
        epoch = step // self.grouping.steps_per_epoch
        return [
            self._build_batch(group[self.data_rank :: self.data_ranks], epoch) for group in groups
        ]

    def _build_batch(self, rows: NDArray[np.int64], epoch: int) -> Batch:
        batch = self.make(self.pairs, rows.tolist())
        if self.augmentation is None or not len(rows):
            return batch
        return self.augmentation.mask_batch(batch, (epoch * len(self.pairs) + rows).tolist())

    def count_micro_batches(self, step: int) -> int:
        """Implement `StepBatches.count_micro_batches`."""
        return self.grouping.buckets_per_step

    def get_step_metrics(self, step: int) -> dict[str, Any]:
        """Return the tokens of sources and targets, and the share of padding if each bucket is
        one batch.
        """
        stats = compute_padding_stats(
            self.grouping.get_step_buckets(step),
            self.pairs.source_lengths,
            self.pairs.targets.lengths,
        )
        source, target = stats["tokens"]
        return {
            "source_tokens": source,
            "target_tokens": target,
            "padding_share": stats["padding_share"],
        }

    def get_packing_stats(self) -> dict[str, Any]:
        """Return the statistics of the first epoch, as if each bucket were one batch. Every pair
        is in a step.
        """
        groups = [
            group
            for step in range(self.grouping.steps_per_epoch)
            for group in self.grouping.get_step_buckets(step)
        ]
        stats = compute_padding_stats(groups, self.pairs.source_lengths, self.pairs.targets.lengths)
        return {
            "kind": "groups",
            "tokens_per_epoch": sum(stats["tokens"]),
            "sequences_per_epoch": len(self.pairs),
            "padding_tokens_per_epoch": stats["padding"],
            "lost_tokens_per_epoch": 0,
        }


@dataclass(frozen=True)
class StridedStepBatches:
    """Every `ranks`-th micro-batch of a single rank's steps: rank r of R has r, R + r, 2R + r, …

    The sequences of a micro-batch then depend on the config alone, never on the number of ranks.
    `ranks` divides the number of micro-batches.
    """

    whole: StepBatches
    ranks: int
    data_rank: int

    def get_micro_batches(self, step: int, which: slice = ALL) -> list[Batch]:
        """Implement `StepBatches.get_micro_batches`."""
        assert which == ALL, "a strided subset cannot be split again"
        return self.whole.get_micro_batches(step, slice(self.data_rank, None, self.ranks))

    def count_micro_batches(self, step: int) -> int:
        """Implement `StepBatches.count_micro_batches`."""
        return self.whole.count_micro_batches(step) // self.ranks

    def get_step_metrics(self, step: int) -> dict[str, Any]:
        """Implement `StepBatches.get_step_metrics`."""
        return self.whole.get_step_metrics(step)

    def get_packing_stats(self) -> dict[str, Any]:
        """Implement `StepBatches.get_packing_stats`."""
        return self.whole.get_packing_stats()
