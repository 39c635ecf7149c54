"""One way to run a config on a number of devices: engine, axes, recomputation and micro-batch,
legal or refused.

Legality is what the config and `Layout.fit` refuse; nothing is decided twice.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, assert_never

from pydantic import ValidationError

from llmsys.config.engine import (
    AccelerateEngineConfig,
    DeepSpeedEngineConfig,
    EngineConfig,
    TorchEngineConfig,
)
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.pipeline import (
    InterleavedScheduleConfig,
    OneForwardOneBackwardConfig,
    PipelineScheduleConfig,
)
from llmsys.config.run import RunConfig
from llmsys.config.section import list_divisors
from llmsys.errors import LayoutError
from llmsys.estimate.activation_memory import compute_offloaded_activations
from llmsys.estimate.cluster_costs import ClusterCosts
from llmsys.estimate.device_profile import DeviceProfile
from llmsys.estimate.memory_residual import format_fit_probability, get_memory_residual
from llmsys.estimate.memory_timeline import GIB, MemoryTimeline
from llmsys.estimate.peak_memory import estimate_peak_memory
from llmsys.estimate.software_profile import OURS, resolve_compile_for_profile
from llmsys.estimate.state_memory import compute_offloaded_bytes
from llmsys.estimate.step_time import StepTime, estimate_step_time

Recompute = Literal["none", "selective", "full", "offload"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
ENGINES: tuple[EngineConfig, ...] = (
    TorchEngineConfig(data_parallel="fsdp"),
    TorchEngineConfig(data_parallel="fsdp", gradient_accumulation="whole"),
    TorchEngineConfig(data_parallel="plain"),
    TorchEngineConfig(data_parallel="ddp"),
    DeepSpeedEngineConfig(zero_stage=1),
    DeepSpeedEngineConfig(zero_stage=2),
    DeepSpeedEngineConfig(zero_stage=3),
)
# Offload choices, tried only if nothing else fits: they cost time in every step.
OFFLOADED: tuple[EngineConfig, ...] = (
    TorchEngineConfig(data_parallel="fsdp", cpu_offload="state"),
    DeepSpeedEngineConfig(zero_stage=2, cpu_offload="optimizer"),
    DeepSpeedEngineConfig(zero_stage=3, cpu_offload="optimizer"),
)

# Settings that a plan chooses for each kind of engine; all others are those of the config.
CHOSEN_SETTINGS: dict[str, tuple[str, ...]] = {
    "torch": ("data_parallel", "cpu_offload", "gradient_accumulation"),
    "deepspeed": ("zero_stage", "cpu_offload"),
    "accelerate": (),
}

# A peak is known to a few per cent (memory_residual.py): at 90 % one layout in ten that looks as
# good runs out of memory, and about 6 % of a device stay free.
MIN_FIT_PROBABILITY = 0.9

# GPipe has the bubble of 1F1B and holds more micro-batches.
SCHEDULES: tuple[PipelineScheduleConfig, ...] = (
    OneForwardOneBackwardConfig(),
    InterleavedScheduleConfig(),
)


@dataclass(frozen=True)
class LayoutCandidate:
    """Choice of a plan. Axes as in Layout; `micro_sequences` are windows in one forward pass of
    one rank.
    """

    engine: EngineConfig
    replicate: int
    shard: int
    context: int
    tensor: int
    expert: int
    recompute: Recompute
    micro_sequences: int
    context_kind: Literal["ulysses", "ring", "ulysses_ring"] = "ulysses"
    ring: int = 2
    pipeline: int = 1
    schedule: PipelineScheduleConfig = SCHEDULES[0]

    @property
    def layout(self) -> ParallelLayout:
        """The axes as a section."""
        return ParallelLayout(
            replicate=self.replicate,
            shard=self.shard,
            context=self.context,
            context_kind=self.context_kind,
            ring=self.ring,
            tensor=self.tensor,
            expert=self.expert,
            pipeline=self.pipeline,
            pipeline_schedule=self.schedule,
        )

    def list_micro_sizes(self) -> list[int]:
        """List the micro-batches to try, up to `micro_sequences`: divisors of it that the
        schedule takes.
        """
        share, schedule = self.micro_sequences, self.schedule
        return [
            size
            for size in list_divisors(share)
            if (size <= 64 or size == share)
            and (
                self.pipeline == 1
                or schedule.find_micro_batch_problem(self.pipeline, share // size) is None
            )
        ]

    def format_layout(self) -> str:
        """For tables: the engine, and every axis that is more than 1."""
        axes = ("pipeline", "replicate", "shard", "context", "tensor", "expert")
        sizes = [f"{axis}={getattr(self, axis)}" for axis in axes if getattr(self, axis) > 1]
        sizes += [self.context_kind] if self.context_kind != "ulysses" else []
        sizes += [f"ring={self.ring}"] if self.context_kind == "ulysses_ring" else []
        sizes += [self.schedule.kind] if self.pipeline > 1 else []
        return " ".join(
            [
                format_engine_name(self.engine),
                *sizes,
                f"micro={self.micro_sequences}",
                f"{self.recompute}",
            ]
        )


@dataclass(frozen=True)
class EstimatedCandidate:
    """A legal choice with what it takes."""

    choice: LayoutCandidate
    config: RunConfig
    memory: MemoryTimeline
    step: StepTime

    @property
    def step_seconds(self) -> float:
        """P50 of a step."""
        return self.step.seconds.p50


@dataclass(frozen=True)
class PlanTarget:
    """Device profile and cluster of a run.

    Attributes:
        cluster: devices with their prices and failure rates.
        device: profile of each.
        min_fit_probability: probability to fit from which a layout is planned with.
    """

    cluster: ClusterCosts
    device: DeviceProfile
    min_fit_probability: float = MIN_FIT_PROBABILITY

    def explain_rejection(self, one: EstimatedCandidate) -> str | None:
        """Return the reason why a candidate does not fit; None where it fits."""
        return self.explain_memory_rejection(one.memory, one.config, one.choice.layout)

    def estimate_memory(self, config: RunConfig, layout: ParallelLayout) -> MemoryTimeline:
        """Estimate the memory of a rank on this device, which decides whether train.compile=auto
        compiles
        blocks.

        Args:
            config: resolved config of a run.
            layout: resolved layout.
        """
        system = replace(OURS, expert_load=self.cluster.expert_load)
        return estimate_peak_memory(
            resolve_compile_for_profile(config, self.device, layout), layout, system=system
        )

    def estimate_step(self, config: RunConfig, layout: ParallelLayout) -> StepTime:
        """Estimate the time of a step on this device.

        Args:
            config: resolved config of a run.
            layout: resolved layout.
        """
        return estimate_step_time(config, layout, self.device, expert_load=self.cluster.expert_load)

    def compute_fit_probability(self, memory: MemoryTimeline, num_ranks: int) -> float:
        """Compute the probability that the fullest rank fits this device.

        Args:
            memory: estimated timeline.
            num_ranks: devices of the layout.

        Returns:
            A number from 0 to 1.
        """
        residual = get_memory_residual(num_ranks)
        return residual.compute_fit_probability(memory, self.device.memory_bytes)

    def _explain_device_rejection(self, memory: MemoryTimeline, num_ranks: int) -> str | None:
        probability = self.compute_fit_probability(memory, num_ranks)
        if probability >= self.min_fit_probability:
            return None
        verdict = format_fit_probability(probability)
        over = memory.peak_bytes + memory.driver_bytes - int(self.device.memory_bytes)
        if over > 0:
            return f"memory: {over / GIB:.1f} GiB over capacity {memory.peak_instant}; it {verdict}"
        usable = get_memory_residual(num_ranks).compute_usable_bytes(
            memory.driver_bytes, self.device.memory_bytes, self.min_fit_probability
        )
        return (
            f"memory: it {verdict}, less than {self.min_fit_probability:.0%}; "
            f"{(memory.peak_bytes - usable) / GIB:.1f} GiB too much {memory.peak_instant}"
        )

    def explain_memory_rejection(
        self, memory: MemoryTimeline, config: RunConfig, layout: ParallelLayout
    ) -> str | None:
        """The same before its time is known."""
        if (refusal := self._explain_device_rejection(memory, layout.world_size)) is not None:
            return refusal
        ranks = min(self.device.node_devices, layout.world_size)
        # Under 1F1B the first of p stages keeps p micro-batches of 1/p of the layers.
        kept = compute_offloaded_bytes(config, layout) + compute_offloaded_activations(
            config, layout
        )
        host = kept * ranks - self.cluster.host_memory_bytes
        return (
            f"host memory: {host / GIB:.0f} GiB over the capacity of one machine"
            if host > 0
            else None
        )


class IllegalLayoutError(Exception):
    """A candidate breaks a rule of the config; the message is the config's."""


