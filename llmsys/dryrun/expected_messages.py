"""The messages that a rank is expected to take part in, and what they are derived from.

Invariants:
- What has no expectation is named, never passed over.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from llmsys.config.expert_sharding import select_shard_dim
from llmsys.config.module_tensors import ParameterTensor
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.dryrun.collective_log import Event, Message
from llmsys.dryrun.expected_passes import Pass
from llmsys.dryrun.rank_groups import Axis, RankGroups
from llmsys.estimate.rank_parameters import (
    SPLIT_BY_INPUTS,
    PipelineStage,
    count_tensor_shards,
    is_in_block,
)

DTYPES = {"fp32": ("float32", 4), "bf16": ("bfloat16", 2), "fp16": ("float16", 2)}


def find_shard_axis(row: ParameterTensor) -> Axis:
    """Return the axis over which FSDP shards a parameter.

    Args:
        row: The parameter.

    Returns:
        Of experts the ranks that have the same ones, in blocks those that do not split matrices,
        else all of a replica.
    """
    return "expert_fsdp" if row.is_routed else "fsdp" if is_in_block(row) else "replica"


@dataclass(frozen=True)
class RankContext:
    """All that the messages of a rank follow from.

    Attributes:
        config: The config, with its precision and micro-batch resolved.
        layout: The resolved layout.
        rank: The rank.
        part: Its layers and ends of the model.
        stages: The layers of each of its stages.
        passes: Its passes in their order.
        sequences: Rows of a micro-batch.
        length: Positions of a row, of an encoder-decoder those of its decoder.
        documents: Lengths of documents, repeated to fill a row; empty: one document.
        expert_skew: Load of this rank's experts over the mean.
    """

    config: RunConfig
    layout: ParallelLayout
    rank: int
    part: PipelineStage
    stages: tuple[range, ...]
    passes: list[Pass]
    sequences: int
    length: int
    documents: tuple[int, ...]
    expert_skew: float

    @cached_property
    def rows(self) -> list[ParameterTensor]:
        """Parameters of this rank's stages."""
        return [*self.part.iter_parameters(self.config.model)]

    @property
    def dtype(self) -> str:
        """Number type of gathered weights and of activations."""
        return DTYPES[self.config.train.resolved_precision][0]

    @property
    def itemsize(self) -> int:
        """Bytes of an element of `dtype`."""
        return DTYPES[self.config.train.resolved_precision][1]

    def list_ranks(self, axis: Axis) -> tuple[int, ...]:
        """Return the ranks of this rank's group along an axis."""
        return RankGroups(self.layout, self.rank).list_ranks(axis)

    def is_partial(self, row: ParameterTensor) -> bool:
        """Return whether a parameter of a block is whole on every tensor rank, each of which has
        the gradient of its own positions or heads.
        """
        whole = count_tensor_shards(row, self.layout, self.config.model) == 1
        return is_in_block(row) and not row.is_routed and whole

    def count_shard(self, row: ParameterTensor) -> int:
        """Return the elements of one copy that this rank holds: chunks of the first dim, or of
        another one of experts; the last ones are shorter.
        """
        layout = self.layout
        parts = count_tensor_shards(row, layout, self.config.model)
        shape = [*row.shape]
        ranks = self.list_ranks(find_shard_axis(row))
        dim = 0
        if row.is_routed:
            shape[0] //= layout.expert
            dim = select_shard_dim(shape, len(ranks))
        else:
            is_by_inputs = row.name.rpartition(".")[0].rpartition(".")[2] in SPLIT_BY_INPUTS
            shape[1 if is_by_inputs and parts > 1 else 0] //= parts
        longest = -(-shape[dim] // len(ranks))
        own = max(0, min(longest, shape[dim] - ranks.index(self.rank) * longest))
        return prod(shape) // shape[dim] * own

    def find_stage(self, layer: int | None) -> int:
        """Return the stage of this rank, counted among its own, that has a layer; for what is
        outside of the decoder's blocks its first or its last.
        """
        if layer is None:
            return 0 if self.part.first else len(self.stages) - 1
        return next(number for number, layers in enumerate(self.stages) if layer in layers)


@dataclass
class Expectation:
    """Expected messages.

    Attributes:
        messages: Calls by part of the step and message.
        sums: Bytes by part of the step, operation, ranks and dtype of messages that may be cut in
            any number of pieces.
        unchecked: Names of what has no expectation.
        open_operations: Operations and ranks that are not compared, since they have messages
            without an expectation.
        open_parts: Parts of a step that are not compared.
        is_open: Nothing is compared.
        events: Messages of rings in their order.
    """

    messages: Counter[tuple[str, Message]] = field(default_factory=Counter)
    sums: Counter[tuple[str, str, tuple[int, ...], str]] = field(default_factory=Counter)
    unchecked: list[str] = field(default_factory=list)
    open_operations: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    open_parts: set[str] = field(default_factory=set)
    is_open: bool = False
    events: list[Event] = field(default_factory=list)

    def add(self, part: str, message: Message, count: int = 1) -> None:
        """Expect a message; none where a group has one rank and data parallelism sends nothing.

        Args:
            part: Part of the step.
            message: The message.
            count: Calls.
        """
        if len(message.ranks) > 1 and count:
            self.messages[part, message] += count

    def add_sum(
        self, part: str, operation: str, ranks: tuple[int, ...], dtype: str, size: int
    ) -> None:
        """Expect bytes of an operation, in any number of calls.

        Args:
            part: Part of the step.
            operation: Such as all_gather.
            ranks: Ranks that take part.
            dtype: Of what travels.
            size: Bytes of the full-size side.
        """
        if len(ranks) > 1 and size:
            self.sums[part, operation, ranks, dtype] += size

    def leave_unchecked(
        self,
        name: str,
        *,
        operations: tuple[str, ...] = (),
        ranks: tuple[int, ...] = (),
        part: str = "",
        all_messages: bool = False,
    ) -> None:
        """Name collectives without an expectation, and do not compare what they may be among.

        Args:
            name: Whose collectives they are.
            operations: Their operations, over `ranks`.
            ranks: Ranks that take part.
            part: Part of the step that has them.
            all_messages: They may be any.
        """
        self.unchecked.append(name)
        self.open_operations |= {(operation, ranks) for operation in operations}
        self.open_parts |= {part} if part else set()
        self.is_open |= all_messages
