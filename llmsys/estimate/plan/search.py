"""The search: every legal layout, the largest micro-batch that fits in it, ranked by the time of a step.

Gives the best few, those that nothing beats in both time and memory, and for each neighbour of the best what binds it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from llmsys.config.engine import EngineConfig, Torch
from llmsys.config.rule import divisors
from llmsys.config.run import RunConfig
from llmsys.errors import LayoutError
from llmsys.estimate.memory_peak import peak_memory
from llmsys.estimate.plan.candidate import (
    ENGINES,
    OFFLOADED,
    RECOMPUTE,
    Choice,
    IllegalError,
    Place,
    Priced,
    choices,
    configured,
    engine_name,
    priced,
)
from llmsys.estimate.precision import resolve_for_profile

MOST_DEVICES = 2**20
"""Where looking for a number of devices that is enough ends."""


@dataclass(frozen=True)
class Rejected:
    """A neighbour of the best choice, and the constraint that binds it."""

    change: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """The layouts that fit, fastest first; those of them that nothing beats in both; and the neighbours of the best."""

    ranked: list[Priced]
    pareto: list[Priced]
    rejected: list[Rejected]
    considered: int


def engines_of(config: RunConfig, offered: tuple[EngineConfig, ...]) -> tuple[EngineConfig, ...]:
    """What is searched: engines of the kind that the config names, all of them where it names none."""
    named = "engine" in config.model_fields_set
    return tuple(one for one in offered if not named or one.kind == config.engine.kind)


def plan(config: RunConfig, place: Place) -> Plan:
    """Search all layouts of `config.model` and its batch at a place; offload is tried where nothing fits without.

    Raises LayoutError when nothing fits at all, with the bytes that are too many and what would do.
    """
    config = resolve_for_profile(config, place.device)
    engines = engines_of(config, ENGINES)
    found, considered, closest, refusal = _search(config, place, engines)
    if not found:
        engines = engines_of(config, OFFLOADED)
        found, more, offloaded, _ = _search(config, place, engines)
        considered, closest = considered + more, offloaded or closest
    if not found:
        raise LayoutError(_nothing(config, place, closest, refusal))
    ranked = sorted(found, key=lambda one: (one.seconds, one.memory.peak_bytes))
    beside = list(neighbours(config, ranked[0], place, engines_of(config, ENGINES)))
    return Plan(ranked, list(_pareto(ranked)), beside, considered)


def _search(
    config: RunConfig, place: Place, engines: tuple[EngineConfig, ...]
) -> tuple[list[Priced], int, Priced | None, str]:
    """(what fits, how many were looked at, the smallest that does not need to fit, the last refusal)."""
    found: list[Priced] = []
    considered, refusal = 0, ""
    closest: Priced | None = None
    for choice in choices(config, place, engines):
        for recompute in RECOMPUTE:
            considered += 1
            try:
                fitting, smallest = _fitting(config, replace(choice, recompute=recompute), place)
            except IllegalError as illegal:
                refusal = str(illegal)
                break
            found += fitting
            if closest is None or smallest.memory.peak_bytes < closest.memory.peak_bytes:
                closest = smallest
    return found, considered, closest, refusal


def _fitting(config: RunConfig, choice: Choice, place: Place) -> tuple[list[Priced], Priced]:
    """The largest micro-batch that fits and the next smaller one; and the smallest, whether it fits or not."""
    sizes = [size for size in divisors(choice.micro_sequences) if size <= 64 or size == choice.micro_sequences]
    smallest = priced(config, replace(choice, micro_sequences=sizes[0]), place)
    if place.refusal(smallest) is not None:
        return [], smallest
    low, high = 0, len(sizes) - 1
    while low < high:  # memory grows with the micro-batch
        middle = (low + high + 1) // 2
        if _size_fits(config, replace(choice, micro_sequences=sizes[middle]), place):
            low = middle
        else:
            high = middle - 1
    kept = [priced(config, replace(choice, micro_sequences=sizes[at]), place) for at in {low, max(0, low - 1)}]
    return kept, smallest


def _size_fits(config: RunConfig, choice: Choice, place: Place) -> bool:
    made = configured(config, choice)
    return place.refused(peak_memory(made, choice.layout), made, choice.layout) is None


def _pareto(ranked: list[Priced]) -> Iterator[Priced]:
    """Of choices by time, each that needs less memory than all faster ones."""
    least = float("inf")
    for one in ranked:
        if one.memory.peak_bytes < least:
            least = one.memory.peak_bytes
            yield one


def neighbours(config: RunConfig, best: Priced, place: Place, engines: tuple[EngineConfig, ...]) -> Iterator[Rejected]:
    """Each choice that differs from the best in one thing, and why it was not taken."""
    for change, choice in _changes(config, best.choice, place.cluster.devices, engines):
        try:
            one = priced(config, choice, place)
        except IllegalError as illegal:
            yield Rejected(change, f"illegal: {str(illegal).split('. Use')[0].rstrip('.')}")
            continue
        if (refusal := place.refusal(one)) is not None:
            yield Rejected(change, refusal)
        elif one.seconds >= best.seconds:
            grown = max(one.step.parts, key=lambda part: one.step.parts[part] - best.step.parts.get(part, 0.0))
            yield Rejected(change, f"time: {one.seconds / best.seconds - 1:+.1%}, most of it {grown}")


def _changes(
    config: RunConfig, best: Choice, devices: int, engines: tuple[EngineConfig, ...]
) -> Iterator[tuple[str, Choice]]:
    for axis in ("tensor", "context", "replicate"):
        for size in _beside(getattr(best, axis), devices):
            changed = replace(best, **{axis: size})  # type: ignore[arg-type]
            others = changed.replicate * changed.context * changed.tensor
            if devices % others == 0:
                shard = devices // others
                share = max(1, config.batch.sequences_per_step // (changed.replicate * shard))
                micro = max(size for size in divisors(share) if size <= max(1, best.micro_sequences))
                yield f"{axis}={size}", replace(changed, shard=shard, micro_sequences=micro)
    if config.model.moe is not None:
        for size in _beside(best.expert, config.model.moe.num_experts):
            yield f"expert={size}", replace(best, expert=size)
    share = max(1, config.batch.sequences_per_step // (best.replicate * best.shard))
    for size in _beside(best.micro_sequences, share):
        yield f"micro={size}", replace(best, micro_sequences=size)
    for policy in RECOMPUTE:
        if policy != best.recompute:
            yield f"recompute={policy}", replace(best, recompute=policy)
    for engine in engines:
        if engine != best.engine:
            yield engine_name(engine), _under(engine, best)


def _under(engine: EngineConfig, best: Choice) -> Choice:
    """The same ranks under another engine: DDP has copies where the others have shards."""
    data = best.replicate * best.shard
    if isinstance(engine, Torch) and engine.data_parallel == "ddp":
        return replace(best, engine=engine, replicate=data, shard=1)
    if best.shard == 1:
        return replace(best, engine=engine, replicate=1, shard=data)
    return replace(best, engine=engine)


def _beside(size: int, of: int) -> list[int]:
    """The next smaller and larger divisor."""
    legal = divisors(of)
    smaller = [one for one in legal if one < size]
    larger = [one for one in legal if one > size]
    return smaller[-1:] + larger[:1]


def _nothing(
    config: RunConfig,
    place: Place,
    closest: Priced | None,
    refusal: str,
) -> str:
    if closest is None:
        devices = place.cluster.devices
        return f"No layout of {devices} devices is legal for this model and batch. The last refusal: {refusal}"
    verdict = closest.memory.verdict(int(place.device.memory_bytes))
    why = verdict.text if not verdict.fits else f"{place.refusal(closest)}."
    enough = devices_that_fit(config, place)
    more = f"{enough} devices would do" if enough else f"no number up to {MOST_DEVICES} devices would do"
    return (
        f"No layout fits {place.cluster.devices} × {place.device.name}. The smallest is {closest.choice.text()}: {why} "
        f"With this batch, {more}."
    )


def devices_that_fit(config: RunConfig, place: Place) -> int | None:
    """The smallest doubling of the cluster on which some layout fits; None when a batch has no more rows to deal."""
    devices = place.cluster.devices
    while (devices := 2 * devices) <= MOST_DEVICES:
        larger = replace(place, cluster=place.cluster.model_copy(update={"devices": devices}))
        for choice in choices(config, larger, engines_of(config, ENGINES + OFFLOADED)):
            smallest = replace(choice, recompute="block", micro_sequences=1)
            try:
                if _size_fits(config, smallest, place):
                    return devices
            except IllegalError:
                continue
    return None
