"""The parameters of a rank: the stage of a pipeline that it has, its shard of each tensor, and what it gathers.

Of other systems two stages are looked at: the first, which holds most micro-batches, and the last, which has the loss.
One stage is both. Those of our pipeline are in pipeline_stages.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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
SPLIT_BY_OUTPUTS = {"q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj"}
SPLIT_BY_INPUTS = {"o_proj", "down_proj"}


@dataclass(frozen=True)
class PipelineStage:
    """Blocks of the decoder that a rank has, what stands around them, and micro-batches whose activations it holds.

    `waiting` are those that wait while its first block runs a backward pass. `message_buffers` are hidden states and
    gradients of each micro-batch of a step that it has room to receive.
    """

    layers: frozenset[int]
    first: bool
    last: bool
    in_flight: float
    waiting: float = 0.0
    message_buffers: int = 0

    def iter_parameters(self, model: ModelConfig) -> Iterator[ParameterTensor]:
        """The parameter tensors of this stage."""
        for row in list_model_tensors(model):
            if row.name.startswith("blocks."):
                layers = tuple(layer for layer in row.layers if layer in self.layers)
                if layers:
                    yield replace(row, layers=layers)
            elif self._has_parameter(model, row):
                yield row

    def _has_parameter(self, model: ModelConfig, row: ParameterTensor) -> bool:
        tied = self.last and row.name == "embed.weight" and needs_embedding_copy(model)
        first = row.component in OF_FIRST or row.name.startswith(("encoder.", "embedding_norm"))
        return tied or (self.first if first and not is_in_block(row) else self.last if not first else self.first)


def list_pipeline_stages(model: ModelConfig, system: MemoryProfile) -> list[PipelineStage]:
    """One stage, or the first and the last of several.

    Under 1F1B the first holds as many micro-batches as there are stages; with the blocks of a stage in m chunks
    (p - 1) / m more (Korthikanti 2022, 4.2.3).
    """
    count, layers = system.pipeline, model.num_hidden_layers
    if count == 1:
        return [PipelineStage(frozenset(range(layers)), True, True, 1.0)]
    own = -(-layers // count)
    interleaved = (count - 1) / system.pipeline_chunks if system.pipeline_chunks > 1 else 0.0
    held = system.in_flight or count + interleaved
    last = PipelineStage(frozenset(range(layers - own, layers)), False, True, min(held, 1 + interleaved))
    return [PipelineStage(frozenset(range(own)), True, False, held), last]


def count_tensor_shards(row: ParameterTensor, layout: ParallelLayout, model: ModelConfig) -> int:
    """Over how many tensor ranks a row inside a block is split (llmsys/parallel/tensor_parallel.py); experts are
    dealt.
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
    """Return whether a row belongs to a block, which FSDP gathers by itself; the rest is gathered once."""
    return "blocks." in row.name or ".block." in row.name


def count_full_elements(row: ParameterTensor, layout: ParallelLayout, model: ModelConfig) -> int:
    """Elements of one copy that a rank computes with: its experts, its part of a matrix split by tensor."""
    return ceil(row.elements_per_copy / (layout.expert if row.is_routed else count_tensor_shards(row, layout, model)))


def count_local_elements(row: ParameterTensor, layout: ParallelLayout, model: ModelConfig) -> int:
    """Elements of one copy on rank 0: its part of the first dim, or of another one of experts (`select_shard_dim`).

    Parameters outside of blocks are sharded over all ranks of a copy, those inside over the ranks that do not split
    them by tensor.
    """
    shards = count_shards(row, layout)
    if row.is_routed:
        shape, dim = _find_expert_shard_dim(row, layout)
        return ceil(shape[dim] / shards) * prod(shape) // shape[dim]
    parts = count_tensor_shards(row, layout, model)
    if row.name.rpartition(".")[0].rpartition(".")[2] in SPLIT_BY_INPUTS:
        return ceil(ceil(row.shape[0] / shards) * prod(row.shape[1:]) / parts)
    return ceil(ceil(row.shape[0] / parts) / shards) * prod(row.shape[1:])  # the first dim is split twice


def count_shards(row: ParameterTensor, layout: ParallelLayout) -> int:
    """Count the ranks over which FSDP shards what `count_full_elements` counts."""
    if row.is_routed:
        return layout.ranks_per_replica // layout.expert
    return layout.shard * layout.context if is_in_block(row) else layout.ranks_per_replica


def is_split_inside(row: ParameterTensor, layout: ParallelLayout) -> bool:
    """Return whether FSDP shards a tensor along another dim than the first, which costs it a copy."""
    return row.is_routed and _find_expert_shard_dim(row, layout)[1] > 0


def _find_expert_shard_dim(row: ParameterTensor, layout: ParallelLayout) -> tuple[tuple[int, ...], int]:
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

    These are the weights of the branches after it, and its output projection. `block` is the prefix of its names and
    its number, `branches` the first one that counts whole and how many there are.
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
    is_last = ".cross_attention" in row.name or model.family != "encoder_decoder" or row.name.startswith("encoder.")
    return num_branches - (2 if is_last else 3)


class BlockWeights(NamedTuple):
    """Elements of a block: in use, as they travel, split inside (so copied twice), and of experts that travel apart."""

    full: int = 0
    travelling: int = 0
    staged: int = 0
    experts: int = 0

    def count_reduced(self, follows: bool, begins: bool) -> int:
        """Count the elements whose gradients are reduced while a block is in its backward.

        FSDP reduces one unit at a time: the block that this one `follows`, or once its feed-forward is over, its own
        experts.
        """
        return self.experts if self.experts and not begins else follows * (self.travelling - self.experts)


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
    """Of the rows of one stage of the model. Head and embedding are whole, or split by columns of the vocabulary."""
    columns = layout.tensor if system.head == "columns" else 1
    outside = [row for row in rows if not is_in_block(row)]
    root = sum(-(-row.num_elements // columns) for row in outside)
    travelling = sum(count_local_elements(row, layout, model) * count_shards(row, layout) for row in outside) // columns
    head = max(
        (-(-row.elements_per_copy // columns) for row in rows if row.name in ("head.weight", "embed.weight")), default=0
    )
    sizes: dict[tuple[str, int], BlockWeights] = {}
    for row in filter(is_in_block, rows):
        full = count_full_elements(row, layout, model)
        padded = max(full, count_local_elements(row, layout, model) * count_shards(row, layout))
        staged = full if is_split_inside(row, layout) else 0
        experts = padded if row.is_routed and layout.expert * layout.tensor > 1 else 0
        for layer in row.layers:
            place = (row.name.partition("{i}")[0], layer)
            one = sizes.get(place, BlockWeights())
            sizes[place] = BlockWeights(one[0] + full, one[1] + padded, one[2] + staged, one[3] + experts)
    blocks = sum(one.full for one in sizes.values())
    largest = max(sizes.values(), default=BlockWeights())
    return GatheredWeights(root, head, largest, blocks, root + blocks, max(root, travelling), sizes)
