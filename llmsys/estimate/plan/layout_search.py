"""The search: every legal layout, the largest micro-batch that fits in it, ranked by the time of a
step.

Gives the best few, those that nothing beats in both time and memory, and for each neighbour of the
best what binds it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from llmsys.config.engine import EngineConfig
from llmsys.config.run import RunConfig
from llmsys.config.section import list_divisors
from llmsys.errors import LayoutError
from llmsys.estimate.plan.candidate_enumeration import iter_candidates
from llmsys.estimate.plan.json_output import RejectedLayout
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
    estimate_validated,
    list_policies,
    replace_config,
    require_divisible,
)
from llmsys.estimate.plan.layout_neighbours import iter_rejected_neighbours
from llmsys.estimate.software_profile import resolve_for_profile

# Called with the share of a search that is done.
Advance = Callable[[float], None]

# Limit of the search for a sufficient number of devices.
MOST_DEVICES = 2**20


# From this many machines on, copies are tried of whole clusters and of single machines only.
COARSE_MACHINES = 32


@dataclass(frozen=True)
class SearchLimits:
    """Limits of the layouts whose memory is looked at.

    Attributes:
        slowness: bound of a step over the best one that fits, up to which less memory is of
            interest.
        least: layouts to look at whatever their bounds are.
        most: layouts after which the search ends if one fits.
    """

    slowness: float
    least: int
    most: float


SMALL, LARGE = SearchLimits(1.5, 60, float("inf")), SearchLimits(1.15, 30, 150)


def _is_large(place: PlanTarget) -> bool:
    return place.cluster.devices >= COARSE_MACHINES * place.device.node_devices


@dataclass
class SearchResult:
    """The layouts that fit, found so far, and the smallest one, which need not fit."""

    found: list[EstimatedCandidate] = field(default_factory=list)
    closest: EstimatedCandidate | None = None
    refusal: str = ""
    considered: int = 0
    num_searched: int = 0
    best_seconds: float = float("inf")

    def add(self, fitting: list[EstimatedCandidate], smallest: EstimatedCandidate) -> None:
        """Add the micro-batches of one layout."""
        self.found += fitting
        self.best_seconds = min([self.best_seconds, *(one.step_seconds for one in fitting)])
        if self.closest is None or smallest.memory.peak_bytes < self.closest.memory.peak_bytes:
            self.closest = smallest


@dataclass(frozen=True)
class LayoutPlan:
    """The layouts that fit, fastest first; those of them that nothing beats in both; and the
    neighbours of the best.
    """

    ranked: list[EstimatedCandidate]
    pareto: list[EstimatedCandidate]
    rejected: list[RejectedLayout]
    considered: int


def list_engines(config: RunConfig, offered: tuple[EngineConfig, ...]) -> tuple[EngineConfig, ...]:
    """Return the engines to search: those of the kind that the config names, all where it names
    none.
    """
    named = "engine" in config.model_fields_set
    return tuple(one for one in offered if not named or one.kind == config.engine.kind)


def estimate_lower_bound(config: RunConfig, choice: LayoutCandidate, place: PlanTarget) -> float:
    """Return seconds that no micro-batch and recomputation of a layout is faster than, to a few per
    cent.

    Args:
        config: resolved config of a run.
        choice: the layout, with the largest micro-batch.
        place: device profile and cluster.

    Returns:
        The P50 of a step without recomputation, the least of the smallest and the largest
        micro-batches.

    Raises:
        IllegalLayoutError: the batch does not divide, or the model.
    """
    require_divisible(config, choice)
    if choice.engine.kind == "deepspeed" and choice.tensor * choice.context > 1:
        raise IllegalLayoutError("engine.kind=deepspeed does not shard matrices or sequences")
    sizes = choice.list_micro_sizes() or [1]
    schedules = [
        one
        for one in SCHEDULES[: 1 if choice.pipeline == 1 else None]
        if not any(replace(choice, schedule=one).layout.find_stage_violations(config.model))
    ]
    # Not validated: what the config refuses is refused when its turn comes.
    tried = (
        replace_config(config, replace(choice, micro_sequences=size, schedule=schedule))
        for size in {sizes[0], sizes[min(1, len(sizes) - 1)], sizes[-1]}
        for schedule in schedules
    )
    return min(
        (place.estimate_step(one, one.layout).seconds.p50 for one in tried), default=float("inf")
    )


def search_layouts(
    config: RunConfig, place: PlanTarget, advance: Advance = lambda share: None
) -> LayoutPlan:
    """Search all layouts of `config.model` and its batch; offload is tried where nothing fits
    without.

    Args:
        config: resolved config of a run.
        place: device profile and cluster.
        advance: called with the share of the search that is done.

    Returns:
        The layouts that fit, fastest first, with the Pareto set and the rejected neighbors of the
        best.

    Raises:
        LayoutError: nothing fits, with the missing bytes and a number of devices that suffices.
    """
    config = resolve_for_profile(config, place.device)
    result = _search_engines(config, place, list_engines(config, ENGINES), advance)
    considered, closest = result.considered, result.closest
    if not result.found:
        offloaded = _search_engines(config, place, list_engines(config, OFFLOADED), advance)
        considered, closest = considered + offloaded.considered, offloaded.closest or closest
        if not offloaded.found:
            raise LayoutError(_format_no_layout_error(config, place, closest, result.refusal))
        result = offloaded
    ranked = sorted(result.found, key=lambda one: (one.step_seconds, one.memory.peak_bytes))
    ranked = _search_copies(config, ranked, place)
    neighbours = list(
        iter_rejected_neighbours(config, ranked[0], place, list_engines(config, ENGINES))
    )
    return LayoutPlan(ranked, list(_select_pareto_front(ranked)), neighbours, considered)


def _search_copies(
    config: RunConfig, ranked: list[EstimatedCandidate], place: PlanTarget
) -> list[EstimatedCandidate]:
    """Return the candidates with the best one's other numbers of copies, which a coarse search
    leaves out.
    """
    best = ranked[0].choice
    data, found = best.replicate * best.shard, list(ranked)
    if not _is_large(place):
        return ranked
    for replicate in list_divisors(data):
        one = replace(best, replicate=replicate, shard=data // replicate)
        if replicate in (best.replicate, data):
            continue
        try:
            estimated = estimate_candidate(config, one, place)
        except IllegalLayoutError:
            continue
        found += [estimated] if place.explain_rejection(estimated) is None else []
    return sorted(found, key=lambda one: (one.step_seconds, one.memory.peak_bytes))


def _search_engines(
    config: RunConfig, place: PlanTarget, engines: tuple[EngineConfig, ...], advance: Advance
) -> SearchResult:
    """Search the layouts of engines, those with the lowest possible time of a step first."""
    result, bounded = SearchResult(), []
    limits = LARGE if _is_large(place) else SMALL
    for number, choice in enumerate(
        choices := _select_coarse(list(iter_candidates(config, place, engines)), place)
    ):
        advance(number / (2 * len(choices)))
        try:
            bounded.append((estimate_lower_bound(config, choice, place), number, choice))
        except IllegalLayoutError as illegal:
            result.refusal = str(illegal)
    result.considered = sum(len(list_policies(config, one.engine)) for one in choices)
    bounded.sort(key=lambda one: one[:2])
    for number, (bound, _, choice) in enumerate(bounded):
        advance(0.5 + number / (2 * len(bounded)))
        if bound > limits.slowness * result.best_seconds and result.num_searched >= limits.least:
            break
        if result.num_searched >= limits.most and result.found:
            break
        result.num_searched += 1
        for recompute in list_policies(config, choice.engine):
            one = replace(choice, recompute=recompute)
            try:
                # Recomputation is slower: its memory is of interest only up to a limit.
                if estimate_lower_bound(config, one, place) > limits.slowness * result.best_seconds:
                    continue
                fitting, smallest = _search_micro_batches(config, one, place)
            except IllegalLayoutError as illegal:
                result.refusal = str(illegal)
                break
            result.add(fitting, smallest)
    return result


def _select_coarse(choices: list[LayoutCandidate], place: PlanTarget) -> list[LayoutCandidate]:
    """Return the candidates of large clusters: copies of one machine or more, all ranks of a
    stage, and no other.
    """
    node = place.device.node_devices
    if not _is_large(place):
        return choices
    return [
        one
        for one in choices
        if one.replicate == 1
        or one.shard * one.context * one.tensor == max(node, one.context * one.tensor, one.expert)
        or one.shard == one.context == 1
    ]


def _search_micro_batches(
    config: RunConfig, choice: LayoutCandidate, place: PlanTarget
) -> tuple[list[EstimatedCandidate], EstimatedCandidate]:
    """The largest micro-batch that fits and the next smaller one; and the smallest, whether it
    fits or not.
    """
    # 1: the config gives the reason why a schedule takes none
    sizes = choice.list_micro_sizes() or [1]
    smallest = estimate_candidate(config, replace(choice, micro_sequences=sizes[0]), place)
    if place.explain_rejection(smallest) is not None:
        return [], smallest
    made = smallest.config
    low, high = 0, len(sizes) - 1
    while low < high:  # memory grows with the micro-batch
        middle = (low + high + 1) // 2
        if _has_enough_memory(made, replace(choice, micro_sequences=sizes[middle]), place):
            low = middle
        else:
            high = middle - 1
    if choice.pipeline > 1:
        return _search_schedules(
            config, made, choice, {sizes[0], sizes[min(1, low)], sizes[low]}, place
        ), smallest
    kept = [
        estimate_validated(made, replace(choice, micro_sequences=sizes[index]), place)
        for index in {low, max(0, low - 1)}
    ]
    return kept, smallest


def _search_schedules(
    config: RunConfig, made: RunConfig, choice: LayoutCandidate, sizes: set[int], place: PlanTarget
) -> list[EstimatedCandidate]:
    """Return a pipeline with micro-batches that fit (small ones shorten the bubble), and its
    other schedules.
    """
    found = [
        estimate_validated(made, replace(choice, micro_sequences=size), place)
        for size in sorted(sizes)
    ]
    fastest = min(found, key=lambda one: one.step_seconds).choice
    for schedule in SCHEDULES[1:]:
        try:
            one = estimate_candidate(config, replace(fastest, schedule=schedule), place)
        except IllegalLayoutError:
            continue
        found += [one] if place.explain_rejection(one) is None else []
    return found


def _has_enough_memory(made: RunConfig, choice: LayoutCandidate, place: PlanTarget) -> bool:
    sized = replace_config(made, choice)
    memory = place.estimate_memory(sized, choice.layout)
    return place.explain_memory_rejection(memory, sized, choice.layout) is None


def _select_pareto_front(ranked: list[EstimatedCandidate]) -> Iterator[EstimatedCandidate]:
    """Of choices by time, each that needs less memory than all faster ones."""
    least = float("inf")
    for one in ranked:
        if one.memory.peak_bytes < least:
            least = one.memory.peak_bytes
            yield one


def _format_no_layout_error(
    config: RunConfig,
    place: PlanTarget,
    closest: EstimatedCandidate | None,
    refusal: str,
) -> str:
    if closest is None:
        devices = place.cluster.devices
        return (
            f"No layout of {devices} devices is legal for this model and batch. The last "
            f"violation: {refusal}. Choose another number of devices, or set batch.sequences to a "
            "multiple of it."
        )
    verdict = closest.memory.compute_fit_result(int(place.device.memory_bytes))
    why = verdict.text if not verdict.fits else f"{place.explain_rejection(closest)}."
    enough = find_sufficient_devices(config, place)
    more = (
        f"{enough} devices are enough"
        if enough
        else f"no number up to {MOST_DEVICES} devices are enough"
    )
    return (
        f"No layout fits {place.cluster.devices} × {place.device.name}. The smallest is "
        f"{closest.choice.format_layout()}: {why} "
        f"With this batch, {more}."
    )


def find_sufficient_devices(config: RunConfig, place: PlanTarget) -> int | None:
    """The smallest doubling of the cluster on which some layout fits; None when a batch has no
    more rows to deal.
    """
    devices = place.cluster.devices
    while (devices := 2 * devices) <= MOST_DEVICES:
        larger = replace(place, cluster=place.cluster.model_copy(update={"devices": devices}))
        for choice in iter_candidates(config, larger, list_engines(config, ENGINES + OFFLOADED)):
            smallest = replace(choice, recompute="full", micro_sequences=1)
            try:
                if _has_enough_memory(apply_candidate(config, smallest), smallest, place):
                    return devices
            except IllegalLayoutError:
                continue
    return None
