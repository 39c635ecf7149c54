"""What a step holds: its micro-batches for one data rank, of windows or of groups of similar length.

A step's content is a function of data, seed and step; the number of ranks changes only who handles which row. Every
rank has the same number of micro-batches, since the ranks meet in each of them.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from llmsys.data.batch import Batch, make_batch
from llmsys.data.grouping import Grouping, counts
from llmsys.data.masking import Masking
from llmsys.data.packing import PackedDocuments
from llmsys.data.pairs import MakeBatch, Pairs
from llmsys.errors import ConfigError


class Steps(Protocol):
    """The micro-batches of each step for one data rank."""

    micro_batches: int
    """In each step."""

    def step(self, step: int) -> list[Batch]:
        """The micro-batches of step `step`, counted from 0."""
        ...

    def describe(self, step: int) -> dict[str, Any]:
        """Numbers about the whole step, over all ranks, for the log."""
        ...


@dataclass(frozen=True)
class StepPlan:
    """How the sequences of a step are dealt to data ranks and micro-batches. Sizes are counted in sequences."""

    sequences: int
    data_ranks: int
    data_rank: int
    micro_sequences: int

    def __post_init__(self) -> None:
        """Refuse what does not divide, saying what would."""
        if self.sequences % self.data_ranks:
            near = max(1, round(self.sequences / self.data_ranks)) * self.data_ranks
            raise ConfigError(
                f"batch.sequences={self.sequences} cannot be dealt evenly to {self.data_ranks} data ranks. "
                f"Use batch.sequences={near} or another number of processes."
            )
        if self.per_rank % self.micro_sequences:
            legal = [size for size in range(1, self.per_rank + 1) if self.per_rank % size == 0]
            raise ConfigError(
                f"batch.micro_sequences={self.micro_sequences} does not divide the {self.per_rank} sequences of a "
                f"rank. Use one of {', '.join(map(str, legal))}."
            )

    @property
    def per_rank(self) -> int:
        """Sequences of one rank in one step."""
        return self.sequences // self.data_ranks

    @property
    def micro_batches(self) -> int:
        """Forward passes of one rank in one step."""
        return self.per_rank // self.micro_sequences

    def dealt(self, step: int) -> list[range]:
        """The sequence numbers of each micro-batch of this rank in step `step`."""
        first = step * self.sequences + self.data_rank * self.per_rank
        starts = range(first, first + self.per_rank, self.micro_sequences)
        return [range(start, start + self.micro_sequences) for start in starts]


class WindowSteps:
    """Windows over packed documents: the sequences of step n are `n * sequences .. (n + 1) * sequences`.

    With `masking`, some tokens of each window are to be predicted from all others; else each token from those before.
    """

    def __init__(
        self, packed: PackedDocuments, plan: StepPlan, *, separate_documents: bool, masking: Masking | None = None
    ) -> None:
        self.packed, self.plan, self.masking = packed, plan, masking
        self.separate_documents = separate_documents
        self.micro_batches = plan.micro_batches

    def step(self, step: int) -> list[Batch]:
        """See Steps."""
        return [self._batch(numbers) for numbers in self.plan.dealt(step)]

    def describe(self, step: int) -> dict[str, Any]:
        """See Steps. Windows are full: there is nothing to tell."""
        return {}

    def _batch(self, numbers: range) -> Batch:
        windows = [self.packed.window(index) for index in numbers]
        batch = make_batch(windows, separate_documents=self.separate_documents)
        return batch if self.masking is None else self.masking.masked(batch, numbers)


class GroupedSteps:
    """Pairs in groups of similar length; each group is one micro-batch, its rows dealt over the ranks in turn.

    A rank that gets no row of a small group has a row that counts for nothing there.
    """

    def __init__(self, pairs: Pairs, grouping: Grouping, make: MakeBatch, *, data_ranks: int, data_rank: int) -> None:
        self.pairs, self.grouping, self.make = pairs, grouping, make
        self.data_ranks, self.data_rank = data_ranks, data_rank
        self.micro_batches = grouping.groups_per_step

    def step(self, step: int) -> list[Batch]:
        """See Steps."""
        return [
            self.make(self.pairs, group[self.data_rank :: self.data_ranks].tolist())
            for group in self.grouping.step(step)
        ]

    def describe(self, step: int) -> dict[str, Any]:
        """See Steps: tokens of sources and targets, and what padding takes if each group is one batch."""
        found = counts(self.grouping.step(step), self.pairs.sources.lengths, self.pairs.targets.lengths)
        source, target = found["tokens"]
        return {"source_tokens": source, "target_tokens": target, "padding_share": found["padding_share"]}
