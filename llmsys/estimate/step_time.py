"""Seconds of one optimizer step: kernels, collectives, optimizer, offload and host.

Reads a config, a resolved layout and a device; gives P10, P50 and P90 with the parts of P50. The model is kernels plus
what of the communication nothing hides, times a residual whose spread was calibrated on named published rows
(`residual.yaml`). It is in-step time: `goodput` says what a whole run takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.estimate.activation_memory import has_documents
from llmsys.estimate.communication_time import (
    PassSeconds,
    estimate_context_parallel_seconds,
    estimate_data_parallel_seconds,
    estimate_expert_parallel_seconds,
    estimate_pipeline_parallel_seconds,
    estimate_tensor_parallel_seconds,
)
from llmsys.estimate.device_profile import DeviceProfile, Number
from llmsys.estimate.flops import count_flops
from llmsys.estimate.kernel_time import KernelContext, KernelSeconds, MicroBatchShape, estimate_kernel_seconds
from llmsys.estimate.model_tensors import list_model_tensors
from llmsys.estimate.residual_model import PercentileInterval, get_residual
from llmsys.estimate.software_profile import (
    SoftwareProfile,
    build_software_profile,
    resolve_compile_for_profile,
    resolve_for_profile,
)


def estimate_host_seconds(
    bench: KernelContext, work: KernelSeconds, passes: PassSeconds, micro_batches: float, pipeline: int
) -> float:
    """Return the seconds that the device waits for the host in eager mode: launches outlast kernels."""
    if bench.software.launch != "eager":
        return 0.0
    # the backward starts about two kernels for each one of the forward
    host = 3 * work.launches / pipeline * bench.device.efficiency.host_seconds
    return micro_batches * max(0.0, host - passes.forward - passes.backward)


def estimate_offload_seconds(bench: KernelContext, pipeline: int) -> float:
    """Return the seconds to send block inputs to host memory and back."""
    if bench.software.activations == "device":
        return 0.0
    tokens = bench.shape.num_tokens / (bench.layout.context * bench.layout.tensor)
    sent = tokens * bench.model.hidden_size * bench.shape.value_bytes * bench.model.num_hidden_layers / pipeline
    # Out in forward, and back in backward.
    return 2 * sent / bench.device.host_bandwidth


def estimate_optimizer_seconds(config: RunConfig, bench: KernelContext, pipeline: int) -> float:
    """Return the seconds of the moments' traffic, through the host where state lives there, and of the matmuls."""
    layout, rows = bench.layout, list_model_tensors(bench.model)
    spread = layout.shard * layout.context if config.engine.shards_optimizer_state else 1
    # Muon's matrices are assigned to the ranks that share them; SOAP's are gathered, and every rank repeats the work.
    workers = pipeline * (spread if config.optimizer.kind == "muon" else 1)
    flops = sum(row.num_copies * config.optimizer.count_step_flops(row.name, row.shape) for row in rows) / workers
    number: Number = "bf16" if bench.shape.value_bytes == 2 and config.optimizer.kind == "muon" else "fp32"
    matmuls = flops / (bench.device.get_peak_flops(number) * bench.device.efficiency.products) if flops else 0.0
    dense = sum(row.num_elements for row in rows if not row.is_routed) / (layout.tensor * pipeline * spread)
    sparse = sum(row.num_elements for row in rows if row.is_routed) / (
        pipeline * max(layout.expert, spread * layout.tensor)
    )
    moved = (dense + sparse) * config.optimizer.moved_bytes
    if getattr(config.engine, "cpu_offload", "none") != "none":
        return moved / bench.device.host_bandwidth
    return matmuls + bench.estimate_memory_seconds(moved)


