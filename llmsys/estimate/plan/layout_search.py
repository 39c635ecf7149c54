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
from llmsys.estimate.memory_residual import get_memory_residual
from llmsys.estimate.memory_timeline import MemoryTimeline
from llmsys.estimate.plan.candidate_enumeration import iter_candidates, list_engines
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
from llmsys.estimate.state_memory import compute_state_bytes

# Called with the share of a search that is done.
Advance = Callable[[float], None]

# Limit of the search for a sufficient number of devices.
MOST_DEVICES = 2**20

# A layout that fits with less is not worth a look at its time.
UNLIKELY = 0.01

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
        leaner: layouts after which it ends where no other one can be faster than the best, only
            need less memory.
    """

    slowness: float
    least: int
    most: float
    leaner: float


SMALL, LARGE = SearchLimits(1.5, 60, float("inf"), 150), SearchLimits(1.15, 30, 150, 150)


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
    too_large: list[EstimatedCandidate] = field(default_factory=list)

    def add(self, fitting: list[EstimatedCandidate]) -> None:
        """Add the micro-batches of one layout that fit."""
        self.found += fitting
        self.best_seconds = min([self.best_seconds, *(one.step_seconds for one in fitting)])

    def add_too_large(
        self,
        leanest: tuple[LayoutCandidate, MemoryTimeline],
        made: RunConfig,
        place: PlanTarget,
    ) -> None:
        """Add a layout of which no form fits, unless it is far from it."""
        choice, memory = leanest
        is_closer = self.closest is None or memory.peak_bytes < self.closest.memory.peak_bytes
        may_fit = place.compute_fit_probability(memory, choice.layout.world_size) > UNLIKELY
        if not (is_closer or may_fit):
            return
        sized = replace_config(made, choice)
        one = EstimatedCandidate(choice, sized, memory, place.estimate_step(sized, choice.layout))
        self.closest = one if is_closer else self.closest
        self.too_large += [one] if may_fit else []


@dataclass(frozen=True)
class LayoutPlan:
    """The layouts that fit, fastest first; those of them that nothing beats in both; the
    neighbours of the best; and the layouts that would be faster than the best and are not likely
    to fit, fastest first.
    """

    ranked: list[EstimatedCandidate]
    pareto: list[EstimatedCandidate]
    rejected: list[RejectedLayout]
    considered: int
    turned_away: list[EstimatedCandidate]


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
    considered, closest, too_large = result.considered, result.closest, result.too_large
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
    faster = [one for one in too_large if one.step_seconds < ranked[0].step_seconds]
    faster.sort(key=lambda one: (one.step_seconds, one.memory.peak_bytes))
    front = list(_select_pareto_front(ranked))
    return LayoutPlan(ranked, front, neighbours, considered, faster)


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
    result = SearchResult()
    bounded: list[tuple[float, int, LayoutCandidate]] = []
    hopeless: list[tuple[float, int, LayoutCandidate]] = []
    limits = LARGE if _is_large(place) else SMALL
    for number, choice in enumerate(
        choices := _select_coarse(list(iter_candidates(config, place, engines)), place)
    ):
        advance(number / (2 * len(choices)))
        missing = _compute_missing_state_bytes(config, choice, place)
        if missing > 0:
            hopeless.append((missing, number, choice))
            continue
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
        if result.num_searched >= limits.leaner and bound > result.best_seconds:
            break
        result.num_searched += 1
        try:
            made = apply_candidate(config, _select_smallest(choice))
            memories: dict[LayoutCandidate, MemoryTimeline] = {}
            if (leanest := _find_too_large(made, choice, place, memories)) is not None:
                result.add_too_large(leanest, made, place)
                continue
            for recompute in list_policies(config, choice.engine):
                one = replace(choice, recompute=recompute)
                # Recomputation is slower: its memory is of interest only up to a limit.
                most = limits.slowness * result.best_seconds
                if recompute != "none" and estimate_lower_bound(config, one, place) > most:
                    continue
                fitting, larger = _search_micro_batches(made, one, place, memories)
                result.add(fitting)
                result.too_large += larger
        except IllegalLayoutError as illegal:
            result.refusal = str(illegal)
    if result.closest is None:
        # the error names the layout that comes nearest
        _add_closest(result, config, sorted(hopeless, key=lambda one: one[:2]), place)
    return result


def _compute_missing_state_bytes(
    config: RunConfig, choice: LayoutCandidate, place: PlanTarget
) -> float:
    """Return the bytes by which weights, masters, gradients and moments alone exceed what fits;
    0 or less where they fit.

    Every layout ends a backward with all of them, so memory and time of the others need no look:
    of a large model these are most. What is offloaded is not on the device.
    """
    if getattr(choice.engine, "cpu_offload", "none") != "none":
        return 0.0
    layout = choice.layout
    state = compute_state_bytes(config.model_copy(update={"engine": choice.engine}), layout)
    usable = get_memory_residual(layout.world_size).compute_usable_bytes(
        0, place.device.memory_bytes, place.min_fit_probability
    )
    # The mean of the stages: the fullest one has no fewer.
    return state.total / choice.pipeline - usable


def _add_closest(
    result: SearchResult,
    config: RunConfig,
    hopeless: list[tuple[float, int, LayoutCandidate]],
    place: PlanTarget,
) -> None:
    """Add the first legal one of layouts whose state alone does not fit, the smallest first."""
    for _, _, choice in hopeless:
        try:
            require_divisible(config, choice)
            made = apply_candidate(config, _select_smallest(choice))
        except IllegalLayoutError as illegal:
            result.refusal = str(illegal)
            continue
        if (leanest := _find_too_large(made, choice, place, {})) is not None:
            result.add_too_large(leanest, made, place)
            return


def _select_smallest(choice: LayoutCandidate) -> LayoutCandidate:
    """Return the layout with its smallest micro-batch."""
    # 1: the config gives the reason why a schedule takes none
    return replace(choice, micro_sequences=(choice.list_micro_sizes() or [1])[0])


def _find_too_large(
    made: RunConfig,
    choice: LayoutCandidate,
    place: PlanTarget,
    memories: dict[LayoutCandidate, MemoryTimeline],
) -> tuple[LayoutCandidate, MemoryTimeline] | None:
    """Return the leanest form of a legal layout where even that does not fit; None where it fits.

    Most layouts of a large model end here, after one estimate of memory, which is added to
    `memories`.
    """
    leanest: tuple[LayoutCandidate, MemoryTimeline] | None = None
    # Full recomputation keeps the inputs of blocks, offloading the tensors of two blocks.
    for recompute in list_policies(made, choice.engine)[2:]:
        one = replace(_select_smallest(choice), recompute=recompute)
        sized = replace_config(made, one)
        memory = memories[one] = place.estimate_memory(sized, one.layout)
        if place.explain_memory_rejection(memory, sized, one.layout) is None:
            return None
        if leanest is None or memory.peak_bytes < leanest[1].peak_bytes:
            leanest = one, memory
    return leanest


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
    made: RunConfig,
    choice: LayoutCandidate,
    place: PlanTarget,
    memories: dict[LayoutCandidate, MemoryTimeline],
) -> tuple[list[EstimatedCandidate], list[EstimatedCandidate]]:
    """Search the micro-batches of a legal layout.

    Args:
        made: its config, which differs from others of the layout in micro-batch and recomputation.
        choice: the layout, with a policy of recomputation and the largest micro-batch.
        place: device profile and cluster.
        memories: estimates of this layout that are known already.

    Returns:
        The largest micro-batch that fits and the next smaller one; in a pipeline also smaller ones
        and other schedules. And the next larger one, if it may fit.
    """
    # 1: the config gives the reason why a schedule takes none
    sizes = choice.list_micro_sizes() or [1]
    seen: dict[int, MemoryTimeline] = {}

    def has_room(index: int) -> bool:
        one = replace(choice, micro_sequences=sizes[index])
        sized = replace_config(made, one)
        seen[index] = memories.get(one) or place.estimate_memory(sized, one.layout)
        return place.explain_memory_rejection(seen[index], sized, one.layout) is None

    def estimate(index: int) -> EstimatedCandidate:
        one = replace(choice, micro_sequences=sizes[index])
        if index not in seen:
            return estimate_validated(made, one, place)
        sized = replace_config(made, one)
        return EstimatedCandidate(one, sized, seen[index], place.estimate_step(sized, one.layout))

    low, high = -1, len(sizes) - 1
    while low < high:  # memory grows with the micro-batch
        middle = 0 if low < 0 else (low + high + 1) // 2
        if has_room(middle):
            low = middle
        elif low < 0:
            break
        else:
            high = middle - 1
    larger = [
        estimate(index)
        for index in (low + 1,)
        if index in seen
        and place.compute_fit_probability(seen[index], choice.layout.world_size) > UNLIKELY
    ]
    if low < 0:
        return [], larger
    if choice.pipeline > 1:
        found = [estimate(index) for index in sorted({0, min(1, low), low})]
        return _add_schedules(made, found, place), larger
    return [estimate(index) for index in {low, max(0, low - 1)}], larger


def _add_schedules(
    made: RunConfig, found: list[EstimatedCandidate], place: PlanTarget
) -> list[EstimatedCandidate]:
    """Return micro-batches of a pipeline, of which small ones shorten the bubble, and the fastest
    of them in other schedules.
    """
    fastest = min(found, key=lambda one: one.step_seconds).choice
    others = []
    for schedule in SCHEDULES[1:]:
        try:
            one = estimate_candidate(made, replace(fastest, schedule=schedule), place)
        except IllegalLayoutError:
            continue
        others += [one] if place.explain_rejection(one) is None else []
    return found + others


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
    if verdict.fits and why.startswith("memory"):
        why += (
            " Plan with less certainty, such as --min-fit-probability 0.5, or use fewer bytes: "
            "batch.micro_sequences=1 and train.activation_checkpoint=full are tried already."
        )
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
            if _compute_missing_state_bytes(config, choice, larger) > 0:
                continue
            try:
                if _has_enough_memory(apply_candidate(config, smallest), smallest, place):
                    return devices
            except IllegalLayoutError:
                continue
    return None