def format_engine_name(engine: EngineConfig) -> str:
    """fsdp, fsdp+whole (gradients), ddp, zero-2, accelerate; with what is offloaded."""
    match engine:
        case AccelerateEngineConfig():
            return "accelerate"
        case TorchEngineConfig():
            name: str = engine.data_parallel
            # under the other kinds it has no meaning
            if engine.is_fsdp and engine.gradient_accumulation == "whole":
                name += "+whole"
        case DeepSpeedEngineConfig():
            name = f"zero-{engine.zero_stage}"
        case unreachable:
            assert_never(unreachable)
    return name if engine.cpu_offload == "none" else f"{name}+offload"


def list_policies(config: RunConfig, engine: EngineConfig) -> tuple[Recompute, ...]:
    """Return the choices of `train.activation_checkpoint` to try; compiled blocks and DeepSpeed
    offload nothing.
    """
    can_offload = config.train.compile == "none" and isinstance(engine, TorchEngineConfig)
    return (*RECOMPUTE, "offload") if can_offload else RECOMPUTE


def apply_candidate(config: RunConfig, choice: LayoutCandidate) -> RunConfig:
    """The config with the choice in it. Raises IllegalLayoutError with the config's own words."""
    given = {name: getattr(config, name) for name in config.model_fields_set}
    try:
        made = RunConfig.model_validate(given | _list_changes(config, choice))
        made.resolve_layout(choice.layout.world_size)
    except LayoutError as error:
        raise IllegalLayoutError(str(error)) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise IllegalLayoutError(first["msg"]) from None
    require_divisible(config, choice)
    return made


