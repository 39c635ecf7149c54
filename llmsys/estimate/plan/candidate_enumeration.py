"""The combinations of axes that a plan looks at; which of them are legal is the config's to say."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import assert_never

from llmsys.config.combinations import find_refused_combinations
from llmsys.config.engine import EngineConfig, TorchEngineConfig
from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.config.section import list_divisors
from llmsys.estimate.data_parallel_choice import MAX_PLAIN_RANKS
from llmsys.estimate.model_tensors import count_parameters
from llmsys.estimate.plan.layout_candidate import CHOSEN_SETTINGS, LayoutCandidate, PlanTarget

# Positions of each rank from which a plan tries a ring: below, messages outlast the products of a
# step.
MIN_RING_POSITIONS = 4096
# Positions of each rank up to which a plan divides a sequence over ranks that exchange heads.
MIN_CONTEXT_POSITIONS = 256


def iter_candidates(
    config: RunConfig, place: PlanTarget, engines: tuple[EngineConfig, ...]
) -> Iterator[LayoutCandidate]:
    """Yield every combination of axes whose product is the number of devices, with the largest
    micro-batch of each.

    `tensor` stays inside a machine, where its traffic belongs, and `pipeline` goes across machines,
    where others cost more. Pipelines are under 1F1B; `search_layouts` tries the other schedule
    where they fit.
    """
    for engine in engines:
        for pipeline in list_pipelines(config, place, engine):
            yield from _iter_stage_candidates(config, place, engine, pipeline)


def uses_whole_gradients(engine: EngineConfig) -> bool:
    """Return whether gradients of micro-batches are summed before they are sharded.

    Args:
        engine: engine section.
    """
    return (
        isinstance(engine, TorchEngineConfig)
        and engine.is_fsdp
        and engine.gradient_accumulation == "whole"
    )


@dataclass(frozen=True)
class _WholeGradients:
    """Bytes of unsharded float32 gradients of a model: of its experts and of all else."""

    experts: int
    others: int

    @classmethod
    def from_model(cls, model: ModelConfig) -> "_WholeGradients":
        counts = count_parameters(model)
        experts = counts.by_component.get("experts", 0)
        return cls(4 * experts, 4 * (counts.total - experts))

    def compute(self, tensor: int, expert: int, pipeline: int) -> float:
        """Bytes of the mean rank; no rank of the fullest stage has fewer."""
        ranks = tensor * pipeline
        return self.others / ranks + self.experts / (expert * pipeline)


def list_engines(config: RunConfig, offered: tuple[EngineConfig, ...]) -> tuple[EngineConfig, ...]:
    """Return the engines to search: those of the kind that the config names, with its other
    settings; all where it names none.
    """
    named = "engine" in config.model_fields_set
    if not named:
        return offered
    mine = config.engine
    found = [_merge_engine(mine, one) for one in offered if one.kind == mine.kind]
    return tuple(dict.fromkeys(found))


def _merge_engine(mine: EngineConfig, offered: EngineConfig) -> EngineConfig:
    """Return the config's engine with what the plan chooses; a policy of accumulation that
    somebody wrote down is theirs.
    """
    kept = mine.model_fields_set & {"gradient_accumulation"}
    chosen = [name for name in CHOSEN_SETTINGS[offered.kind] if name not in kept]
    return mine.model_copy(update={name: getattr(offered, name) for name in chosen})


def list_pipelines(config: RunConfig, place: PlanTarget, engine: EngineConfig) -> list[int]:
    """List the numbers of ranks of a pipeline to try, 1 first; 1 alone where the run cannot be
    pipelined.
    """
    machines = place.cluster.devices // place.device.node_devices
    layout = ParallelLayout(pipeline=2)
    # Not validated: only what is refused in a pipeline counts here.
    tried = config.model_copy(update={"engine": engine, "layout": layout})
    if (
        machines < 2
        or any(layout.find_stage_violations(config.model))
        or any(find_refused_combinations(tried, about="layout.pipeline"))
    ):
        return [1]
    return [ranks for ranks in list_divisors(machines) if ranks <= config.model.num_hidden_layers]


def _iter_stage_candidates(
    config: RunConfig, place: PlanTarget, engine: EngineConfig, pipeline: int
) -> Iterator[LayoutCandidate]:
    """Yield the layouts of the ranks of one stage."""
    world, model = place.cluster.devices // pipeline, config.model
    # Where somebody wrote the policy down, no other one is tried instead.
    is_given = "gradient_accumulation" in config.engine.model_fields_set
    is_whole = uses_whole_gradients(engine) and not is_given
    whole_bytes = _WholeGradients.from_model(model) if is_whole else _WholeGradients(0, 0)
    experts = [1] if model.moe is None else list_divisors(model.moe.num_experts)
    for tensor in list_divisors(world):
        if tensor > min(place.device.node_devices, model.num_attention_heads):
            break
        for context in list_divisors(world // tensor):
            is_ring = context * tensor > model.num_attention_heads
            if (
                context > 1
                and config.batch.sequence_length < MIN_CONTEXT_POSITIONS * context * tensor
            ):
                break
            # A ring is for sequences that heads cannot divide far enough.
            if is_ring and config.batch.sequence_length < MIN_RING_POSITIONS * context:
                break
            rest = world // tensor // context
            for replicate in list_divisors(rest):
                shard = rest // replicate
                if not _can_replicate(engine, place, replicate, rest):
                    continue
                share = max(1, config.batch.sequences_per_step // (replicate * shard))
                for expert in experts:
                    if (shard * context * tensor) % expert == 0:
                        if is_whole and not (
                            shard * context > 1
                            and share > 1
                            and whole_bytes.compute(tensor, expert, pipeline)
                            < place.device.memory_bytes
                        ):
                            continue
                        axes = replicate, shard, context, tensor, expert
                        one = LayoutCandidate(engine, *axes, "none", share, pipeline=pipeline)
                        yield from (
                            _iter_ring_candidates(one, model.num_attention_heads)
                            if is_ring
                            else (one,)
                        )


def _can_replicate(engine: EngineConfig, place: PlanTarget, replicate: int, ranks: int) -> bool:
    """Return whether an engine is tried with `replicate` copies on `ranks` data-parallel ranks."""
    if not isinstance(engine, TorchEngineConfig):
        return True
    match engine.data_parallel:
        case "plain":
            devices = place.cluster.devices
            return replicate == 1 and devices <= min(MAX_PLAIN_RANKS, place.device.node_devices)
        case "ddp":
            return replicate == ranks > 1
        case "fsdp" | "auto":
            # With copies only it would be DDP.
            return not replicate == ranks > 1
        case unreachable:
            assert_never(unreachable)


def _iter_ring_candidates(one: LayoutCandidate, heads: int) -> Iterator[LayoutCandidate]:
    """Yield the ring of all context ranks, and the one with fewest members, each of which
    exchanges heads.
    """
    yield replace(one, context_kind="ring")
    for ring in list_divisors(one.context)[1:-1]:
        if heads % (one.context // ring * one.tensor) == 0:
            yield replace(one, context_kind="ulysses_ring", ring=ring)
            return
