"""Bytes that data parallelism copies within the memory of a rank: casts of masters, flat buffers of
messages, and float32 sums of gradients.

A library writes them; none is a message, and one rank alone has them too. Bytes are those of one
parameter in one step, where n micro-batches, s ranks that share it, v bytes of the compute dtype
and r bytes of a reduced gradient are given.
"""

from functools import lru_cache
from typing import assert_never

from llmsys.config.engine import (
    AccelerateEngineConfig,
    DeepSpeedEngineConfig,
    EngineConfig,
    TorchEngineConfig,
)
from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.estimate.kernel_context import KernelContext
from llmsys.estimate.model_tensors import list_model_tensors

MASTER = 4  # bytes of a master, and of a sum of gradients
# One number read from each of two places, and their sum written.
ADD = 3 * MASTER


def estimate_local_copy_seconds(
    engine: EngineConfig, bench: KernelContext, micro_batches: int, pipeline: int
) -> float:
    """Return the seconds of a step that these copies take.

    On an H100 they were 50 of 315 ms under FSDP2 on one rank, for four layers of Llama 3.1 8B in
    two micro-batches; the estimate is 54.

    Args:
        engine: the `engine:` section of the run.
        bench: model, layout and device.
        micro_batches: those of a step.
        pipeline: stages over which the parameters are divided.

    Returns:
        Bytes through memory at the rate that it reaches; nothing hides them, since the kernels of
        a step wait for the same memory.
    """
    size = bench.shape.value_bytes
    moved = 0.0
    for parameters, ranks, shared, is_root in _list_parts(bench.model, bench.layout):
        copied = count_copied_bytes(engine, size, shared, micro_batches, is_root=is_root)
        moved += copied * parameters / (ranks * pipeline)
    return bench.estimate_memory_seconds(moved)


def _list_parts(
    model: ModelConfig, layout: ParallelLayout
) -> tuple[tuple[int, int, int, bool], ...]:
    """Return parameters, the ranks that divide them, those that share each, and whether they are
    outside of blocks: of what is outside, of blocks, and of experts.
    """
    root, blocks, experts = _count_parameters(model)
    shards = layout.shard * layout.context
    shards_of_experts = max(1, layout.ranks_per_replica // layout.expert)
    return (
        (root, layout.tensor, shards, True),
        (blocks, layout.tensor, shards, False),
        (experts, layout.expert, shards_of_experts, False),
    )


@lru_cache(maxsize=64)  # a plan asks for those of one model thousands of times
def _count_parameters(model: ModelConfig) -> tuple[int, int, int]:
    """Return the parameters outside of blocks, those of blocks, and those of routed experts."""
    rows = list_model_tensors(model)
    return (
        sum(row.num_elements for row in rows if not row.layers),
        sum(row.num_elements for row in rows if row.layers and not row.is_routed),
        sum(row.num_elements for row in rows if row.is_routed),
    )


def count_copied_bytes(
    engine: EngineConfig, size: int, shards: int, micro_batches: int, *, is_root: bool
) -> float:
    """Count the bytes that are read or written for one parameter in one step.

    Args:
        engine: the `engine:` section of the run.
        size: bytes of a number in the compute dtype.
        shards: ranks that share the parameter.
        micro_batches: those of a step.
        is_root: the parameter is outside of blocks: FSDP2 keeps it gathered in a micro-batch.

    Returns:
        Bytes.
    """
    cast = MASTER + size if size < MASTER else 0
    summed = _count_summed_bytes(size, micro_batches)
    match engine:
        case TorchEngineConfig(data_parallel="plain"):
            if size == MASTER and shards == 1:
                return (micro_batches - 1) * ADD  # the weights are the masters
            return summed + cast / shards
        case TorchEngineConfig(is_fsdp=True):
            return _count_fsdp_bytes(engine, size, shards, micro_batches, is_root=is_root)
        case TorchEngineConfig() | AccelerateEngineConfig() | DeepSpeedEngineConfig(zero_stage=0):
            # Casts within autograd, both ways; gradients go to buckets where they are sent.
            buckets = 2 * MASTER if shards > 1 else 0
            return micro_batches * 2 * cast + (micro_batches - 1) * ADD + buckets
        case DeepSpeedEngineConfig(zero_stage=1):
            return summed + cast / shards
        case DeepSpeedEngineConfig():
            # A bucket of each micro-batch, reduced in float32 and added to the shard.
            bucket = 2 * size + (size + MASTER)
            return micro_batches * bucket + (micro_batches - 1) * ADD / shards + cast / shards
        case unreachable:
            assert_never(unreachable)


def count_frozen_bytes(
    engine: EngineConfig, size: int, shards: int, micro_batches: int, *, is_root: bool
) -> float:
    """Count the same bytes for a parameter that is not trained, whose weights are kept in the
    compute dtype: nothing is cast, no gradient is summed, and one rank alone copies nothing.

    Args:
        engine: the `engine:` section of the run.
        size: bytes of a number in the compute dtype.
        shards: ranks that share the parameter.
        micro_batches: those of a step.
        is_root: as in `count_copied_bytes`.

    Returns:
        Bytes: of a gathered shard into the message, and of the message into the parameters.
    """
    if shards == 1 or not isinstance(engine, TorchEngineConfig) or not engine.is_fsdp:
        return 0.0
    gathers = _count_gathers(engine, micro_batches, is_root=is_root)
    return gathers * (2 * size / shards + 2 * size)


def compute_frozen_share(
    engine: EngineConfig,
    model: ModelConfig,
    layout: ParallelLayout,
    size: int,
    micro_batches: int,
) -> float:
    """Return the bytes of copies with all parameters frozen, over those with all trained.

    Args:
        engine: the `engine:` section of the run.
        model: architecture.
        layout: resolved layout.
        size: bytes of a number in the compute dtype.
        micro_batches: those of a step.

    Returns:
        A number from 0 to 1.
    """
    frozen = trained = 0.0
    for parameters, ranks, shared, is_root in _list_parts(model, layout):
        each = parameters / ranks
        frozen += each * count_frozen_bytes(engine, size, shared, micro_batches, is_root=is_root)
        trained += each * count_copied_bytes(engine, size, shared, micro_batches, is_root=is_root)
    return frozen / max(trained, 1.0)


def _count_summed_bytes(size: int, micro_batches: int) -> int:
    """Count the bytes of a whole gradient that is summed over micro-batches in float32: the first
    one is written, and each further one is added.
    """
    return (size + MASTER) + (micro_batches - 1) * (size + 2 * MASTER)


def _count_fsdp_bytes(
    engine: TorchEngineConfig, size: int, shards: int, micro_batches: int, *, is_root: bool
) -> float:
    gathers = _count_gathers(engine, micro_batches, is_root=is_root)
    cast = MASTER + size if size < MASTER else 0
    # The shard is cast and copied into the message, and the message into the parameters.
    gathered = gathers * ((cast + 2 * size) / shards + 2 * size)
    sent = engine.reduced_bytes
    # One rank alone copies the message to itself.
    message = 2 * sent if shards == 1 else 0
    if engine.reduces_each_micro_batch:
        reduced = micro_batches * (size + sent + message)
        return gathered + reduced + (micro_batches - 1) * ADD / shards
    summed = _count_summed_bytes(size, micro_batches)
    return gathered + summed + MASTER + sent + message


def _count_gathers(engine: TorchEngineConfig, micro_batches: int, *, is_root: bool) -> int:
    if engine.keeps_weights_in_step:
        return 1
    if engine.keeps_weights_in_micro_batch or is_root:
        return micro_batches
    return 2 * micro_batches
