"""What a step takes beside its kernels and collectives: the optimizer's bytes, activations in host memory, the host."""

from llmsys.config.run import RunConfig
from llmsys.estimate.kernels import Kernels
from llmsys.estimate.tensors import model_tensors
from llmsys.estimate.traffic import Passes
from llmsys.estimate.workbench import Bench

OPTIMIZER_BYTES = 36  # per parameter: weight, gradient and both moments read, three written, and the norm's reading


def host_seconds(bench: Bench, work: Kernels, passes: Passes, micro_batches: float, pipeline: int) -> float:
    """What the device waits for the host in eager mode: starting kernels takes longer than running them."""
    if bench.software.launch != "eager":
        return 0.0
    host = 3 * work.launches / pipeline * bench.device.efficiency.host_seconds
    return micro_batches * max(0.0, host - passes.forward - passes.backward)


def offload_seconds(bench: Bench, pipeline: int) -> float:
    """What enters each block, sent to host memory and back."""
    if bench.software.activations == "device":
        return 0.0
    tokens = bench.shape.tokens / (bench.layout.context * bench.layout.tensor)
    sent = tokens * bench.model.hidden_size * bench.shape.value_bytes * bench.model.num_hidden_layers / pipeline
    return 2 * sent / bench.device.host_bandwidth


def optimizer_seconds(config: RunConfig, bench: Bench, pipeline: int) -> float:
    """Adam's bytes through memory, or through the host where state lives there."""
    layout, rows = bench.layout, model_tensors(bench.model)
    spread = layout.shard * layout.context if _state_is_split(config) else 1
    dense = sum(row.count for row in rows if not row.routed) / (layout.tensor * pipeline * spread)
    sparse = sum(row.count for row in rows if row.routed) / (pipeline * max(layout.expert, spread * layout.tensor))
    moved = (dense + sparse) * OPTIMIZER_BYTES
    if getattr(config.engine, "offload", "none") != "none":
        return moved / bench.device.host_bandwidth
    return bench.memory_seconds(moved)


def _state_is_split(config: RunConfig) -> bool:
    engine = config.engine
    if engine.kind == "torch":
        return engine.data_parallel == "fsdp"
    return engine.kind == "deepspeed" and engine.zero_stage >= 1