def require_divisible(config: RunConfig, choice: LayoutCandidate) -> None:
    """Raise IllegalLayoutError where the sequences of a step do not divide over data ranks and
    micro-batches.

    Args:
        config: resolved config of a run.
        choice: a layout with its micro-batch.

    Raises:
        IllegalLayoutError: with both numbers.
    """
    sequences, ranks = config.batch.sequences_per_step, choice.replicate * choice.shard
    if sequences % ranks:
        raise IllegalLayoutError(
            f"{sequences} sequences of a step cannot be divided evenly over {ranks} data ranks"
        )
    if (sequences // ranks) % choice.micro_sequences:
        share = sequences // ranks
        raise IllegalLayoutError(
            f"micro={choice.micro_sequences} does not divide the {share} sequences of a rank"
        )


def replace_config(config: RunConfig, choice: LayoutCandidate) -> RunConfig:
    """Return the config with the choice in it, not validated.

    Args:
        config: config of a run.
        choice: a layout.

    Returns:
        A copy.
    """
    return config.model_copy(update=_list_changes(config, choice))


def _list_changes(config: RunConfig, choice: LayoutCandidate) -> dict[str, Any]:
    return {
        "engine": choice.engine,
        "layout": choice.layout,
        "batch": config.batch.model_copy(update={"micro_sequences": choice.micro_sequences}),
        "train": config.train.model_copy(update={"activation_checkpoint": choice.recompute}),
    }


def estimate_candidate(
    config: RunConfig, choice: LayoutCandidate, place: PlanTarget
) -> EstimatedCandidate:
    """Memory and time of a choice. Raises IllegalLayoutError."""
    return estimate_validated(apply_candidate(config, choice), choice, place)


def estimate_validated(
    made: RunConfig, choice: LayoutCandidate, place: PlanTarget
) -> EstimatedCandidate:
    """Estimate memory and time of a choice that differs from a legal one in its micro-batch at
    most.

    Args:
        made: config of the legal choice.
        choice: the choice.
        place: device profile and cluster.

    Returns:
        The estimate.
    """
    made = replace_config(made, choice)
    memory = place.estimate_memory(made, choice.layout)
    return EstimatedCandidate(choice, made, memory, place.estimate_step(made, choice.layout))
