"""Seconds of the optimizer step of one rank: its bytes through memory, and the products of
Muon's orthogonalization.
"""

from llmsys.config.run import RunConfig
from llmsys.estimate.communication_time import (
    RankGroup,
    estimate_all_reduce_seconds,
    estimate_all_to_all_seconds,
)
from llmsys.estimate.kernel_context import KernelContext
from llmsys.estimate.model_tensors import list_model_tensors


def estimate_optimizer_seconds(config: RunConfig, bench: KernelContext, pipeline: int) -> float:
    """Estimate the seconds of one optimizer step.

    Args:
        config: resolved config of a run.
        bench: model, layout and device.
        pipeline: stages over which the parameters are divided.

    Returns:
        Bytes through memory, or through the host where state lives there, and Muon's products and
        exchange.
    """
    layout, rows = bench.layout, list_model_tensors(bench.model)
    spread = layout.shard * layout.context if config.engine.shards_optimizer_state else 1
    dense = sum(row.num_elements for row in rows if not row.is_routed) / (
        layout.tensor * pipeline * spread
    )
    sparse = sum(row.num_elements for row in rows if row.is_routed) / (
        pipeline * max(layout.expert, spread * layout.tensor)
    )
    moved = (dense + sparse) * config.optimizer.moved_bytes
    if getattr(config.engine, "cpu_offload", "none") != "none":
        return moved / bench.device.host_bandwidth
    # SOAP's matrices are gathered, and every rank repeats the work in float32.
    flops = (
        sum(row.num_copies * config.optimizer.count_step_flops(row.name, row.shape) for row in rows)
        / pipeline
    )
    rotations = (
        flops / (bench.device.get_peak_flops("fp32") * bench.device.efficiency.products)
        if flops
        else 0.0
    )
    matmuls = rotations + _estimate_orthogonalization_seconds(config, bench, pipeline, spread)
    return bench.estimate_memory_seconds(moved) + matmuls


def _estimate_orthogonalization_seconds(
    config: RunConfig, bench: KernelContext, pipeline: int, spread: int
) -> float:
    """Seconds of Newton-Schulz steps. Each matrix is sent to one rank of its shards and back
    (distributed_muon.py).

    In flat shards it is put together and taken apart by two all-reduces (flat_muon.py).
    """
    optimizer, layout, device = config.optimizer, bench.layout, bench.device
    if optimizer.kind != "muon":
        return 0.0
    is_flat = getattr(config.engine, "zero_stage", 0) > 0
    dense = sparse = elements = 0.0
    for row in list_model_tensors(bench.model):
        if optimizer.select_update_rule(row.name, len(row.shape)) != "muon":
            continue
        height, width = row.shape[-2:]
        flops = count_newton_schulz_flops(height, width, optimizer.newton_schulz_steps)
        flops *= row.num_elements / (height * width)
        if row.is_routed:
            sparse += flops  # a stack of experts is sharded into whole matrices
        else:
            dense += flops
        if is_flat or not row.is_routed:
            elements += row.num_elements
    # Ranks of a tensor axis repeat what is sharded along both.
    ranks = spread if layout.tensor == 1 else 1
    flops = dense / (pipeline * ranks) + sparse / (
        pipeline * max(layout.expert, spread * layout.tensor)
    )
    sent = elements / (pipeline * layout.tensor * spread) * bench.shape.value_bytes
    group = RankGroup(spread, layout.tensor)
    if is_flat:
        exchange = 2 * estimate_all_reduce_seconds(group, sent * spread, device)
    else:
        exchange = 2 * estimate_all_to_all_seconds(group, sent, device)
    return (
        flops / (device.get_peak_flops(bench.shape.dtype) * device.efficiency.products) + exchange
    )


def count_newton_schulz_flops(rows: int, columns: int, steps: int) -> float:
    """Count the operations that orthogonalize one matrix (Jordan 2024): XXᵀ, its square, and their
    product with X.

    Args:
        rows: rows of the matrix.
        columns: its columns.
        steps: quintic steps.

    Returns:
        Floating-point operations, two for each multiplication and addition.
    """
    short, long = sorted((float(rows), float(columns)))
    return steps * (4 * short**2 * long + 2 * short**3)
