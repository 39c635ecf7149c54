"""Seconds of one optimizer step: kernels, collectives, optimizer, offload and host.

Reads a config, a resolved layout and a device; gives P10, P50 and P90 with the parts of P50. The
model is kernels plus what of the communication nothing hides, times a residual whose spread was
calibrated on named published rows (`residual.yaml`). It is in-step time: `goodput` says what a
whole run takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from llmsys.config.engine import DeepSpeedEngineConfig, EngineConfig
from llmsys.config.model import ModelConfig
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
from llmsys.estimate.data_parallel_choice import resolve_data_parallel_for_profile
from llmsys.estimate.device_profile import DeviceProfile
from llmsys.estimate.flops import CONVENTIONS, Convention, FlopsCount, count_flops
from llmsys.estimate.host_time import (
    estimate_copy_seconds,
    estimate_host_seconds,
    estimate_offload_seconds,
)
from llmsys.estimate.json_output import StepSeconds, Utilisation
from llmsys.estimate.kernel_context import (
    KernelContext,
    MatmulDtype,
    MicroBatchShape,
    require_matmul_dtype,
    select_matmul_dtypes,
)
from llmsys.estimate.kernel_time import KernelSeconds, estimate_kernel_seconds
from llmsys.estimate.local_copies import estimate_local_copy_seconds
from llmsys.estimate.optimizer_time import estimate_optimizer_seconds
from llmsys.estimate.percentile_interval import PercentileInterval
from llmsys.estimate.program_profile import ProgramProfile, load_own_program
from llmsys.estimate.residual_model import ResidualModel, get_residual
from llmsys.estimate.software_profile import resolve_compile_for_profile, resolve_for_profile


@dataclass(frozen=True)
class StepTime:
    """One step. `parts` are seconds of the P50 by cause; utilisations are of the peak of the run's
    number type.

    `mfu` counts the operations of a model whose attention is causal-exact, once forward and twice
    backward (MFU); `full_mfu` all of s² (Chowdhery 2022, appendix B); `hfu` also what is
    computed again (HFU). `factor` is the calibrated residual that is in `seconds` and `parts`,
    `spread` the standard deviation of their logarithm, and `between` its part between programs.
    """

    seconds: PercentileInterval
    parts: dict[str, float]
    ranks: int
    tokens: int
    mfu: float
    full_mfu: float
    hfu: float
    factor: float
    spread: float = 0.0
    between: float = 0.0

    @property
    def tokens_per_second_per_device(self) -> float:
        """Throughput at the P50."""
        return self.tokens / self.seconds.p50 / self.ranks

    def to_output(self) -> StepSeconds:
        """Return the step as `llmsys estimate --json` prints it."""
        return StepSeconds(
            step_seconds=self.seconds,
            parts_seconds=self.parts,
            residual_factor=self.factor,
            residual_spread=self.spread,
            program_spread=self.between,
            ranks=self.ranks,
            tokens_per_second_per_device=self.tokens_per_second_per_device,
            utilisation=Utilisation(
                model_causal=self.mfu, model_full=self.full_mfu, hardware=self.hfu
            ),
        )


def estimate_step_time(
    config: RunConfig,
    layout: ParallelLayout,
    device: DeviceProfile,
    *,
    pipeline: int = 1,
    interleave: int = 1,
    program: ProgramProfile | None = None,
    matmul_dtype: MatmulDtype | None = None,
    documents: Sequence[int] = (),
    expert_load: float = 1.0,
) -> StepTime:
    """Estimate the time of one optimizer step of `config.batch` on layout.ranks_per_stage ·
    pipeline devices.

    Args:
        config: resolved config of a run.
        layout: resolved layout, as `ParallelLayout.resolve` returns it.
        device: profile of the accelerator.
        pipeline: stages of a published layout; those of `layout` come first.
        interleave: chunks of the model per stage (interleaved 1F1B).
        program: training program; None: llmsys under this config.
        matmul_dtype: type of the inputs of matmuls in blocks; None: those of the config.
        documents: lengths in tokens of packed documents, repeated until a sequence is full; none:
            one document.
        expert_load: tokens of the fullest rank of experts over the mean; all others wait for it.

    Returns:
        P10, P50 and P90 in seconds, with the parts of P50.
    """
    config = resolve_compile_for_profile(resolve_for_profile(config, device), device, layout)
    config = resolve_data_parallel_for_profile(config, layout, device)
    program = program or load_own_program(config)
    dtypes = select_matmul_dtypes(config) if matmul_dtype is None else (matmul_dtype, matmul_dtype)
    for dtype in dtypes:
        require_matmul_dtype(dtype, device)
    if layout.pipeline > 1:
        pipeline, interleave = layout.pipeline, layout.pipeline_schedule.num_chunks
    shape = _build_micro_batch_shape(config, layout, documents)
    # Without an expert axis every rank has all experts, and so as many tokens as the others.
    load = expert_load if layout.expert > 1 else 1.0
    bench = KernelContext(
        config.model, layout, device, program.time, shape, *dtypes, expert_load=load
    )
    work = estimate_kernel_seconds(bench)
    micro_batches = max(
        1.0, config.batch.sequences_per_step / (layout.data_parallel_size * bench.shape.sequences)
    )
    # Weights that stay gathered travel once a step, as those of ZeRO-1.
    is_whole = pipeline > 1 and program.build_memory_profile(pipeline).weights == "whole"
    engine = DeepSpeedEngineConfig(zero_stage=1) if is_whole else config.engine
    parts = _estimate_part_seconds(config, engine, bench, work, micro_batches, pipeline, interleave)
    ranks = layout.ranks_per_stage * pipeline
    residual = get_residual("step", config.model, device, program)
    seconds = residual.compute_interval(sum(parts.values()))
    parts = {name: value * residual.factor for name, value in parts.items()}
    return _build_step_time(config, device, bench, work, seconds, parts, ranks, residual)


def compute_micro_sequences(config: RunConfig, layout: ParallelLayout) -> float:
    """Sequences of one forward pass of one rank."""
    share = config.batch.sequences_per_step / layout.data_parallel_size
    wanted = config.batch.micro_sequences
    return min(float(wanted), share) if isinstance(wanted, int) and wanted else share


def _build_micro_batch_shape(
    config: RunConfig, layout: ParallelLayout, documents: Sequence[int]
) -> MicroBatchShape:
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
    config: RunConfig,
    engine: EngineConfig,
    bench: KernelContext,
    work: KernelSeconds,
    micro_batches: float,
    pipeline: int,
    interleave: int,
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
    imbalance = _compute_imbalance(config, bench, one, head, pipeline)
    scale = micro_batches / pipeline
    times = {
        "products": 3 * work.matmul * scale + head * micro_batches,
        "experts": 3 * work.grouped * scale,
        "attention": (work.attention + work.attention_backward) * scale,
        "elementwise": 3 * work.elementwise * scale,
        "permutation": 3 * work.permutation * scale,
        "recomputation": repeated * scale,
        "tensor": tensor * micro_batches,
        "context": context * micro_batches,
        "expert": expert * micro_batches,
        "stages": stages * micro_batches,
        # 1F1B; chunks of a stage shorten it as many times (Narayanan 2021). All wait for the
        # costliest rank.
        "bubble": bench.software.bubble * one * (pipeline - 1) / interleave
        + (imbalance - 1) * one * micro_batches,
        "data": estimate_data_parallel_seconds(
            bench, engine, passes, max(1, round(micro_batches)), pipeline
        ),
        "copies": (
            estimate_local_copy_seconds(engine, bench, max(1, round(micro_batches)), pipeline)
            if bench.software.counts_wrapper
            else 0.0
        ),
        "optimizer": estimate_optimizer_seconds(config, bench, pipeline),
        "offload": (
            estimate_offload_seconds(bench, pipeline) + estimate_copy_seconds(config, bench, passes)
        )
        * micro_batches,
    }
    if config.train.reproducibility == "bitwise":
        # Few estimates open this file.
        from llmsys.estimate.bitwise_time import estimate_bitwise_seconds

        times["bitwise"] = estimate_bitwise_seconds(config, bench, work, micro_batches, pipeline)
    host = estimate_host_seconds(engine, bench, work, passes, micro_batches, pipeline)
    return times | {"host": host}


def _compute_imbalance(
    config: RunConfig, bench: KernelContext, one: float, head: float, pipeline: int
) -> float:
    """Return the seconds of the costliest rank of a pipeline over the mean of its ranks."""
    layout, layers = bench.layout, config.model.num_hidden_layers
    if layout.pipeline > 1:
        # Few estimates open this file.
        from llmsys.estimate.pipeline_stages import compute_imbalance

        return compute_imbalance(config.model, layout, config.batch.sequence_length)
    if pipeline == 1 or bench.software.stages == "balanced":
        return 1.0
    # `one` and `head` are means over the stages.
    block, whole_head = (one - head) * pipeline / layers, head * pipeline
    if layers % pipeline == 0:
        return (layers // pipeline * block + whole_head) / one
    # Embedding and head count as a block each (Megatron's account_for_embedding and
    # account_for_loss).
    slots = -(-(layers + 2) // pipeline)
    return max(slots * block, (slots - 1) * block + whole_head) / one


def _estimate_recompute_seconds(
    config: RunConfig, bench: KernelContext, work: KernelSeconds
) -> float:
    """Seconds of one micro-batch that backward computes again."""
    if config.train.activation_checkpoint in ("none", "offload"):
        return 0.0
    if config.train.activation_checkpoint == "full":
        is_needed = bench.software.repeats == "needed"
        return work.blocks_forward - (work.unneeded if is_needed else 0.0)
    cheap = (
        work.elementwise
        + work.permutation
        + bench.software.recomputed_matmuls * (work.matmul + work.grouped)
    )
    return cheap + work.attention_repeated


@lru_cache(maxsize=64)  # a plan asks for those of one batch thousands of times
def _count_step_flops(
    model: ModelConfig,
    source: int,
    length: int,
    sequences: int,
    convention: Convention,
    documents: tuple[int, ...],
) -> FlopsCount:
    return count_flops(
        model, source, sequences, convention, target_length=length, documents=documents
    )


def _build_step_time(
    config: RunConfig,
    device: DeviceProfile,
    bench: KernelContext,
    work: KernelSeconds,
    seconds: PercentileInterval,
    parts: dict[str, float],
    ranks: int,
    residual: ResidualModel,
) -> StepTime:
    source, length = config.sequence_lengths
    sequences = config.batch.sequences_per_step
    causal, full = (
        _count_step_flops(
            config.model, source, length, sequences, convention, bench.shape.documents
        )
        for convention in CONVENTIONS[:2]
    )
    possible = device.get_peak_flops(config.train.resolved_precision) * ranks * seconds.p50
    # FLOPs in proportion to time.
    again = (
        _estimate_recompute_seconds(config, bench, work)
        / max(work.blocks_forward, 1e-30)
        * causal.forward
    )
    return StepTime(
        seconds=seconds,
        parts=parts,
        ranks=ranks,
        tokens=causal.tokens,
        mfu=causal.forward_backward / possible,
        full_mfu=full.forward_backward / possible,
        hfu=(causal.forward_backward + again) / possible,
        factor=residual.factor,
        spread=residual.spread,
        between=residual.between,
    )
