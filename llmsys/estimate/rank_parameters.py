"""The parameters of a rank: the stage of a pipeline that it has, its shard of each tensor, and what
it gathers.

Of other systems two stages are looked at: the first, which holds most micro-batches, and the last,
which has the loss. One stage is both. Those of our pipeline are in pipeline_stages.py.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from math import ceil, prod
from typing import NamedTuple

from llmsys.config.expert_sharding import select_shard_dim
from llmsys.config.model import ModelConfig
from llmsys.config.module_tensors import ParameterTensor
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.estimate.model_tensors import list_model_tensors, needs_embedding_copy
from llmsys.estimate.software_profile import MemoryProfile

OUTPUT_WEIGHTS = ("o_proj.weight", "down_proj.weight")
OF_FIRST = frozenset({"embedding", "positions"})
SPLIT_BY_OUTPUTS = {
    "q_proj",
    "k_proj",
    "v_proj",
    "g_proj",
    "q_b_proj",
    "kv_b_proj",
    "gate_proj",
    "up_proj",
}
SPLIT_BY_INPUTS = {"o_proj", "down_proj"}


@dataclass(frozen=True)
class PipelineStage:
    """Blocks of the decoder that a rank has, what stands around them, and micro-batches whose
    activations it holds.

    `waiting` are those that wait while its first block runs a backward pass. `message_buffers` are
    hidden states and gradients of each micro-batch of a step that it has room to receive. `parts`
    are layers with the micro-batches of which they hold activations, where not all hold those of
    `in_flight`.
    """

    layers: frozenset[int]
    first: bool
    last: bool
    in_flight: float
    waiting: float = 0.0
    message_buffers: int = 0
    parts: tuple[tuple[frozenset[int], float], ...] = ()

    @property
    def held_layers(self) -> tuple[tuple[frozenset[int], float], ...]:
        """Layers, and the micro-batches of which they hold activations."""
        return self.parts or ((self.layers, self.in_flight),)

    def count_blocks(self, prefix: str, layers: Collection[int], own: frozenset[int]) -> int:
        """Count the blocks with parameters of a prefix that are in, before or after some of its
        layers.

        Args:
            prefix: prefix of names, such as `blocks.`.
            layers: numbers of these blocks.
            own: layers of one of its parts, or all of them.

        Returns:
            Their number. An encoder is before all layers of a first stage, prediction modules after
            those of a last.
        """
        if prefix == "blocks.":
            return len(own.intersection(layers))
        if prefix.startswith("encoder"):
            return len(layers) if self.first else 0
        ends = (self.layers, *(part for part, _ in self.parts[-1:]))
        return len(layers) if self.last and own in ends else 0

    def iter_parameters(self, model: ModelConfig) -> Iterator[ParameterTensor]:
        """Yield the parameter tensors of this stage.

        Args:
            model: architecture of the whole model.
        """
        for row in list_model_tensors(model):
            # Cells of a recurrent model are of no single layer, and it has one stage.
            if row.name.startswith("blocks.") and row.layers:
                layers = tuple(layer for layer in row.layers if layer in self.layers)
                if layers:
                    yield replace(row, layers=layers)
            elif self._has_parameter(model, row):
                yield row

    def _has_parameter(self, model: ModelConfig, row: ParameterTensor) -> bool:
        tied = self.last and row.name == "embed.weight" and needs_embedding_copy(model)
        first = row.component in OF_FIRST or row.name.startswith(("encoder.", "embedding_norm"))
        return tied or (
            self.first if first and not is_in_block(row) else self.last if not first else self.first
        )


def list_pipeline_stages(model: ModelConfig, system: MemoryProfile) -> list[PipelineStage]:
    """One stage, or the first and the last of several.

    Under 1F1B the first holds as many micro-batches as there are stages; with the blocks of a stage
    in m chunks (p - 1) / m more (Korthikanti 2022, 4.2.3).
    """
    count, layers = system.pipeline, model.num_hidden_layers
    if count == 1:
        return [PipelineStage(frozenset(range(layers)), True, True, 1.0)]
    if system.schedule == "bidirectional":
        return _list_bidirectional_stages(_cut_evenly(layers, system))
    if system.stages == "short_ends":
        return _list_short_ended_stages(_cut_evenly(layers, system), count)
    own = -(-layers // count)
    interleaved = (count - 1) / system.pipeline_chunks if system.pipeline_chunks > 1 else 0.0
    held = system.in_flight or count + interleaved
    last = PipelineStage(
        frozenset(range(layers - own, layers)), False, True, min(held, 1 + interleaved)
    )
    return [PipelineStage(frozenset(range(own)), True, False, held), last]


def _cut_evenly(layers: int, system: MemoryProfile) -> list[range]:
    """Return the layers of every stage; with short ends, embedding and head take the place of a
    layer each.
    """
    stages = system.pipeline * system.pipeline_chunks
    ends = int(system.stages == "short_ends" and layers + 2 >= stages)
    least, rest = divmod(layers + 2 * ends, stages)
    sizes = [least + (stage < rest) - ends * (stage in (0, stages - 1)) for stage in range(stages)]
    return [range(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]


def _list_bidirectional_stages(stages: list[range]) -> list[PipelineStage]:
    """Return the first rank, which has both ends, and one in the middle: stage r and its
    counterpart from the end.

    Stage r holds as many micro-batches as under 1F1B, so that a rank holds one more than there are
    ranks.
    """
    ranks, found = len(stages), []
    for rank in sorted({0, ranks // 2 - 1}):
        early, late = frozenset(stages[rank]), frozenset(stages[-1 - rank])
        parts = ((early, float(ranks - rank)), (late, rank + 1.0))
        found.append(PipelineStage(early | late, rank == 0, rank == 0, ranks + 1.0, parts=parts))
    return found


def _list_short_ended_stages(stages: list[range], ranks: int) -> list[PipelineStage]:
    """Return the first two ranks and the last one; the second is as full as the first without
    the embedding.
    """
    # few programs
    from llmsys.config.pipeline import InterleavedScheduleConfig, OneForwardOneBackwardConfig

    chunks, found = len(stages) // ranks, []
    schedule = (
        InterleavedScheduleConfig(stages_per_rank=chunks)
        if chunks > 1
        else OneForwardOneBackwardConfig()
    )
    for rank in sorted({0, 1, ranks - 1}):
        own = stages[rank::ranks]
        layers = frozenset(chain(*own))
        # Once a pipeline is full, more micro-batches hold no more.
        held, _ = schedule.count_held_layers(ranks, rank, 2 * ranks, [len(stage) for stage in own])
        if layers:  # a rank with the embedding or the head alone is never the fullest
            found.append(PipelineStage(layers, rank == 0, rank == ranks - 1, held / len(layers)))
    return found


def count_tensor_shards(row: ParameterTensor, layout: ParallelLayout, model: ModelConfig) -> int:
    """Return over how many tensor ranks a row inside a block is split
    (llmsys/parallel/tensor_parallel.py); experts are dealt.

    Args:
        row: the parameters.
        layout: resolved layout.
        model: architecture of the whole model.

    Returns:
        The number of ranks; 1 where each has all of it.
    """
    part = row.name.rpartition(".")[0].rpartition(".")[2]
    if row.is_routed or not is_in_block(row) or part not in SPLIT_BY_OUTPUTS | SPLIT_BY_INPUTS:
        return 1
    if part in SPLIT_BY_INPUTS and row.name.endswith("bias"):
        return 1
    # key-value heads that the ranks do not divide stay whole on each
    whole_heads = part in ("k_proj", "v_proj") and model.num_key_value_heads % layout.tensor
    return 1 if whole_heads else layout.tensor


def is_in_block(row: ParameterTensor) -> bool:
    """Return whether a row belongs to a block, which FSDP gathers by itself; the rest is
    gathered once.

    Args:
        row: the parameters.

    Returns:
        True for blocks of all stacks and of prediction modules.
    """
    return "blocks." in row.name or ".block." in row.name


def count_full_elements(row: ParameterTensor, layout: ParallelLayout, model: ModelConfig) -> int:
    """Elements of one copy that a rank computes with: its experts, its part of a matrix split by
    tensor.
    """
    return ceil(
        row.elements_per_copy
        / (layout.expert if row.is_routed else count_tensor_shards(row, layout, model))
    )


def count_local_elements(row: ParameterTensor, layout: ParallelLayout, model: ModelConfig) -> int:
    """Count the elements of one copy on rank 0: its part of the first dim, or of another one of
    experts (`select_shard_dim`).

    Parameters outside of blocks are sharded over all ranks of a copy, those inside over the ranks
    that do not split them by tensor.

    Args:
        row: the parameters.
        layout: resolved layout.
        model: architecture of the whole model.

    Returns:
        Elements of the longest shard.
    """
    shards = count_shards(row, layout)
    if row.is_routed:
        shape, dim = _find_expert_shard_dim(row, layout)
        return ceil(shape[dim] / shards) * prod(shape) // shape[dim]
    parts = count_tensor_shards(row, layout, model)
    if row.name.rpartition(".")[0].rpartition(".")[2] in SPLIT_BY_INPUTS:
        return ceil(ceil(row.shape[0] / shards) * prod(row.shape[1:]) / parts)
    # the first dim is split twice
    return ceil(ceil(row.shape[0] / parts) / shards) * prod(row.shape[1:])


def count_shards(row: ParameterTensor, layout: ParallelLayout) -> int:
    """Count the ranks over which FSDP shards what `count_full_elements` counts.

    Args:
        row: the parameters.
        layout: resolved layout.

    Returns:
        The number of ranks.
    """
    if row.is_routed:
        return layout.ranks_per_replica // layout.expert
    return layout.shard * layout.context if is_in_block(row) else layout.ranks_per_replica


def is_split_inside(row: ParameterTensor, layout: ParallelLayout) -> bool:
    """Return whether FSDP shards a tensor along another dim than the first, which costs it a
    copy.
    """
    return row.is_routed and _find_expert_shard_dim(row, layout)[1] > 0


def _find_expert_shard_dim(
    row: ParameterTensor, layout: ParallelLayout
) -> tuple[tuple[int, ...], int]:
    """Return the shape of a rank's experts, and the dim along which it is sharded."""
    shape = (row.shape[0] // layout.expert, *row.shape[1:])
    return shape, select_shard_dim(shape, count_shards(row, layout))


def count_branch_elements(
    rows: list[ParameterTensor],
    block: tuple[str, int],
    branches: tuple[int, int],
    layout: ParallelLayout,
    model: ModelConfig,
) -> int:
    """Count the weights of a block that have gradients where the backward has come to a branch.

    These are the weights of the branches after it, and its output projection. `block` is the prefix
    of its names and its number, `branches` the first one that counts whole and how many there are.
    """
    (prefix, layer), (first, count) = block, branches
    return sum(
        count_full_elements(row, layout, model)
        for row in rows
        if row.name.startswith(prefix)
        and layer in row.layers
        and _find_branch(model, row, count) >= first - row.name.endswith(OUTPUT_WEIGHTS)
    )


def _find_branch(model: ModelConfig, row: ParameterTensor, num_branches: int) -> int:
    """Return the number of the branch of a block that a parameter belongs to."""
    if ".feed_forward" in row.name:
        return num_branches - 1
    is_last = (
        ".cross_attention" in row.name
        or model.family != "encoder_decoder"
        or row.name.startswith("encoder.")
    )
    return num_branches - (2 if is_last else 3)


class BlockWeights(NamedTuple):
    """Elements of a block: in use, as they travel, split inside (so copied twice), and of
    experts that travel apart.
    """

    full: int = 0
    travelling: int = 0
    staged: int = 0
    experts: int = 0

    def count_reduced(self, follows: bool, begins: bool) -> int:
        """Count the elements whose gradients are reduced while a block is in its backward.

        FSDP reduces one unit at a time: the block that this one `follows`, or once its feed-forward
        is over, its own experts.
        """
        return (
            self.experts
            if self.experts and not begins
            else follows * (self.travelling - self.experts)
        )


@dataclass(frozen=True)
class GatheredWeights:
    """Elements that this rank computes with.

    Attributes:
        root: outside of blocks.
        head: matrix of the head.
        block: the largest block, or the one of `select_block`.
        blocks: all blocks.
        matrices: all of them.
        root_buffer: `root` as it travels, each tensor padded to equal shards.
        by_block: each block, by prefix of its names and number.
    """

    root: int
    head: int
    block: BlockWeights
    blocks: int
    matrices: int
    root_buffer: int
    by_block: dict[tuple[str, int], BlockWeights] = field(repr=False)

    def select_block(self, prefix: str, layer: int) -> "GatheredWeights":
        """Return the same weights where this block is in use."""
        return replace(self, block=self.by_block.get((prefix, layer), self.block))


def count_gathered_weights(
    model: ModelConfig, layout: ParallelLayout, rows: list[ParameterTensor], system: MemoryProfile
) -> GatheredWeights:
    """Of the rows of one stage of the model. Head and embedding are whole, or split by columns
    of the vocabulary.
    """
    columns = layout.tensor if system.head == "columns" else 1
    outside = [row for row in rows if not is_in_block(row)]
    root = sum(-(-row.num_elements // columns) for row in outside)
    travelling = (
        sum(count_local_elements(row, layout, model) * count_shards(row, layout) for row in outside)
        // columns
    )
    head = max(
        (
            -(-row.elements_per_copy // columns)
            for row in rows
            if row.name in ("head.weight", "embed.weight")
        ),
        default=0,
    )
    sums: dict[tuple[str, int], list[int]] = {}
    for row in filter(is_in_block, rows):
        full = count_full_elements(row, layout, model)
        padded = max(full, count_local_elements(row, layout, model) * count_shards(row, layout))
        staged = full if is_split_inside(row, layout) else 0
        experts = padded if row.is_routed and layout.expert * layout.tensor > 1 else 0
        prefix = row.name.partition("{i}")[0]
        for layer in row.layers:
            one = sums.setdefault((prefix, layer), [0, 0, 0, 0])
            one[0] += full
            one[1] += padded
            one[2] += staged
            one[3] += experts
    sizes = {place: BlockWeights(*one) for place, one in sums.items()}
    blocks = sum(one.full for one in sizes.values())
    largest = max(sizes.values(), default=BlockWeights())
    return GatheredWeights(root, head, largest, blocks, root + blocks, max(root, travelling), sizes)
