"""Seconds of one optimizer step, as an honest interval, and what they are spent on.

Reads a config, a resolved layout and a device; gives P10, P50 and P90 with the parts of P50. The model is kernels plus
what of the communication nothing hides, times a residual whose spread was calibrated on named published rows
(`residual.yaml`). It is in-step time: `goodput` says what a whole run takes.
"""

from dataclasses import dataclass
from typing import Any

from llmsys.config.layout import Layout
from llmsys.config.run import RunConfig
from llmsys.estimate.activation import batch_lengths
from llmsys.estimate.device import Device
from llmsys.estimate.flops import count_flops
from llmsys.estimate.interval import Interval
from llmsys.estimate.kernels import Kernels, kernels
from llmsys.estimate.overhead import host_seconds, offload_seconds, optimizer_seconds
from llmsys.estimate.precision import resolve_for_profile
from llmsys.estimate.residual import residual
from llmsys.estimate.software import Software, software_of
from llmsys.estimate.traffic import (
    Passes,
    context_seconds,
    data_seconds,
    expert_seconds,
    sharding_of,
    stage_seconds,
    tensor_seconds,
)
from llmsys.estimate.workbench import Bench, Shape


@dataclass(frozen=True)
class StepTime:
    """One step. `parts` are seconds of the P50 by cause; utilisations are of the peak of the run's number type.

    `model_utilisation` counts the operations of a model whose attention is causal-exact, once forward and twice
    backward (MFU); `full_utilisation` all of s² (Chowdhery 2022, appendix B); `hardware_utilisation` also what is
    computed again (HFU). `factor` is the calibrated residual that is in `seconds` and `parts`.
    """

    seconds: Interval
    parts: dict[str, float]
    ranks: int
    tokens: int
    model_utilisation: float
    full_utilisation: float
    hardware_utilisation: float
    factor: float

    @property
    def tokens_per_second_per_device(self) -> float:
        """Throughput at the P50."""
        return self.tokens / self.seconds.p50 / self.ranks

    def as_data(self) -> dict[str, Any]:
        """Plain values with stable keys."""
        return {
            "step_seconds": self.seconds.as_data(),
            "parts_seconds": self.parts,
            "ranks": self.ranks,
            "tokens_per_second_per_device": self.tokens_per_second_per_device,
            "utilisation": {
                "model_causal": self.model_utilisation,
                "model_full": self.full_utilisation,
                "hardware": self.hardware_utilisation,
            },
        }


def step_time(
    config: RunConfig,
    layout: Layout,
    device: Device,
    *,
    pipeline: int = 1,
    interleave: int = 1,
    software: Software | None = None,
) -> StepTime:
    """Time of one optimizer step of `config.batch` on layout.world_size · pipeline devices.

    `layout` must be resolved (`Layout.fit`). Our engines have no pipeline: `pipeline` stages with `interleave` parts
    each are for published layouts. `software` is ours under this config, unless given.
    """
    config = resolve_for_profile(config, device)
    software = software or software_of(config)
    bench = Bench(config.model, layout, device, software, _shape(config, layout))
    work = kernels(bench)
    micro_batches = max(1.0, config.batch.sequences_per_step / (layout.data_ranks * bench.shape.sequences))
    parts = _parts(config, bench, work, micro_batches, pipeline, interleave)
    ranks = layout.world_size * pipeline
    factor = residual("step", config.model, device)
    seconds = factor.around(sum(parts.values()))
    parts = {name: value * factor.factor for name, value in parts.items()}
    return _result(config, device, bench, work, seconds, parts, ranks, factor.factor)


def micro_sequences(config: RunConfig, layout: Layout) -> float:
    """Sequences of one forward pass of one rank."""
    share = config.batch.sequences_per_step / layout.data_ranks
    wanted = config.batch.micro_sequences
    return min(float(wanted), share) if isinstance(wanted, int) and wanted else share


def _shape(config: RunConfig, layout: Layout) -> Shape:
    source, length = batch_lengths(config)
    return Shape(micro_sequences(config, layout), length, source, config.train.resolved_precision)


def _parts(
    config: RunConfig, bench: Bench, work: Kernels, micro_batches: float, pipeline: int, interleave: int
) -> dict[str, float]:
    """Seconds of the step by cause."""
    repeated = _repeated(config, bench, work)
    passes = Passes(
        work.blocks_forward / pipeline,
        (work.blocks_backward + repeated) / pipeline,
        float(config.train.recompute == "block"),
    )
    head = (3 * work.head + work.loss) / pipeline
    tensor = tensor_seconds(bench, passes, pipeline)
    context = context_seconds(bench, passes, pipeline)
    expert = expert_seconds(bench, passes, pipeline)
    stages = stage_seconds(bench, pipeline, interleave)
    one = passes.forward + passes.backward + head + tensor + context + expert + stages
    scale = micro_batches / pipeline
    times = {
        "products": 3 * work.products * scale + head * micro_batches,
        "experts": 3 * work.grouped * scale,
        "attention": (work.attention + work.attention_backward) * scale,
        "elementwise": 3 * work.elementwise * scale,
        "recomputation": repeated * scale,
        "tensor": tensor * micro_batches,
        "context": context * micro_batches,
        "expert": expert * micro_batches,
        "stages": stages * micro_batches,
        "bubble": one * (pipeline - 1) / interleave,
        "data": data_seconds(bench, sharding_of(config), passes, max(1, round(micro_batches)), pipeline),
        "optimizer": optimizer_seconds(config, bench, pipeline),
        "offload": offload_seconds(bench, pipeline) * micro_batches,
    }
    return times | {"host": host_seconds(bench, work, passes, micro_batches, pipeline)}


def _repeated(config: RunConfig, bench: Bench, work: Kernels) -> float:
    """Seconds of one micro-batch that backward computes again."""
    if config.train.recompute == "none":
        return 0.0
    if config.train.recompute == "block":
        return work.blocks_forward
    cheap = work.elementwise + bench.software.repeated_products * (work.products + work.grouped)
    return cheap + (work.attention if bench.software.attention == "unfused" else 0.0)


def _result(
    config: RunConfig,
    device: Device,
    bench: Bench,
    work: Kernels,
    seconds: Interval,
    parts: dict[str, float],
    ranks: int,
    factor: float,
) -> StepTime:
    source, length = batch_lengths(config)
    sequences = config.batch.sequences_per_step
    counts = [
        count_flops(config.model, source, sequences, convention, target_length=length)
        for convention in ("causal", "full")
    ]
    possible = device.peak(config.train.resolved_precision) * ranks * seconds.p50
    causal, full = counts
    again = _repeated(config, bench, work) / max(work.blocks_forward, 1e-30) * causal.forward
    return StepTime(
        seconds=seconds,
        parts=parts,
        ranks=ranks,
        tokens=causal.tokens,
        model_utilisation=causal.forward_backward / possible,
        full_utilisation=full.forward_backward / possible,
        hardware_utilisation=(causal.forward_backward + again) / possible,
        factor=factor,
    )
