"""Weights and gradients that a rank has whole for a while, beside the state that it always holds: by engine.

FSDP gathers the block in use and the next one, and what stands outside of blocks for a whole step; its gradients exist
whole, first in the compute dtype and then in float32, until they are summed over the ranks. DDP casts its masters for
every product. ZeRO sums gradients in buckets.
"""

from dataclasses import dataclass
from typing import assert_never

from llmsys.config.engine import AccelerateEngineConfig, DeepSpeedEngineConfig, TorchEngineConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.parameter_tensor import ParameterTensor
from llmsys.config.run import RunConfig
from llmsys.estimate.memory_timeline import MemoryItem
from llmsys.estimate.software_profile import MemoryProfile
from llmsys.estimate.state_memory import FP32, count_full_elements, get_compute_dtype_bytes, is_in_block

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
