"""Seconds that a step waits for the host: launches of kernels, and copies of activations to host
memory and back.
"""

from typing import assert_never

from llmsys.config.engine import (
    AccelerateEngineConfig,
    DeepSpeedEngineConfig,
    EngineConfig,
    TorchEngineConfig,
)
from llmsys.config.run import RunConfig
from llmsys.estimate.communication_time import PassSeconds
from llmsys.estimate.kernel_context import KernelContext
from llmsys.estimate.kernel_time import LAUNCHES_MOE, KernelSeconds

# What the host does for a compiled block and micro-batch, forward and backward, in launches of a
# kernel. With the hooks of FSDP2 it was 4 to 5 ms on the host of an H100; the others are as much
# shorter as on a CPU (tools/bench/host_time.py). DeepSpeed was not measured: it hooks into
# gradients as DDP does, and ZeRO-3 into modules as FSDP2.
FSDP_LAUNCHES = 750
KEEPING_LAUNCHES = 650  # weights stay gathered
DDP_LAUNCHES = 410
PLAIN_LAUNCHES = 300


def count_block_launches(engine: EngineConfig) -> int:
    """Return the host's time for a compiled block and micro-batch in launches of a kernel.

    Args:
        engine: the `engine:` section of the run.

    Returns:
        Launches that take as long, those of kernels included.
    """
    match engine:
        case TorchEngineConfig(data_parallel="plain"):
            return PLAIN_LAUNCHES
        case TorchEngineConfig(is_fsdp=True):
            return KEEPING_LAUNCHES if engine.keeps_weights_in_step else FSDP_LAUNCHES
        case DeepSpeedEngineConfig(zero_stage=3):
            return FSDP_LAUNCHES
        case TorchEngineConfig() | DeepSpeedEngineConfig() | AccelerateEngineConfig():
            return DDP_LAUNCHES
        case unreachable:
            assert_never(unreachable)


def estimate_host_seconds(
    engine: EngineConfig,
    bench: KernelContext,
    work: KernelSeconds,
    passes: PassSeconds,
    micro_batches: float,
    pipeline: int,
) -> float:
    """Return the seconds that the device waits for the host: launches outlast kernels.

    Args:
        engine: the `engine:` section of the run.
        bench: model, layout and device.
        work: seconds of kernels.
        passes: those of a pass of one micro-batch.
        micro_batches: those of a step.
        pipeline: stages over which blocks are divided.
    """
    moe, second = bench.model.moe, bench.device.efficiency.host_seconds
    if moe is not None and (each := bench.software.expert_launches):
        # The backward has two kernels for each one of the forward. Where the host learns the sizes
        # of the experts' matmuls in every layer, only these matmuls can hide their launches.
        launches = 3 * each * moe.num_experts / bench.layout.expert * bench.model.num_moe_layers
        hidden = (
            3 * work.grouped
            if bench.software.reads_counts
            else pipeline * (passes.forward + passes.backward)
        )
        waited = max(0.0, launches * second - hidden)
        if bench.software.expert_rows == "visit" and bench.software.reads_counts:
            # Routing waits for the counts of the all-to-all, so nothing hides its kernels.
            waited += 3 * LAUNCHES_MOE * bench.model.num_moe_layers * second
        return micro_batches * waited / pipeline
    # the backward starts about two kernels for each one of the forward
    launches = 3 * work.launches if bench.software.launch == "eager" else 0
    if bench.software.counts_wrapper:
        # An eager block launches its kernels on top of that.
        launches += count_block_launches(engine) * bench.model.num_hidden_layers
    host = launches / pipeline * second
    return micro_batches * max(0.0, host - passes.forward - passes.backward)


def estimate_offload_seconds(bench: KernelContext, pipeline: int) -> float:
    """Return the seconds to send block inputs to host memory and back."""
    if bench.software.activations == "device":
        return 0.0
    tokens = bench.shape.num_tokens / (bench.layout.context * bench.layout.tensor)
    sent = (
        tokens
        * bench.model.hidden_size
        * bench.shape.value_bytes
        * bench.model.num_hidden_layers
        / pipeline
    )
    # Out in forward, and back in backward.
    return 2 * sent / bench.device.host_bandwidth


def estimate_copy_seconds(config: RunConfig, bench: KernelContext, passes: PassSeconds) -> float:
    """Seconds of one micro-batch that copies of saved tensors to host memory and back take
    longer than the blocks.
    """
    if config.train.activation_checkpoint != "offload":
        return 0.0
    # Few estimates open this file.
    from llmsys.estimate.activation_memory import compute_offloaded_activations

    copies = compute_offloaded_activations(config, bench.layout) / bench.device.host_bandwidth
    # Copies run next to each pass: what is longer than the pass shows.
    return max(0.0, copies - passes.forward) + max(0.0, copies - passes.backward)
