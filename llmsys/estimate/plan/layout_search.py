"""The search: every legal layout, the largest micro-batch that fits in it, ranked by the time of a step.

Gives the best few, those that nothing beats in both time and memory, and for each neighbour of the best what binds it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from llmsys.config.engine import EngineConfig, TorchEngineConfig
from llmsys.config.run import RunConfig
from llmsys.config.section import list_divisors
from llmsys.errors import LayoutError
from llmsys.estimate.plan.layout_candidate import (
    ENGINES,
    OFFLOADED,
    SCHEDULES,
    EstimatedCandidate,
    IllegalLayoutError,
    LayoutCandidate,
    PlanTarget,
    apply_candidate,
    estimate_candidate,
    format_engine_name,
    iter_candidates,
    list_policies,
)
from llmsys.estimate.software_profile import resolve_for_profile

# Limit of the search for a sufficient number of devices.
MOST_DEVICES = 2**20


@dataclass(frozen=True)
class RejectedNeighbour:
    """A neighbour of the best choice, and the constraint that binds it."""

    change: str
    reason: str


@dataclass(frozen=True)
class LayoutPlan:
    """The layouts that fit, fastest first; those of them that nothing beats in both; and the neighbours of the best."""

    ranked: list[EstimatedCandidate]
    pareto: list[EstimatedCandidate]
    rejected: list[RejectedNeighbour]
    considered: int


def list_engines(config: RunConfig, offered: tuple[EngineConfig, ...]) -> tuple[EngineConfig, ...]:
    """Return the engines to search: those of the kind that the config names, all where it names none."""
    named = "engine" in config.model_fields_set
    return tuple(one for one in offered if not named or one.kind == config.engine.kind)


def search_layouts(config: RunConfig, place: PlanTarget) -> LayoutPlan:
    """Search all layouts of `config.model` and its batch; offload is tried where nothing fits without.

    Args:
        config: resolved config of a run.
        place: device profile and cluster.

    Returns:
        The layouts that fit, fastest first, with the Pareto set and the rejected neighbors of the best.

    Raises:
        LayoutError: nothing fits, with the missing bytes and a number of devices that suffices.
    """
    config = resolve_for_profile(config, place.device)
    engines = list_engines(config, ENGINES)
    found, considered, closest, refusal = _search_engines(config, place, engines)
    if not found:
        engines = list_engines(config, OFFLOADED)
        found, more, offloaded, _ = _search_engines(config, place, engines)
        considered, closest = considered + more, offloaded or closest
    if not found:
        raise LayoutError(_format_no_layout_error(config, place, closest, refusal))
    ranked = sorted(found, key=lambda one: (one.step_seconds, one.memory.peak_bytes))
    beside = list(iter_rejected_neighbours(config, ranked[0], place, list_engines(config, ENGINES)))
    return LayoutPlan(ranked, list(_select_pareto_front(ranked)), beside, considered)


def _search_engines(
    config: RunConfig, place: PlanTarget, engines: tuple[EngineConfig, ...]
) -> tuple[list[EstimatedCandidate], int, EstimatedCandidate | None, str]:
    """(what fits, how many were looked at, the smallest that does not need to fit, the last refusal)."""
    found: list[EstimatedCandidate] = []
    considered, refusal = 0, ""
    closest: EstimatedCandidate | None = None
    for choice in iter_candidates(config, place, engines):
        for recompute in list_policies(config, choice.engine):
            considered += 1
            try:
                fitting, smallest = _search_micro_batches(config, replace(choice, recompute=recompute), place)
            except IllegalLayoutError as illegal:
                refusal = str(illegal)
                break
            found += fitting
            if closest is None or smallest.memory.peak_bytes < closest.memory.peak_bytes:
                closest = smallest
    return found, considered, closest, refusal


def _search_micro_batches(
    config: RunConfig, choice: LayoutCandidate, place: PlanTarget
) -> tuple[list[EstimatedCandidate], EstimatedCandidate]:
    """The largest micro-batch that fits and the next smaller one; and the smallest, whether it fits or not."""
    sizes = choice.list_micro_sizes() or [1]  # 1: the config gives the reason why a schedule takes none
    smallest = estimate_candidate(config, replace(choice, micro_sequences=sizes[0]), place)
    if place.explain_rejection(smallest) is not None:
        return [], smallest
    low, high = 0, len(sizes) - 1
    while low < high:  # memory grows with the micro-batch
        middle = (low + high + 1) // 2
        if _has_enough_memory(config, replace(choice, micro_sequences=sizes[middle]), place):
            low = middle
        else:
            high = middle - 1
    if choice.pipeline > 1:
        return _search_schedules(config, choice, {sizes[0], sizes[min(1, low)], sizes[low]}, place), smallest
    kept = [
        estimate_candidate(config, replace(choice, micro_sequences=sizes[at]), place) for at in {low, max(0, low - 1)}
    ]
    return kept, smallest


def _search_schedules(
    config: RunConfig, choice: LayoutCandidate, sizes: set[int], place: PlanTarget
) -> list[EstimatedCandidate]:
    """Return a pipeline with micro-batches that fit (small ones shorten the bubble), and its other schedules."""
    found = [estimate_candidate(config, replace(choice, micro_sequences=size), place) for size in sorted(sizes)]
    fastest = min(found, key=lambda one: one.step_seconds).choice
    for schedule in SCHEDULES[1:]:
        try:
            one = estimate_candidate(config, replace(fastest, schedule=schedule), place)
        except IllegalLayoutError:
            continue
        found += [one] if place.explain_rejection(one) is None else []
    return found


def _has_enough_memory(config: RunConfig, choice: LayoutCandidate, place: PlanTarget) -> bool:
    made = apply_candidate(config, choice)
    return place.explain_memory_rejection(place.estimate_memory(made, choice.layout), made, choice.layout) is None


def _select_pareto_front(ranked: list[EstimatedCandidate]) -> Iterator[EstimatedCandidate]:
    """Of choices by time, each that needs less memory than all faster ones."""
    least = float("inf")
    for one in ranked:
        if one.memory.peak_bytes < least:
            least = one.memory.peak_bytes
            yield one


def iter_rejected_neighbours(
    config: RunConfig, best: EstimatedCandidate, place: PlanTarget, engines: tuple[EngineConfig, ...]
) -> Iterator[RejectedNeighbour]:
    """Each choice that differs from the best in one thing, and why it was not taken."""
    for change, choice in _iter_neighbour_candidates(config, best.choice, place.cluster.devices, engines):
        try:
            one = estimate_candidate(config, choice, place)
        except IllegalLayoutError as illegal:
            yield RejectedNeighbour(change, f"illegal: {str(illegal).split('. Use')[0].rstrip('.')}")
            continue
        if (refusal := place.explain_rejection(one)) is not None:
            yield RejectedNeighbour(change, refusal)
        elif one.step_seconds >= best.step_seconds:
            grown = max(one.step.parts, key=lambda part: one.step.parts[part] - best.step.parts.get(part, 0.0))
            yield RejectedNeighbour(change, f"time: {one.step_seconds / best.step_seconds - 1:+.1%}, mostly {grown}")


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
                micro = max(size for size in list_divisors(share) if size <= max(1, best.micro_sequences))
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
    if isinstance(engine, TorchEngineConfig) and not engine.shards_weights:
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


def _format_no_layout_error(
    config: RunConfig,
    place: PlanTarget,
    closest: EstimatedCandidate | None,
    refusal: str,
) -> str:
    if closest is None:
        devices = place.cluster.devices
        return f"No layout of {devices} devices is legal for this model and batch. The last violation: {refusal}"
    verdict = closest.memory.compute_fit_result(int(place.device.memory_bytes))
    why = verdict.text if not verdict.fits else f"{place.explain_rejection(closest)}."
    enough = find_sufficient_devices(config, place)
    more = f"{enough} devices are enough" if enough else f"no number up to {MOST_DEVICES} devices are enough"
    return (
        f"No layout fits {place.cluster.devices} × {place.device.name}. The smallest is "
        f"{closest.choice.format_layout()}: {why} "
        f"With this batch, {more}."
    )


def find_sufficient_devices(config: RunConfig, place: PlanTarget) -> int | None:
    """The smallest doubling of the cluster on which some layout fits; None when a batch has no more rows to deal."""
    devices = place.cluster.devices
    while (devices := 2 * devices) <= MOST_DEVICES:
        larger = replace(place, cluster=place.cluster.model_copy(update={"devices": devices}))
        for choice in iter_candidates(config, larger, list_engines(config, ENGINES + OFFLOADED)):
            smallest = replace(choice, recompute="full", micro_sequences=1)
            try:
                if _has_enough_memory(config, smallest, place):
                    return devices
            except IllegalLayoutError:
                continue
    return None
