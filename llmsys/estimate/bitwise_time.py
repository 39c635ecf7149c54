"""Seconds that `train.reproducibility=bitwise` adds to a step.

Experts compute the rows of one rank at a time, replicas exchange whole gradients instead of sums,
partial sums of micro-batches pass through memory, and the optimizer rounds after every operation
(llmsys/engine/README.md).
"""

from llmsys.config.run import RunConfig
from llmsys.estimate.communication_time import RankGroup, estimate_all_gather_seconds
from llmsys.estimate.kernel_context import KernelContext
from llmsys.estimate.kernel_time import KernelSeconds
from llmsys.estimate.model_tensors import list_model_tensors

GRADIENT_BYTES = 4
# A sum of two tensors reads both and writes one; a tree of M leaves has M − 1 of them.
SUM_PASSES = 3
# Kernels of AdamW that read or write a value of 4 bytes, over those of one fused kernel
# (llmsys/optim/elementwise.py).
UPDATE_PASSES = 30
# Kernels of one expert besides its matmuls: copies to aligned memory, the activation, the join.
EXPERT_KERNELS = 5
# flash attention's backward with ordered sums over the usual one. Assumed: no GPU measured it here.
ORDERED_ATTENTION = 1.15


def estimate_bitwise_seconds(
    config: RunConfig,
    bench: KernelContext,
    work: KernelSeconds,
    micro_batches: float,
    pipeline: int,
) -> float:
    """Estimate what bitwise mode adds to a step in fast mode with the same micro-batches and eager
    blocks.

    Args:
        config: resolved config of a run.
        bench: model, layout and device.
        work: kernels of one micro-batch forward, of all stages.
        micro_batches: micro-batches of a rank in a step.
        pipeline: stages.

    Returns:
        Seconds; 0 in fast mode.
    """
    if config.train.reproducibility == "fast":
        return 0.0
    layout, rows = bench.layout, list_model_tensors(bench.model)
    dense = sum(row.num_elements for row in rows if not row.is_routed) / (pipeline * layout.shard)
    routed = sum(row.num_elements for row in rows if row.is_routed) / (
        pipeline * max(layout.expert, layout.shard)
    )
    own = (dense + routed) * GRADIENT_BYTES
    sums = bench.estimate_memory_seconds(SUM_PASSES * own) * micro_batches
    # An all-reduce sends 2 (R − 1) / R of the gradients of a rank; a gather of all copies R − 1
    # times as much as those.
    copies = RankGroup(layout.replicate, layout.ranks_per_replica)
    gathered = estimate_all_gather_seconds(copies, layout.replicate * own, bench.device)
    reduced = 2 * estimate_all_gather_seconds(copies, own, bench.device)
    update = bench.estimate_memory_seconds(UPDATE_PASSES * own)
    attention = (ORDERED_ATTENTION - 1) * work.attention_backward / pipeline * micro_batches
    experts = _estimate_expert_seconds(bench, work) / pipeline * micro_batches
    return sums + (gathered - reduced) * micro_batches + update + attention + experts


def _estimate_expert_seconds(bench: KernelContext, work: KernelSeconds) -> float:
    """Seconds of one micro-batch for which launches and weights of experts one by one outlast
    grouped kernels.
    """
    if (moe := bench.model.moe) is None:
        return 0.0
    # A rank computes the rows of each rank of its group with each of its experts: as many pairs as
    # experts.
    kernels = (
        3
        * (len(moe.expert.projections) + EXPERT_KERNELS)
        * moe.num_experts
        * bench.model.num_moe_layers
    )
    elements = (
        sum(row.num_elements for row in list_model_tensors(bench.model) if row.is_routed)
        / bench.layout.expert
    )
    # The weights are read once for each source, and copied to 16 bits for each of them.
    read = 3 * (bench.layout.expert - 1) * elements * bench.shape.value_bytes
    return max(
        0.0, kernels * bench.device.efficiency.host_seconds - 3 * work.grouped
    ) + bench.estimate_memory_seconds(read)