@dataclass(frozen=True)
class StepTime:
    """One step. `parts` are seconds of the P50 by cause; utilisations are of the peak of the run's number type.

    `mfu` counts the operations of a model whose attention is causal-exact, once forward and twice
    backward (MFU); `full_mfu` all of s² (Chowdhery 2022, appendix B); `hfu` also what is
    computed again (HFU). `factor` is the calibrated residual that is in `seconds` and `parts`.
    """

    seconds: PercentileInterval
    parts: dict[str, float]
    ranks: int
    tokens: int
    mfu: float
    full_mfu: float
    hfu: float
    factor: float

    @property
    def tokens_per_second_per_device(self) -> float:
        """Throughput at the P50."""
        return self.tokens / self.seconds.p50 / self.ranks

    def to_dict(self) -> dict[str, Any]:
        """Plain values with stable keys."""
        return {
            "step_seconds": self.seconds.to_dict(),
            "parts_seconds": self.parts,
            "ranks": self.ranks,
            "tokens_per_second_per_device": self.tokens_per_second_per_device,
            "utilisation": {
                "model_causal": self.mfu,
                "model_full": self.full_mfu,
                "hardware": self.hfu,
            },
        }


def estimate_step_time(
    config: RunConfig,
    layout: ParallelLayout,
    device: DeviceProfile,
    *,
    pipeline: int = 1,
    interleave: int = 1,
    software: SoftwareProfile | None = None,
    documents: Sequence[int] = (),
) -> StepTime:
    """Estimate the time of one optimizer step of `config.batch` on layout.ranks_per_stage · pipeline devices.

    Args:
        config: resolved config of a run.
        layout: resolved layout, as `ParallelLayout.resolve` returns it.
        device: profile of the accelerator.
        pipeline: stages of a published layout; those of `layout` come first.
        interleave: chunks of the model per stage (interleaved 1F1B).
        software: training program; None: ours under this config.
        documents: lengths in tokens of packed documents, repeated until a sequence is full; none: one document.

    Returns:
        P10, P50 and P90 in seconds, with the parts of P50.
    """
    config = resolve_compile_for_profile(resolve_for_profile(config, device), device, layout)
    software = software or build_software_profile(config)
    if layout.pipeline > 1:
        pipeline, interleave = layout.pipeline, layout.pipeline_schedule.num_chunks
    bench = KernelContext(config.model, layout, device, software, _build_micro_batch_shape(config, layout, documents))
    work = estimate_kernel_seconds(bench)
    micro_batches = max(1.0, config.batch.sequences_per_step / (layout.data_parallel_size * bench.shape.sequences))
    parts = _estimate_part_seconds(config, bench, work, micro_batches, pipeline, interleave)
    ranks = layout.ranks_per_stage * pipeline
    factor = get_residual("step", config.model, device)
    seconds = factor.compute_interval(sum(parts.values()))
    parts = {name: value * factor.factor for name, value in parts.items()}
    return _build_step_time(config, device, bench, work, seconds, parts, ranks, factor.factor)


def compute_micro_sequences(config: RunConfig, layout: ParallelLayout) -> float:
    """Sequences of one forward pass of one rank."""
    share = config.batch.sequences_per_step / layout.data_parallel_size
    wanted = config.batch.micro_sequences
    return min(float(wanted), share) if isinstance(wanted, int) and wanted else share


def _build_micro_batch_shape(config: RunConfig, layout: ParallelLayout, documents: Sequence[int]) -> MicroBatchShape:
    source, length = config.sequence_lengths
    return MicroBatchShape(
        compute_micro_sequences(config, layout),
        length,
        source,
        config.train.resolved_precision,
        has_documents(config),
        tuple(documents),
    )


