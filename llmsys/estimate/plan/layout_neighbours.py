"""The neighbours of the best layout of a plan, each with the constraint that binds it."""

from collections.abc import Iterator
from dataclasses import replace

from llmsys.config.engine import EngineConfig, TorchEngineConfig
from llmsys.config.run import RunConfig
from llmsys.config.section import list_divisors
from llmsys.estimate.plan.json_output import RejectedLayout
from llmsys.estimate.plan.layout_candidate import (
    SCHEDULES,
    EstimatedCandidate,
    IllegalLayoutError,
    LayoutCandidate,
    PlanTarget,
    estimate_candidate,
    format_engine_name,
    list_policies,
)


def iter_rejected_neighbours(
    config: RunConfig,
    best: EstimatedCandidate,
    place: PlanTarget,
    engines: tuple[EngineConfig, ...],
) -> Iterator[RejectedLayout]:
    """Yield each choice that differs from the best in one thing, with the reason against it.

    Args:
        config: resolved config of a run.
        best: the best layout.
        place: device profile and cluster.
        engines: engines to try.

    Yields:
        Neighbours that are illegal, do not fit, or are slower.
    """
    for change, choice in _iter_neighbour_candidates(
        config, best.choice, place.cluster.devices, engines
    ):
        try:
            one = estimate_candidate(config, choice, place)
        except IllegalLayoutError as illegal:
            rule = str(illegal).split(". Use")[0].rstrip(".")
            yield RejectedLayout(change=change, reason=f"illegal: {rule}")
            continue
        if (refusal := place.explain_rejection(one)) is not None:
            yield RejectedLayout(change=change, reason=refusal)
        elif one.step_seconds >= best.step_seconds:
            grown = max(
                one.step.parts,
                key=lambda part: one.step.parts[part] - best.step.parts.get(part, 0.0),
            )
            slower = one.step_seconds / best.step_seconds - 1
            yield RejectedLayout(change=change, reason=f"time: {slower:+.1%}, mostly {grown}")


def _iter_neighbour_candidates(
    config: RunConfig, best: LayoutCandidate, devices: int, engines: tuple[EngineConfig, ...]
) -> Iterator[tuple[str, LayoutCandidate]]:
    for axis in ("pipeline", "tensor", "context", "replicate"):
        for size in _list_adjacent_divisors(getattr(best, axis), devices):
            changed = replace(best, **{axis: size})  # type: ignore[arg-type]
            others = changed.pipeline * changed.replicate * changed.context * changed.tensor
            if devices % others == 0:
                shard = devices // others
                share = max(1, config.batch.sequences_per_step // (changed.replicate * shard))
                micro = max(
                    size for size in list_divisors(share) if size <= max(1, best.micro_sequences)
                )
                yield f"{axis}={size}", replace(changed, shard=shard, micro_sequences=micro)
    if config.model.moe is not None:
        for size in _list_adjacent_divisors(best.expert, config.model.moe.num_experts):
            yield f"expert={size}", replace(best, expert=size)
    share = max(1, config.batch.sequences_per_step // (best.replicate * best.shard))
    for size in _list_adjacent_divisors(best.micro_sequences, share):
        yield f"micro={size}", replace(best, micro_sequences=size)
    for schedule in SCHEDULES if best.pipeline > 1 else ():
        if schedule != best.schedule:
            yield schedule.kind, replace(best, schedule=schedule)
    for policy in list_policies(config, best.engine):
        if policy != best.recompute:
            yield f"activation_checkpoint={policy}", replace(best, recompute=policy)
    for engine in engines:
        if engine != best.engine:
            yield format_engine_name(engine), _switch_engine(engine, best)


def _switch_engine(engine: EngineConfig, best: LayoutCandidate) -> LayoutCandidate:
    """The same ranks under another engine: DDP has copies where the others have shards."""
    data = best.replicate * best.shard
    if isinstance(engine, TorchEngineConfig) and engine.data_parallel == "ddp":
        return replace(best, engine=engine, replicate=data, shard=1)
    # Copies alone would be DDP.
    if best.shard == 1:
        return replace(best, engine=engine, replicate=1, shard=data)
    return replace(best, engine=engine)


def _list_adjacent_divisors(size: int, of: int) -> list[int]:
    """The next smaller and larger divisor."""
    legal = list_divisors(of)
    smaller = [one for one in legal if one < size]
    larger = [one for one in legal if one > size]
    return smaller[-1:] + larger[:1]
