"""Weights and gradients that a rank has whole for a while, beside the state that it always holds: by engine.

FSDP gathers the block in use and the next one, and what stands outside of blocks for a whole step; its gradients exist
whole, first in the compute dtype and then in float32, until they are summed over the ranks. DDP casts its masters for
every product. ZeRO sums gradients in buckets.
"""

from dataclasses import dataclass

from llmsys.config.layout import Layout
from llmsys.config.run import RunConfig
from llmsys.estimate.instants import Item
from llmsys.estimate.memory import FP32, compute_bytes, in_block, whole_elements
from llmsys.estimate.rows import TensorRow
from llmsys.estimate.system import System

BUCKET = 1 << 28  # elements of one bucket of ZeRO's reductions, llmsys/engine/deepspeed_setup.py
LIVE = 10**9  # elements that ZeRO-3 leaves gathered when they are soon used again (stage3_max_live_parameters)


@dataclass(frozen=True)
class WholeWeights:
    """Elements that this rank computes with: `root` outside of blocks, `block` the largest block, `blocks` all."""

    root: int
    head: int
    block: int
    blocks: int
    matrices: int


def whole_weights(config: RunConfig, layout: Layout, rows: list[TensorRow], system: System) -> WholeWeights:
    """Of the rows of one stage of the model. Head and embedding are whole, or split by columns of the vocabulary."""
    model, columns = config.model, layout.tensor if system.head == "columns" else 1
    root = sum(-(-row.count // columns) for row in rows if not in_block(row))
    head = max((-(-row.each // columns) for row in rows if row.name in ("head.weight", "embed.weight")), default=0)
    sizes: dict[tuple[str, int], int] = {}
    for row in rows:
        for layer in row.layers if in_block(row) else ():
            place = (row.name.partition("{i}")[0], layer)
            sizes[place] = sizes.get(place, 0) + whole_elements(row, layout, model)
    return WholeWeights(root, head, max(sizes.values(), default=0), sum(sizes.values()), root + sum(sizes.values()))


def weights_in_use(config: RunConfig, whole: WholeWeights, system: System, *, casts_kept: bool) -> list[Item]:
    """What a forward or backward pass has whole. `casts_kept`: autograd holds the cast weights of all blocks."""
    size, engine = compute_bytes(config), config.engine
    stored = 1 if system.products == "fp8" else size  # 8-bit weights are gathered in 8 bits
    if system.weights == "whole":
        return [Item("whole weights", size * whole.root + stored * whole.blocks)]
    if engine.kind == "torch" and engine.data_parallel == "fsdp":
        root = Item("gathered weights outside of blocks", size * whole.root)
        return [root, Item("gathered weights of two blocks", 2 * stored * whole.block)]
    if engine.kind == "deepspeed" and engine.zero_stage == 3:
        return [Item("gathered weights", size * min(whole.matrices, max(LIVE, whole.root + 2 * whole.block)))]
    if engine.kind == "deepspeed" and engine.zero_stage:
        return []  # weights in the compute dtype are part of the state
    if size == FP32:
        return []
    return [Item("weights cast for products", size * (whole.root + (whole.blocks if casts_kept else whole.block)))]


def buckets(config: RunConfig, whole: WholeWeights) -> Item:
    """Copies of gradients that DDP sums over the ranks, or ZeRO-0 a bucket at a time; they stay for the whole run."""
    engine = config.engine
    copied = engine.kind == "accelerate" or (engine.kind == "torch" and engine.data_parallel == "ddp")
    of_zero = engine.kind == "deepspeed" and engine.zero_stage == 0
    elements = whole.matrices if copied else min(BUCKET, whole.matrices) if of_zero else 0
    return Item("buckets of gradients", FP32 * elements)


def gradients_in_flight(config: RunConfig, whole: WholeWeights, elements: int) -> list[Item]:
    """Gradients of one unit of `elements` while they are summed over the ranks."""
    size, engine = compute_bytes(config), config.engine
    own = Item("gradients in the compute dtype", size * elements)
    if engine.kind == "deepspeed" and engine.zero_stage:
        bucket = min(BUCKET, max(whole.matrices, 1))
        return [own, Item("buckets of gradients", (size + FP32) * bucket)]
    if engine.kind == "torch" and engine.data_parallel == "fsdp":
        return [own, Item("float32 gradients to be summed over ranks", FP32 * elements)]
    return [own]
