"""Bytes of training state on the fullest rank: weights, fp32 masters, gradients, moments, as the
engine splits them.

State lives as long as the run on the device, or with offload in host memory; `peak_memory` decides.
Saved tensors of a forward pass are in activation_memory.py.

`GatheredWeights` are the temporary full weights and gradients of a rank. FSDP2 gathers a block into
a buffer, copies it out, and in the forward keeps the buffer until the next block is copied out;
what is outside of blocks stays gathered for a whole step. Gradients are unsharded, first in the
compute dtype and then in float32, until they are reduced. DDP casts its master weights for every
matmul. ZeRO sums gradients in buckets. Plain data parallelism has whole weights in the compute
dtype and whole float32 sums of gradients; in float32 on one rank the weights are the masters.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, assert_never

from llmsys.config.engine import AccelerateEngineConfig, DeepSpeedEngineConfig, TorchEngineConfig
from llmsys.config.model import ModelConfig
from llmsys.config.module_tensors import ParameterTensor
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.config.run_constraints import is_replicated
from llmsys.estimate.memory_timeline import MemoryItem
from llmsys.estimate.model_tensors import list_model_tensors
from llmsys.estimate.rank_parameters import (
    GatheredWeights,
    count_full_elements,
    count_local_elements,
)
from llmsys.estimate.software_profile import OURS, MemoryProfile

REDUCED = "gradients before reduction"
BUCKET = 1 << 28  # elements of one bucket of ZeRO's reductions, llmsys/engine/deepspeed_setup.py
MESSAGE = 1 << 26  # elements of one message of plain data parallelism, parallel/master_shards.py
# elements that ZeRO-3 leaves gathered when they are soon used again (stage3_max_live_parameters)
LIVE = 10**9


# start: the copy-out of the first block. next block: that of a later one in the forward. forward,
# backward: inside a block. second block: the backward of the last one that gathers a block ahead.
# first block: the backward of the block that nothing follows. reduction:
# of gradients outside of blocks.
GatherMoment = Literal[
    "start",
    "next block",
    "forward",
    "loss",
    "backward",
    "second block",
    "first block",
    "reduction",
]


def list_gathered_weights(
    config: RunConfig,
    whole: GatheredWeights,
    system: MemoryProfile,
    moment: GatherMoment,
    *,
    casts_kept: bool,
) -> list[MemoryItem]:
    """Return the full weights at a moment of a forward or backward pass.

    `casts_kept`: autograd saves the casts of all blocks.
    """
    size, engine = get_compute_dtype_bytes(config), config.engine
    stored = 1 if system.matmul_dtype == "fp8" else size  # 8-bit weights are gathered in 8 bits
    if system.weights == "whole":
        return [MemoryItem("whole weights", size * whole.root + stored * whole.blocks)]
    match engine:
        case TorchEngineConfig(is_fsdp=True, reshard="never" | "after_step" as reshard):
            _, travelling, staged, _ = whole.block
            ends = reshard == "never"
            root, blocks = {
                "start": (whole.root + whole.root_buffer, whole.block.full + travelling + staged),
                "next block": (whole.root, whole.blocks + travelling + staged),
                "forward": (whole.root, whole.blocks + travelling),
                "loss": (whole.root, whole.blocks + travelling),
                "backward": (whole.root, whole.blocks),
                "second block": (whole.root, min(2 * whole.block.full, whole.blocks))
                if ends
                else (whole.root, whole.blocks),
                # Of a micro-batch before the last one, after_step keeps them all.
                "first block": (whole.root, whole.block.full if ends else whole.blocks),
                "reduction": (0, 0) if ends else (whole.root, whole.blocks),
            }[moment]
            return [
                MemoryItem("gathered weights outside of blocks", size * root),
                MemoryItem("gathered weights of blocks", stored * blocks),
            ]
        case TorchEngineConfig(is_fsdp=True):
            # The allocator keeps the places of two blocks, too small for what follows. On a CPU the
            # block of logits stays, and the backward gathers two.
            keeps_places = {"first block": False, "loss": system.device == "cpu"}
            if moment in keeps_places and (system.measured == "reserved" or keeps_places[moment]):
                moment = "backward"
            full, travelling, staged, _ = whole.block
            root, blocks = {
                "start": (whole.root + whole.root_buffer, full + travelling + staged),
                "next block": (whole.root, full + 2 * travelling + staged),
                "forward": (whole.root, full + travelling),
                "loss": (whole.root, travelling),
                "backward": (whole.root, full + travelling),
                "second block": (whole.root, full + travelling),
                "first block": (whole.root, full),
                "reduction": (0, 0),
            }[moment]
            return [
                MemoryItem("gathered weights outside of blocks", size * root),
                MemoryItem("gathered weights of blocks", stored * blocks),
            ]
        case DeepSpeedEngineConfig(zero_stage=3):
            # ZeRO-3 keeps up to LIVE elements, and never less than a block and the one fetched
            # ahead.
            live = max(LIVE, whole.root + 2 * whole.block.full)
            return [MemoryItem("gathered weights", size * min(whole.matrices, live))]
        case DeepSpeedEngineConfig(zero_stage=1 | 2) | TorchEngineConfig(data_parallel="plain"):
            return []  # weights in the compute dtype are part of the state
        case TorchEngineConfig() | DeepSpeedEngineConfig() | AccelerateEngineConfig():
            cast = whole.root + (whole.blocks if casts_kept else whole.block.full)
            return [] if size == FP32 else [MemoryItem("weights cast for matmuls", size * cast)]
        case unreachable:
            assert_never(unreachable)


def list_state_items(
    config: RunConfig, sizes: "StateBytes", whole: GatheredWeights
) -> list[MemoryItem]:
    """Return the allocations of a rank that live for the whole run."""
    items = [MemoryItem("weights", sizes.weights)]
    if not is_state_offloaded(config):
        items += [MemoryItem("masters", sizes.masters), MemoryItem("moments", sizes.moments)]
    if config.train.ema_half_life_tokens:
        items.append(MemoryItem("EMA of the weights", sizes.masters))
    return [*items, _compute_gradient_buckets(config, whole)]


def compute_update_bytes(
    config: RunConfig, layout: ParallelLayout, sizes: "StateBytes", rows: list[ParameterTensor]
) -> int:
    """Return the bytes that the optimizer allocates on the device for its step."""
    if is_state_offloaded(config):  # the step runs in host memory
        return 0
    rules = ("muon", "matrix")
    matrices = [
        row
        for row in rows
        if config.optimizer.select_update_rule(row.name, len(row.shape)) in rules
    ] or rows
    share = sizes.masters // FP32 / sum(row.num_elements for row in rows)
    # A rank updates its experts at once, and other matrices one by one.
    largest = max(
        max(row.elements_per_copy // row.shape[0], int(share * row.elements_per_copy))
        if row.is_routed
        else row.elements_per_copy
        for row in matrices
    )
    # Over two axes matrices are gathered on every rank instead.
    is_split_once = (layout.shard * layout.context > 1) != (layout.tensor > 1)
    return config.optimizer.count_update_bytes(
        int(share * sum(row.num_elements for row in matrices)),
        largest,
        dtype_bytes=get_compute_dtype_bytes(config),
        is_exchanged=isinstance(config.engine, TorchEngineConfig) and is_split_once,
    )


def is_state_offloaded(config: RunConfig) -> bool:
    """Return whether masters and moments are in host memory."""
    return getattr(config.engine, "cpu_offload", "none") != "none"


def _compute_gradient_buckets(config: RunConfig, whole: GatheredWeights) -> MemoryItem:
    """Copies of gradients that DDP sums over the ranks, or ZeRO-0 a bucket at a time; they stay
    for the whole run.
    """
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


def list_gradients_in_flight(
    config: RunConfig, whole: GatheredWeights, elements: int, travelling: int
) -> list[MemoryItem]:
    """Gradients of `elements` of one unit, and those of `travelling` elements that are summed
    over the ranks.
    """
    size = get_compute_dtype_bytes(config)
    own = MemoryItem("gradients in the compute dtype", size * elements)
    match config.engine:
        case DeepSpeedEngineConfig(zero_stage=1 | 2 | 3):
            bucket = min(BUCKET, max(whole.matrices, 1))
            return [own, MemoryItem("buckets of gradients", (size + FP32) * bucket)]
        case TorchEngineConfig(is_fsdp=True, reduce_dtype=reduce_dtype):
            sent = FP32 if reduce_dtype == "fp32" else 2
            return [own, MemoryItem(REDUCED, sent * travelling)]
        case TorchEngineConfig() | DeepSpeedEngineConfig() | AccelerateEngineConfig():
            return [own]
        case unreachable:
            assert_never(unreachable)


FP32 = 4  # bytes of one value


@dataclass(frozen=True)
class StateBytes:
    """Bytes on rank 0, which never holds less than another rank. `weights` are copies in
    addition to the masters.
    """

    weights: int
    masters: int
    gradients: int
    moments: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.masters + self.gradients + self.moments


def compute_state_bytes(
    config: RunConfig,
    layout: ParallelLayout,
    rows: list[ParameterTensor] | None = None,
    system: MemoryProfile = OURS,
) -> StateBytes:
    """Return the state of the configured engine on the fullest rank.

    Args:
        config: resolved config of a run.
        layout: resolved layout.
        rows: tensors of a pipeline stage; None: of the whole model.
        system: the program that trains.

    Returns:
        Bytes of weights, masters, gradients and moments.
    """
    rows = list_model_tensors(config.model) if rows is None else rows
    match config.engine:
        case DeepSpeedEngineConfig(zero_stage=stage):
            state = _compute_zero_state_bytes(config, layout, stage, rows)
            return state if system.moments == "fp32" else replace(state, moments=state.moments // 2)
        case TorchEngineConfig(data_parallel="plain"):
            return _compute_plain_state_bytes(config, layout, rows)
        case TorchEngineConfig() | AccelerateEngineConfig():
            # FSDP's shards are the fp32 masters; full weights exist only while they are used.
            count = count_local_elements if config.engine.shards_weights else count_full_elements
            sizes = [(row, count(row, layout, config.model) * row.num_copies) for row in rows]
            masters = FP32 * sum(size for _, size in sizes)
            moments = round(sum(_compute_moment_bytes(config, row) * size for row, size in sizes))
            return StateBytes(weights=0, masters=masters, gradients=masters, moments=moments)
        case unreachable:
            assert_never(unreachable)


def _compute_plain_state_bytes(
    config: RunConfig, layout: ParallelLayout, rows: list[ParameterTensor]
) -> StateBytes:
    """Whole weights and float32 sums of gradients, and shards of masters and moments."""
    size = get_compute_dtype_bytes(config)
    whole = sum(count_full_elements(row, layout, config.model) * row.num_copies for row in rows)
    shares = [
        (row, count_local_elements(row, layout, config.model) * row.num_copies) for row in rows
    ]
    are_masters = size == FP32 and layout.world_size == 1
    return StateBytes(
        weights=0 if are_masters else size * whole,
        masters=FP32 * sum(share for _, share in shares),
        gradients=FP32 * whole,
        moments=round(sum(_compute_moment_bytes(config, row) * share for row, share in shares)),
    )


def is_plain(config: RunConfig) -> bool:
    """Return whether weights are whole and apart from their masters, without a wrapper."""
    engine = config.engine
    return isinstance(engine, TorchEngineConfig) and engine.data_parallel == "plain"


def compute_unsummed_bytes(config: RunConfig, elements: int) -> int:
    """Compute the bytes of gradients that wait for the end of a backward.

    Args:
        config: resolved config of a run.
        elements: parameters whose backward is over.

    Returns:
        Under plain data parallelism those in 16 bits, which are added to float32 sums after the
        backward; else 0.
    """
    size = get_compute_dtype_bytes(config)
    return size * elements if is_plain(config) and size != FP32 else 0


def compute_message_bytes(config: RunConfig, layout: ParallelLayout, elements: int) -> int:
    """Compute the bytes in which plain data parallelism sends gradients of `elements` and receives
    its share; 0 under other engines and on one rank.
    """
    ranks = layout.world_size
    if not is_plain(config) or ranks == 1:
        return 0
    sent = min(MESSAGE, elements)
    return FP32 * (sent + sent // ranks)


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
    return config.optimizer.compute_state_bytes(row.name, row.shape)


def compute_offloaded_bytes(config: RunConfig, layout: ParallelLayout) -> int:
    """Compute the bytes that a rank keeps in host memory.

    Args:
        config: resolved config of a run.
        layout: resolved layout, as `ParallelLayout.resolve` returns it.

    Returns:
        With cpu_offload the masters and moments, under FSDP the gradients too; else 0.
    """
    if not is_state_offloaded(config):
        return 0
    state = compute_state_bytes(config, layout)
    return (
        state.masters + state.moments + (state.gradients if config.engine.offloads_gradients else 0)
    )


def _compute_zero_state_bytes(
    config: RunConfig, layout: ParallelLayout, stage: int, rows: list[ParameterTensor]
) -> StateBytes:
    """ZeRO flattens each parameter group, pads it to twice the number of ranks, and splits it
    evenly over them.

    Groups: with and without weight decay; experts, embeddings, the rest. Dealt experts are split
    over their own replicas only. Stage 0 splits nothing, and its parameters are the fp32 masters
    themselves. Programs with tensor parallelism divide embedding and head by columns of the
    vocabulary.
    """
    whole = sum(_count_zero_elements(row, layout, config.model) for row in rows)
    groups = list(_iter_parameter_groups(config, layout, rows))
    split = sum(_compute_padded_share(elements, ranks) for elements, ranks, _ in groups)
    size = get_compute_dtype_bytes(config)
    weights = 0 if stage == 0 else size * (split if stage == 3 else whole)
    share = split if stage >= 1 else whole
    moments = FP32 * sum(
        count * _compute_padded_share(elements, ranks) for elements, ranks, count in groups
    )
    if stage == 0:  # no flat vectors: any optimizer
        full = [(row, _count_zero_elements(row, layout, config.model)) for row in rows]
        moments = round(
            sum(_compute_moment_bytes(config, row) * elements for row, elements in full)
        )
    return StateBytes(weights, FP32 * share, FP32 * (split if stage >= 2 else whole), moments)


def _iter_parameter_groups(
    config: RunConfig, layout: ParallelLayout, rows: list[ParameterTensor]
) -> Iterator[tuple[int, int, int]]:
    """Yield the elements of each parameter group on a rank, the ranks it is sharded over, and
    moments per element.
    """
    groups: dict[tuple[str, bool, int], int] = {}
    for row in rows:
        role = (
            "experts"
            if row.is_routed
            else "embedding"
            if row.name in ("embed.weight", "head.weight")
            else "dense"
        )
        # stacked biases of experts have two dims, and do not decay
        decays = len(row.shape) >= 2 and not row.name.endswith("_bias")
        key = (role, decays, _count_moments(config, row))
        groups[key] = groups.get(key, 0) + _count_zero_elements(row, layout, config.model)
    for (role, _, moments), elements in groups.items():
        # Ranks with the same elements.
        sharded = layout.expert if role == "experts" else layout.tensor
        yield elements, max(1, layout.world_size // sharded), moments


def _count_zero_elements(row: ParameterTensor, layout: ParallelLayout, model: ModelConfig) -> int:
    """Return the elements of all copies of a tensor that a rank computes with."""
    columns = layout.tensor if row.name in ("embed.weight", "head.weight") else 1
    return -(-count_full_elements(row, layout, model) * row.num_copies // columns)


def _compute_padded_share(elements: int, ranks: int) -> int:
    return -(-elements // (2 * ranks)) * 2
