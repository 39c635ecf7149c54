"""Peak memory of a rank over the instants of a training step, and changes of the config that lower
it.

`MemoryProfile` names the training program and its kernels; the default is ours on a GPU, as its
allocator reports it (max_memory_reserved). Changes are ordered from the cheapest in time to the
most expensive.

`batch.micro_sequences: auto` takes the largest micro-batch whose estimate fits a rank's memory.
Larger micro-batches keep the processor busier and repeat FSDP's gathering of weights less often;
what a forward pass keeps grows with them. Every step is cut into equal ones, so the choice is among
the divisors of a rank's share."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Any, assert_never

from llmsys.config.engine import AccelerateEngineConfig, DeepSpeedEngineConfig, TorchEngineConfig
from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.pipeline import list_legal_micro_sequences
from llmsys.config.run import RunConfig
from llmsys.config.section import list_divisors
from llmsys.errors import ConfigError
from llmsys.estimate.activation_memory import (
    build_activation_shape,
    compute_micro_batch,
    iter_block_groups,
    list_loss_items,
    sum_logits_bytes,
)
from llmsys.estimate.memory_timeline import GIB, MemoryTimeline, SuggestedFix, select_saved_tensors
from llmsys.estimate.model_tensors import list_model_tensors
from llmsys.estimate.rank_parameters import (
    PipelineStage,
    count_gathered_weights,
    list_pipeline_stages,
)
from llmsys.estimate.software_profile import OURS, MemoryProfile
from llmsys.estimate.state_memory import list_gathered_weights
from llmsys.estimate.step_memory import StepMemory

# Usable share of the memory; the rest is for what the estimate does not count, such as
# fragmentation.
USABLE_SHARE = 0.9
# A bubble of 1F1B is then at most a quarter of the work.
MICRO_BATCHES_PER_STAGE = 4


@dataclass(frozen=True)
class MicroBatchChoice:
    """Windows of one forward pass of one rank, of the `share` it has in a full step, and the
    bytes that go with it.
    """

    sequences: int
    share: int
    peak_bytes: int
    memory_bytes: int

    def __str__(self) -> str:
        """For the log."""
        return (
            f"batch.micro_sequences=auto selects {self.sequences} of a rank's {self.share} "
            f"sequences per forward pass: an estimated {self.peak_bytes / GIB:.2f} GiB of "
            f"{self.memory_bytes / GIB:.2f} GiB, of which {USABLE_SHARE:.0%} is usable."
        )


def find_largest_micro_batch(
    config: RunConfig, layout: ParallelLayout, memory_bytes: int, system: MemoryProfile
) -> MicroBatchChoice:
    """Find the largest micro-batch whose estimated peak fits each rank.

    Args:
        config: resolved config of a run.
        layout: resolved layout, as `ParallelLayout.resolve` returns it.
        memory_bytes: memory of one rank; USABLE_SHARE of it is usable.
        system: training program and device, as in `estimate_peak_memory`.

    Returns:
        The choice, with the bytes behind it.

    Raises:
        ConfigError: one window does not fit, with suggested fixes.
    """
    share = config.batch.sequences_per_step // layout.data_parallel_size
    for sequences in _list_micro_sequences(config, layout):
        batch = config.batch.model_copy(update={"micro_sequences": sequences})
        ledger = estimate_peak_memory(
            config.model_copy(update={"batch": batch}), layout, system=system
        )
        peak = ledger.peak_bytes + ledger.driver_bytes
        if peak <= USABLE_SHARE * memory_bytes:
            return MicroBatchChoice(sequences, share, peak, memory_bytes)
    told = ledger.compute_fit_result(int(USABLE_SHARE * memory_bytes)).text
    raise ConfigError(
        f"batch.micro_sequences=auto finds no size that fits; with one sequence at a time {told}"
    )


def _list_micro_sequences(config: RunConfig, layout: ParallelLayout) -> list[int]:
    """Return micro-batch sizes, best first: the largest, in a pipeline the largest with a short
    bubble.
    """
    # every size of a ramp is cut into equal micro-batches
    shares = [sequences // layout.data_parallel_size for sequences in config.batch.step_sizes]
    if layout.pipeline == 1:
        return list_divisors(gcd(*shares))[::-1]
    legal = list_legal_micro_sequences(layout.pipeline, layout.pipeline_schedule, shares)
    most = min(shares) // (MICRO_BATCHES_PER_STAGE * layout.pipeline)
    return [size for size in legal[::-1] if size <= most] + [size for size in legal if size > most]


def _get_recomputation(config: RunConfig) -> str:
    policy = config.train.activation_checkpoint
    return "none" if policy == "offload" else policy


Change = tuple[str, RunConfig, ParallelLayout, MemoryProfile]


def iter_config_changes(
    config: RunConfig, layout: ParallelLayout, system: MemoryProfile
) -> Iterator[Change]:
    """Yield changes that a person would try, as text and as arguments of `estimate_peak_memory`."""
    if system.loss not in ("kernel", "chunked"):
        yield "chunking the loss", config, layout, replace(system, loss="kernel")
    policies = ("none", "selective", "full")
    for policy in policies[policies.index(_get_recomputation(config)) + 1 :]:
        yield (
            f"train.activation_checkpoint={policy}",
            _update_section(config, "train", activation_checkpoint=policy),
            layout,
            system,
        )
    sequences = compute_micro_batch(config, layout)[0]
    if sequences > 1:
        half = sequences // 2
        yield (
            f"batch.micro_sequences={half}",
            _update_section(config, "batch", micro_sequences=half),
            layout,
            system,
        )
    if config.evaluation_sequences > 1 and system.evaluation == "logits":
        fewer = config.evaluation_sequences // 2
        text = f"evaluation.micro_sequences={fewer}"
        yield text, _update_section(config, "evaluation", micro_sequences=fewer), layout, system
    if (
        layout.replicate > 1
        and isinstance(config.engine, TorchEngineConfig)
        and config.engine.shards_weights
    ):
        more = layout.model_copy(update={"replicate": 1, "shard": layout.shard * layout.replicate})
        yield f"layout.replicate=1 with layout.shard={more.shard}", config, more, system
    yield from _iter_engine_changes(config, layout, system)


def _iter_engine_changes(
    config: RunConfig, layout: ParallelLayout, system: MemoryProfile
) -> Iterator[Change]:
    match config.engine:
        case DeepSpeedEngineConfig(zero_stage=stage, cpu_offload=cpu_offload):
            if stage < 3:
                yield (
                    "engine.zero_stage=3",
                    _update_section(config, "engine", zero_stage=3),
                    layout,
                    system,
                )
            if cpu_offload == "none" and stage:
                offloaded = _update_section(config, "engine", cpu_offload="optimizer")
                yield "engine.cpu_offload=optimizer", offloaded, layout, system
        case TorchEngineConfig(data_parallel="ddp"):
            shards = layout.model_copy(update={"replicate": 1, "shard": layout.data_parallel_size})
            text = (
                f"engine.data_parallel=fsdp with layout.replicate=1 and layout.shard={shards.shard}"
            )
            yield text, _update_section(config, "engine", data_parallel="fsdp"), shards, system
        case TorchEngineConfig(data_parallel="plain"):
            sharded = _update_section(config, "engine", data_parallel="fsdp")
            yield "engine.data_parallel=fsdp", sharded, layout, system
        case TorchEngineConfig(cpu_offload=cpu_offload):
            if cpu_offload == "none":
                yield (
                    "engine.cpu_offload=state",
                    _update_section(config, "engine", cpu_offload="state"),
                    layout,
                    system,
                )
        case AccelerateEngineConfig():
            pass  # its settings are in the user's accelerate config
        case unreachable:
            assert_never(unreachable)


def _update_section(config: RunConfig, section: str, **values: Any) -> RunConfig:
    changed = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: changed})


# driver and kernels about half a GiB, NCCL's buffers the rest; no allocator counts them
OUTSIDE_BYTES = 1 << 30


def estimate_peak_memory(
    config: RunConfig,
    layout: ParallelLayout,
    *,
    pipeline: int | None = None,
    system: MemoryProfile = OURS,
    pipeline_rank: int | None = None,
) -> MemoryTimeline:
    """Estimate the memory of the fullest rank.

    Args:
        config: resolved config of a run.
        layout: resolved layout, as `ParallelLayout.resolve` returns it.
        pipeline: stages, instead of those of `system`; those of `layout` come first.
        system: training program and device.
        pipeline_rank: the rank of our pipeline to look at; None: all.

    Returns:
        The timeline of the fullest rank of our pipeline; of a published one, of its first or last
        stage. In bytes.
    """
    system = system if pipeline is None else replace(system, pipeline=pipeline)
    if layout.pipeline > 1:
        from llmsys.estimate.pipeline_stages import list_rank_stages

        system = replace(system, pipeline=layout.pipeline)
        micro_batches = compute_micro_batch(config, layout)[1]
        stages = list_rank_stages(config.model, layout, config.batch.sequence_length, micro_batches)
        stages = (
            _select_fullest(config.model, stages)
            if pipeline_rank is None
            else [stages[pipeline_rank]]
        )
    else:
        stages = list_pipeline_stages(config.model, system)
    outside = OUTSIDE_BYTES if system.device == "cuda" else 0
    instants = [
        tuple(StepMemory(config, layout, system, stage).iter_snapshots()) for stage in stages
    ]
    ledgers = [
        MemoryTimeline(one, outside, lambda: _list_suggested_fixes(config, layout, system))
        for one in instants
    ]
    return max(ledgers, key=lambda ledger: ledger.peak_bytes)


def _select_fullest(model: ModelConfig, stages: list[PipelineStage]) -> list[PipelineStage]:
    """Return the stages that may be the fullest: of those with alike layers, no other one holds
    as many micro-batches.

    A long pipeline has few kinds of stages, and a plan asks for thousands of pipelines.
    """
    kinds = _number_layer_kinds(model)
    by_kind: dict[Hashable, list[PipelineStage]] = {}
    fullest: list[PipelineStage] = []
    for one in stages:
        layers = tuple(sorted(kinds[layer] for layer in one.layers))
        alike = by_kind.setdefault((one.first, one.last, one.message_buffers, layers), [])
        if not any(
            other.in_flight >= one.in_flight and other.waiting >= one.waiting for other in alike
        ):
            alike.append(one)
            fullest.append(one)
    return fullest


@lru_cache(maxsize=16)
def _number_layer_kinds(model: ModelConfig) -> tuple[int, ...]:
    """Return a number for each layer, equal for layers with the same parameters and the same
    mixer.
    """
    rows = [row for row in list_model_tensors(model) if row.name.startswith("blocks.")]
    numbers: dict[Hashable, int] = {}
    return tuple(
        numbers.setdefault(
            (
                model.is_moe_layer(layer),
                model.uses_rope(layer),
                model.get_layer_type(layer),
                *(layer in row.layers for row in rows),
            ),
            len(numbers),
        )
        for layer in range(model.num_hidden_layers)
    )


@dataclass(frozen=True)
class ActivationBytes:
    """Parts of the peak that one forward pass brings, on one rank: an estimate, on a GPU where
    nothing else is said.

    `blocks` is what blocks keep for the backward, without attention's T × T `probabilities` where
    those are kept; `logits` what is as large as rows of logits at its fullest, `gathered` the whole
    weights in use.
    """

    blocks: int
    probabilities: int
    logits: int
    gathered: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.blocks + self.probabilities + self.logits + self.gathered


def estimate_activation_bytes(
    config: RunConfig, layout: ParallelLayout, system: MemoryProfile = OURS
) -> ActivationBytes:
    """Estimate for one micro-batch of the configured precision and recompute policy."""
    shape = build_activation_shape(config, layout, system)
    whole = count_gathered_weights(config.model, layout, list_model_tensors(config.model), system)
    train = config.train
    blocks = scores = 0
    for kind in iter_block_groups(config, shape):
        policy, compiled = train.activation_checkpoint, train.compile == "block"
        for tensor in select_saved_tensors(kind.saved_tensors, policy, compiled, system):
            square = tensor.name.startswith(("probabilities", "scores"))
            blocks += 0 if square else len(kind.layers) * tensor.bytes
            scores += len(kind.layers) * tensor.bytes if square else 0
    in_use = list_gathered_weights(
        config, whole, system, "forward", casts_kept=train.activation_checkpoint == "none"
    )
    logits = sum_logits_bytes(list_loss_items(config, shape, system, whole.head))
    return ActivationBytes(blocks, scores, logits, sum(item.bytes for item in in_use))


def _list_suggested_fixes(
    config: RunConfig, layout: ParallelLayout, system: MemoryProfile
) -> tuple[SuggestedFix, ...]:
    """Return the bytes that each change saves."""
    now = estimate_peak_memory(config, layout, system=system).peak_bytes
    return tuple(
        SuggestedFix(text, now - estimate_peak_memory(changed, ranks, system=program).peak_bytes)
        for text, changed, ranks, program in iter_config_changes(config, layout, system)
    )
