"""One way to run a config on a number of devices: engine, axes, recomputation and micro-batch, legal or refused.

Legality is what the config and `Layout.fit` refuse; nothing is decided twice.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, assert_never

from pydantic import ValidationError

from llmsys.config.engine import AccelerateEngineConfig, DeepSpeedEngineConfig, EngineConfig, TorchEngineConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.config.section import list_divisors
from llmsys.errors import LayoutError
from llmsys.estimate.cluster_costs import ClusterCosts
from llmsys.estimate.device_profile import DeviceProfile
from llmsys.estimate.memory_timeline import GIB, MemoryTimeline
from llmsys.estimate.peak_memory import estimate_peak_memory
from llmsys.estimate.state_memory import compute_offloaded_bytes
from llmsys.estimate.step_time import StepTime, estimate_step_time

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
ENGINES: tuple[EngineConfig, ...] = (
    TorchEngineConfig(),
    TorchEngineConfig(data_parallel="ddp"),
    DeepSpeedEngineConfig(zero_stage=1),
    DeepSpeedEngineConfig(zero_stage=2),
    DeepSpeedEngineConfig(zero_stage=3),
)
# Offload choices, tried only if nothing else fits: they cost time in every step.
OFFLOADED: tuple[EngineConfig, ...] = (
    TorchEngineConfig(cpu_offload="state"),
    DeepSpeedEngineConfig(zero_stage=2, cpu_offload="optimizer"),
    DeepSpeedEngineConfig(zero_stage=3, cpu_offload="optimizer"),
)

# Positions of each rank from which a plan tries a ring: below, messages outlast the products of a step.
MIN_RING_POSITIONS = 4096


@dataclass(frozen=True)
class LayoutCandidate:
    """Choice of a plan. Axes as in Layout; `micro_sequences` are windows in one forward pass of one rank."""

    engine: EngineConfig
    replicate: int
    shard: int
    context: int
    tensor: int
    expert: int
    recompute: Recompute
    micro_sequences: int
    context_kind: Literal["ulysses", "ring"] = "ulysses"

    @property
    def layout(self) -> ParallelLayout:
        """The axes as a section."""
        return ParallelLayout(
            replicate=self.replicate,
            shard=self.shard,
            context=self.context,
            context_kind=self.context_kind,
            tensor=self.tensor,
            expert=self.expert,
        )

    def format_layout(self) -> str:
        """For tables: the engine, and every axis that is more than 1."""
        axes = ("replicate", "shard", "context", "tensor", "expert")
        sizes = [f"{axis}={getattr(self, axis)}" for axis in axes if getattr(self, axis) > 1]
        sizes += [self.context_kind] if self.context_kind != "ulysses" else []
        return " ".join([format_engine_name(self.engine), *sizes, f"micro={self.micro_sequences}", f"{self.recompute}"])


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
    """Device profile and cluster of a run."""

    cluster: ClusterCosts
    device: DeviceProfile

    def explain_rejection(self, one: EstimatedCandidate) -> str | None:
        """Return the reason why a candidate does not fit; None where it fits."""
        return self.explain_memory_rejection(one.memory, one.config, one.choice.layout)

    def explain_memory_rejection(self, memory: MemoryTimeline, config: RunConfig, layout: ParallelLayout) -> str | None:
        """The same before its time is known."""
        over = memory.peak_bytes + memory.driver_bytes - int(self.device.memory_bytes)
        if over > 0:
            return f"memory: {over / GIB:.1f} GiB over capacity {memory.peak_instant}"
        ranks = min(self.device.node_devices, layout.world_size)
        host = compute_offloaded_bytes(config, layout) * ranks - self.cluster.host_memory_bytes
        return f"host memory: {host / GIB:.0f} GiB over the capacity of one machine" if host > 0 else None


class IllegalLayoutError(Exception):
    """A candidate breaks a rule of the config; the message is the config's."""


def format_engine_name(engine: EngineConfig) -> str:
    """fsdp, ddp, zero-2, accelerate; with what is offloaded."""
    match engine:
        case AccelerateEngineConfig():
            return "accelerate"
        case TorchEngineConfig():
            name: str = engine.data_parallel
        case DeepSpeedEngineConfig():
            name = f"zero-{engine.zero_stage}"
        case unreachable:
            assert_never(unreachable)
    return name if engine.cpu_offload == "none" else f"{name}+offload"


def apply_candidate(config: RunConfig, choice: LayoutCandidate) -> RunConfig:
    """The config with the choice in it. Raises IllegalLayoutError with the config's own words."""
    given = {name: getattr(config, name) for name in config.model_fields_set}
    changes: dict[str, Any] = {
        "engine": choice.engine,
        "layout": choice.layout,
        "batch": config.batch.model_copy(update={"micro_sequences": choice.micro_sequences}),
        "train": config.train.model_copy(update={"activation_checkpoint": choice.recompute}),
    }
    try:
        made = RunConfig.model_validate(given | changes)
        made.resolve_layout(choice.layout.world_size)
    except LayoutError as error:
        raise IllegalLayoutError(str(error)) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise IllegalLayoutError(first["msg"]) from None
    sequences, ranks = config.batch.sequences_per_step, choice.layout.data_parallel_size
    if sequences % ranks:
        raise IllegalLayoutError(f"{sequences} sequences of a step cannot be divided evenly over {ranks} data ranks")
    if (sequences // ranks) % choice.micro_sequences:
        share = sequences // ranks
        raise IllegalLayoutError(f"micro={choice.micro_sequences} does not divide the {share} sequences of a rank")
    return made


def estimate_candidate(config: RunConfig, choice: LayoutCandidate, place: PlanTarget) -> EstimatedCandidate:
    """Memory and time of a choice. Raises IllegalLayoutError."""
    made = apply_candidate(config, choice)
    return EstimatedCandidate(
        choice, made, estimate_peak_memory(made, choice.layout), estimate_step_time(made, choice.layout, place.device)
    )


def iter_candidates(
    config: RunConfig, place: PlanTarget, engines: tuple[EngineConfig, ...]
) -> Iterator[LayoutCandidate]:
    """Every combination of axes whose product is the number of devices, with the largest micro-batch of each.

    `tensor` stays inside a machine, where its traffic belongs.
    """
    world, model = place.cluster.devices, config.model
    experts = [1] if model.moe is None else list_divisors(model.moe.num_experts)
    for engine in engines:
        for tensor in list_divisors(world):
            if tensor > min(place.device.node_devices, model.num_attention_heads):
                break
            for context in list_divisors(world // tensor):
                is_ring = context * tensor > model.num_attention_heads
                # A ring is for sequences that heads cannot divide far enough.
                if is_ring and config.batch.sequence_length < MIN_RING_POSITIONS * context:
                    break
                rest = world // tensor // context
                for replicate in list_divisors(rest):
                    shard = rest // replicate
                    # DDP's ranks are all copies; FSDP with copies only would be DDP.
                    if isinstance(engine, TorchEngineConfig) and engine.shards_weights == (replicate == rest > 1):
                        continue
                    for expert in experts:
                        if (shard * context * tensor) % expert == 0:
                            share = max(1, config.batch.sequences_per_step // (replicate * shard))
                            kind: Literal["ulysses", "ring"] = "ring" if is_ring else "ulysses"
                            yield LayoutCandidate(
                                engine, replicate, shard, context, tensor, expert, "none", share, kind
                            )