def _estimate_part_seconds(
    config: RunConfig, bench: KernelContext, work: KernelSeconds, micro_batches: float, pipeline: int, interleave: int
) -> dict[str, float]:
    """Seconds of the step by cause."""
    repeated = _estimate_recompute_seconds(config, bench, work)
    passes = PassSeconds(
        work.blocks_forward / pipeline,
        (work.blocks_backward + repeated) / pipeline,
        float(config.train.activation_checkpoint == "full"),
    )
    # Backward takes twice as long as forward. One stage has the head: the mean over stages.
    head = (3 * work.head + work.loss) / pipeline
    tensor = estimate_tensor_parallel_seconds(bench, passes, pipeline)
    attention = (work.attention + work.attention_backward) / pipeline
    context = estimate_context_parallel_seconds(bench, passes, pipeline, attention)
    expert = estimate_expert_parallel_seconds(bench, passes, pipeline)
    stages = estimate_pipeline_parallel_seconds(bench, pipeline, interleave)
    one = passes.forward + passes.backward + head + tensor + context + expert + stages
    imbalance = _compute_imbalance(config, bench.layout)
    scale = micro_batches / pipeline
    times = {
        "products": 3 * work.matmul * scale + head * micro_batches,
        "experts": 3 * work.grouped * scale,
        "attention": (work.attention + work.attention_backward) * scale,
        "elementwise": 3 * work.elementwise * scale,
        "recomputation": repeated * scale,
        "tensor": tensor * micro_batches,
        "context": context * micro_batches,
        "expert": expert * micro_batches,
        "stages": stages * micro_batches,
        # 1F1B; chunks of a stage shorten it as many times (Narayanan 2021). All wait for the costliest rank.
        "bubble": one * (pipeline - 1) / interleave + (imbalance - 1) * one * micro_batches,
        "data": estimate_data_parallel_seconds(bench, config.engine, passes, max(1, round(micro_batches)), pipeline),
        "optimizer": estimate_optimizer_seconds(config, bench, pipeline),
        "offload": (estimate_offload_seconds(bench, pipeline) + _estimate_copy_seconds(config, bench, passes))
        * micro_batches,
    }
    return times | {"host": estimate_host_seconds(bench, work, passes, micro_batches, pipeline)}


def _compute_imbalance(config: RunConfig, layout: ParallelLayout) -> float:
    if layout.pipeline == 1:
        return 1.0
    # Few estimates open this file.
    from llmsys.estimate.pipeline_stages import compute_imbalance

    return compute_imbalance(config.model, layout, config.batch.sequence_length)


def _estimate_copy_seconds(config: RunConfig, bench: KernelContext, passes: PassSeconds) -> float:
    """Seconds of one micro-batch that copies of saved tensors to host memory and back take longer than the blocks."""
    if config.train.activation_checkpoint != "offload":
        return 0.0
    # Few estimates open this file.
    from llmsys.estimate.activation_memory import compute_offloaded_activations

    copies = compute_offloaded_activations(config, bench.layout) / bench.device.host_bandwidth
    # Copies run next to each pass: what is longer than the pass shows.
    return max(0.0, copies - passes.forward) + max(0.0, copies - passes.backward)


def _estimate_recompute_seconds(config: RunConfig, bench: KernelContext, work: KernelSeconds) -> float:
    """Seconds of one micro-batch that backward computes again."""
    if config.train.activation_checkpoint in ("none", "offload"):
        return 0.0
    if config.train.activation_checkpoint == "full":
        return work.blocks_forward
    cheap = work.elementwise + bench.software.recomputed_matmuls * (work.matmul + work.grouped)
    return cheap + work.attention_repeated


def _build_step_time(
    config: RunConfig,
    device: DeviceProfile,
    bench: KernelContext,
    work: KernelSeconds,
    seconds: PercentileInterval,
    parts: dict[str, float],
    ranks: int,
    factor: float,
) -> StepTime:
    source, length = config.sequence_lengths
    sequences = config.batch.sequences_per_step
    counts = [
        count_flops(config.model, source, sequences, convention, target_length=length, documents=bench.shape.documents)
        for convention in ("causal", "full")
    ]
    possible = device.get_peak_flops(config.train.resolved_precision) * ranks * seconds.p50
    causal, full = counts
    # FLOPs in proportion to time.
    again = _estimate_recompute_seconds(config, bench, work) / max(work.blocks_forward, 1e-30) * causal.forward
    return StepTime(
        seconds=seconds,
        parts=parts,
        ranks=ranks,
        tokens=causal.tokens,
        mfu=causal.forward_backward / possible,
        full_mfu=full.forward_backward / possible,
        hfu=(causal.forward_backward + again) / possible,
        factor=factor,
    )
