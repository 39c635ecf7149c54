"""What a step takes beside its kernels and collectives: the optimizer's bytes, activations in host memory, the host."""

from llmsys.config.run import RunConfig
from llmsys.estimate.kernels import KernelSeconds
from llmsys.estimate.tensors import list_model_tensors
from llmsys.estimate.traffic import PassSeconds
from llmsys.estimate.workbench import KernelContext

OPTIMIZER_BYTES = 36  # per parameter: weight, gradient and both moments read, three written, and the norm's reading


def estimate_host_seconds(bench: KernelContext, work: KernelSeconds, passes: PassSeconds, micro_batches: float, pipeline: int) -> float:
    """What the device waits for the host in eager mode: starting kernels takes longer than running them."""
    if bench.software.launch != "eager":
        return 0.0
    host = 3 * work.launches / pipeline * bench.device.efficiency.host_seconds
    return micro_batches * max(0.0, host - passes.forward - passes.backward)


def estimate_offload_seconds(bench: KernelContext, pipeline: int) -> float:
    """What enters each block, sent to host memory and back."""
    if bench.software.activations == "device":
        return 0.0
    tokens = bench.shape.num_tokens / (bench.layout.context * bench.layout.tensor)
    sent = tokens * bench.model.hidden_size * bench.shape.value_bytes * bench.model.num_hidden_layers / pipeline
    return 2 * sent / bench.device.host_bandwidth


def estimate_optimizer_seconds(config: RunConfig, bench: KernelContext, pipeline: int) -> float:
    """Adam's bytes through memory, or through the host where state lives there."""
    layout, rows = bench.layout, list_model_tensors(bench.model)
    spread = layout.shard * layout.context if _is_state_sharded(config) else 1
    dense = sum(row.num_elements for row in rows if not row.is_routed) / (layout.tensor * pipeline * spread)
    sparse = sum(row.num_elements for row in rows if row.is_routed) / (pipeline * max(layout.expert, spread * layout.tensor))
    moved = (dense + sparse) * OPTIMIZER_BYTES
    if getattr(config.engine, "offload", "none") != "none":
        return moved / bench.device.host_bandwidth
    return bench.estimate_memory_seconds(moved)


def _is_state_sharded(config: RunConfig) -> bool:
    engine = config.engine
    if engine.kind == "torch":
        return engine.data_parallel == "fsdp"
    return engine.kind == "deepspeed" and engine.zero_stage >= 1
