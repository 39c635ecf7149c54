"""Bytes of training state on the fullest rank: weights, fp32 masters, gradients, moments, as the engine splits them.

State lives as long as the run on the device, or with offload in host memory; `peak_memory` decides. Saved tensors of a
forward pass are in activation_memory.py.

`GatheredWeights` are the temporary full weights and gradients of a rank. FSDP gathers the block in use and the next
one, and everything outside of blocks for a whole step; its gradients are unsharded, first in the compute dtype and then
in float32, until they are reduced. DDP casts its master weights for every matmul. ZeRO sums gradients in buckets."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod
from typing import assert_never

from llmsys.config.engine import AccelerateEngineConfig, DeepSpeedEngineConfig, TorchEngineConfig
from llmsys.config.expert_sharding import select_shard_dim
from llmsys.config.model import ModelConfig
from llmsys.config.module_tensors import ParameterTensor
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.config.run_constraints import is_replicated
from llmsys.estimate.memory_timeline import MemoryItem
from llmsys.estimate.model_tensors import list_model_tensors
from llmsys.estimate.software_profile import MemoryProfile

BUCKET = 1 << 28  # elements of one bucket of ZeRO's reductions, llmsys/engine/deepspeed_setup.py
LIVE = 10**9  # elements that ZeRO-3 leaves gathered when they are soon used again (stage3_max_live_parameters)


@dataclass(frozen=True)
class GatheredWeights:
    """Elements that this rank computes with: `root` outside of blocks, `block` the largest block, `blocks` all."""

    root: int
    head: int
    block: int
    blocks: int
    matrices: int


def count_gathered_weights(
    config: RunConfig, layout: ParallelLayout, rows: list[ParameterTensor], system: MemoryProfile
) -> GatheredWeights:
    """Of the rows of one stage of the model. Head and embedding are whole, or split by columns of the vocabulary."""
    model, columns = config.model, layout.tensor if system.head == "columns" else 1
    root = sum(-(-row.num_elements // columns) for row in rows if not is_in_block(row))
    head = max(
        (-(-row.elements_per_copy // columns) for row in rows if row.name in ("head.weight", "embed.weight")), default=0
    )
    sizes: dict[tuple[str, int], int] = {}
    for row in rows:
        for layer in row.layers if is_in_block(row) else ():
            place = (row.name.partition("{i}")[0], layer)
            sizes[place] = sizes.get(place, 0) + count_full_elements(row, layout, model)
    return GatheredWeights(root, head, max(sizes.values(), default=0), sum(sizes.values()), root + sum(sizes.values()))


def list_gathered_weights(
    config: RunConfig, whole: GatheredWeights, system: MemoryProfile, *, casts_kept: bool
) -> list[MemoryItem]:
    """Return the full weights of a forward or backward pass. `casts_kept`: autograd saves the casts of all blocks."""
    size, engine = get_compute_dtype_bytes(config), config.engine
    stored = 1 if system.matmul_dtype == "fp8" else size  # 8-bit weights are gathered in 8 bits
    if system.weights == "whole":
        return [MemoryItem("whole weights", size * whole.root + stored * whole.blocks)]
    match engine:
        case TorchEngineConfig(data_parallel="fsdp"):
            root = MemoryItem("gathered weights outside of blocks", size * whole.root)
            return [root, MemoryItem("gathered weights of two blocks", 2 * stored * whole.block)]
        case DeepSpeedEngineConfig(zero_stage=3):
            return [MemoryItem("gathered weights", size * min(whole.matrices, max(LIVE, whole.root + 2 * whole.block)))]
        case DeepSpeedEngineConfig(zero_stage=1 | 2):
            return []  # weights in the compute dtype are part of the state
        case TorchEngineConfig() | DeepSpeedEngineConfig() | AccelerateEngineConfig():
            cast = whole.root + (whole.blocks if casts_kept else whole.block)
            return [] if size == FP32 else [MemoryItem("weights cast for matmuls", size * cast)]
        case unreachable:
            assert_never(unreachable)


def compute_gradient_buckets(config: RunConfig, whole: GatheredWeights) -> MemoryItem:
    """Copies of gradients that DDP sums over the ranks, or ZeRO-0 a bucket at a time; they stay for the whole run."""
    match config.engine:
        case AccelerateEngineConfig() | TorchEngineConfig(data_parallel="ddp"):
            elements = whole.matrices
        case DeepSpeedEngineConfig(zero_stage=0):
            elements = min(BUCKET, whole.matrices)
        case TorchEngineConfig() | DeepSpeedEngineConfig():
            elements = 0  # the buckets of sharded gradients live during the backward only
        case unreachable:
            assert_never(unreachable)
    return MemoryItem("buckets of gradients", FP32 * elements)


def list_gradients_in_flight(config: RunConfig, whole: GatheredWeights, elements: int) -> list[MemoryItem]:
    """Gradients of one unit of `elements` while they are summed over the ranks."""
    size = get_compute_dtype_bytes(config)
    own = MemoryItem("gradients in the compute dtype", size * elements)
    match config.engine:
        case DeepSpeedEngineConfig(zero_stage=1 | 2 | 3):
            bucket = min(BUCKET, max(whole.matrices, 1))
            return [own, MemoryItem("buckets of gradients", (size + FP32) * bucket)]
        case TorchEngineConfig(data_parallel="fsdp"):
            return [own, MemoryItem("float32 gradients before reduction", FP32 * elements)]
        case TorchEngineConfig() | DeepSpeedEngineConfig() | AccelerateEngineConfig():
            return [own]
        case unreachable:
            assert_never(unreachable)


FP32 = 4  # bytes of one value
SPLIT_BY_OUTPUTS = {"q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj"}
SPLIT_BY_INPUTS = {"o_proj", "down_proj"}


@dataclass(frozen=True)
class StateBytes:
    """Bytes on rank 0, which never holds less than another rank. `weights` are copies beside the masters."""

    weights: int
    masters: int
    gradients: int
    moments: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.masters + self.gradients + self.moments


def compute_state_bytes(
    config: RunConfig, layout: ParallelLayout, rows: list[ParameterTensor] | None = None
) -> StateBytes:
    """State of the configured engine under a resolved layout; of `rows` only, where a stage has a part of the model."""
    rows = list_model_tensors(config.model) if rows is None else rows
    match config.engine:
        case DeepSpeedEngineConfig(zero_stage=stage):
            return _compute_zero_state_bytes(config, layout, stage, rows)
        case TorchEngineConfig() | AccelerateEngineConfig():
            # FSDP's shards are the fp32 masters; full weights exist only while they are used.
            count = count_local_elements if config.engine.shards_weights else count_full_elements
            sizes = [(row, count(row, layout, config.model) * row.num_copies) for row in rows]
            masters = FP32 * sum(size for _, size in sizes)
            moments = round(sum(_compute_moment_bytes(config, row) * size for row, size in sizes))
            return StateBytes(weights=0, masters=masters, gradients=masters, moments=moments)
        case unreachable:
            assert_never(unreachable)


def resolve_planned_layout(config: RunConfig) -> ParallelLayout:
    """Resolve the layout for the processes that the config starts.

    Args:
        config: resolved config of a run.

    Returns:
        The layout; a fixed `shard`, or DDP's copies, give the number of ranks.
    """
    layout, fixed = config.layout, 0
    if is_replicated(config.engine):
        fixed = layout.replicate if layout.replicate > 1 else 0
    elif layout.shard != -1:
        fixed = layout.world_size
    return config.resolve_layout(fixed or max(1, config.launch.processes))


def get_compute_dtype_bytes(config: RunConfig) -> int:
    """Bytes of one weight or activation inside products."""
    return FP32 if config.train.resolved_precision == "fp32" else 2


def _count_moments(config: RunConfig, row: ParameterTensor) -> int:
    return config.optimizer.count_moments(row.name, len(row.shape))


def _compute_moment_bytes(config: RunConfig, row: ParameterTensor) -> float:
    """Return the bytes of all moments of one element."""
    return _count_moments(config, row) * config.optimizer.compute_moment_bytes(row.shape)


def compute_offloaded_bytes(config: RunConfig, layout: ParallelLayout) -> int:
    """Compute the bytes that a rank keeps in host memory.

    Args:
        config: resolved config of a run.
        layout: resolved layout, as `ParallelLayout.resolve` returns it.

    Returns:
        With cpu_offload the masters and moments, under FSDP the gradients too; else 0.
    """
    if getattr(config.engine, "cpu_offload", "none") == "none":
        return 0
    state = compute_state_bytes(config, layout)
    return state.masters + state.moments + (state.gradients if config.engine.offloads_gradients else 0)


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
    if row.is_routed:
        shards = layout.ranks_per_replica // layout.expert
        shape = (row.shape[0] // layout.expert, *row.shape[1:])
        dim = select_shard_dim(shape, shards)
        return ceil(shape[dim] / shards) * prod(shape) // shape[dim]
    parts = count_tensor_shards(row, layout, model)
    ranks = layout.shard * layout.context if is_in_block(row) else layout.ranks_per_replica
    if row.name.rpartition(".")[0].rpartition(".")[2] in SPLIT_BY_INPUTS:
        return ceil(ceil(row.shape[0] / ranks) * prod(row.shape[1:]) / parts)
    return ceil(ceil(row.shape[0] / parts) / ranks) * prod(row.shape[1:])  # the first dim is split twice


def _compute_zero_state_bytes(
    config: RunConfig, layout: ParallelLayout, stage: int, rows: list[ParameterTensor]
) -> StateBytes:
    """ZeRO flattens each parameter group, pads it to twice the number of ranks, and splits it evenly over them.

    Groups: with and without weight decay; experts, embeddings, the rest. Dealt experts are split over their own
    replicas only. Stage 0 splits nothing, and its parameters are the fp32 masters themselves.
    """
    whole = sum(count_full_elements(row, layout, config.model) * row.num_copies for row in rows)
    groups = list(_iter_parameter_groups(config, layout, rows))
    split = sum(_compute_padded_share(elements, ranks) for elements, ranks, _ in groups)
    size = get_compute_dtype_bytes(config)
    weights = 0 if stage == 0 else size * (split if stage == 3 else whole)
    share = split if stage >= 1 else whole
    moments = sum(
        count * (_compute_padded_share(elements, ranks) if stage >= 1 else elements)
        for elements, ranks, count in groups
    )
    return StateBytes(weights, FP32 * share, FP32 * (split if stage >= 2 else whole), FP32 * moments)


def _iter_parameter_groups(
    config: RunConfig, layout: ParallelLayout, rows: list[ParameterTensor]
) -> Iterator[tuple[int, int, int]]:
    """Yield the elements of each parameter group on a rank, the ranks it is sharded over, and moments per element."""
    groups: dict[tuple[str, bool, int], int] = {}
    for row in rows:
        role = "experts" if row.is_routed else "embedding" if row.name in ("embed.weight", "head.weight") else "dense"
        # stacked biases of experts have two dims, and do not decay
        decays = len(row.shape) >= 2 and not row.name.endswith("_bias")
        key = (role, decays, _count_moments(config, row))
        groups[key] = groups.get(key, 0) + count_full_elements(row, layout, config.model) * row.num_copies
    for (role, _, moments), elements in groups.items():
        sharded = layout.expert if role == "experts" else 1
        yield elements, max(1, layout.world_size // sharded), moments


def _compute_padded_share(elements: int, ranks: int) -> int:
    return -(-elements // (2 * ranks)) * 2
