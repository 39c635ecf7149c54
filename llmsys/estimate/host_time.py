"""Seconds that a step waits for the host: launches of kernels, and copies of activations to host
memory and back.
"""

from llmsys.config.run import RunConfig
from llmsys.estimate.communication_time import PassSeconds
from llmsys.estimate.kernel_context import KernelContext
from llmsys.estimate.kernel_time import LAUNCHES_MOE, KernelSeconds


def estimate_host_seconds(
    bench: KernelContext,
    work: KernelSeconds,
    passes: PassSeconds,
    micro_batches: float,
    pipeline: int,
) -> float:
    """Return the seconds that the device waits for the host: launches outlast kernels."""
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
        if bench.software.expert_rows == "visit":
            # Routing waits for the counts of the all-to-all, so nothing hides its kernels.
            waited += 3 * LAUNCHES_MOE * bench.model.num_moe_layers * second
        return micro_batches * waited / pipeline
    if bench.software.launch != "eager":
        return 0.0
    # the backward starts about two kernels for each one of the forward
    host = 3 * work.launches / pipeline * second
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
