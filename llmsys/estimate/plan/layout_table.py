"""A plan as the object that `llmsys plan --json` prints, and as text."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from llmsys.estimate.device_profile import DeviceProfile
from llmsys.estimate.memory_residual import format_fit_probability, get_memory_residual
from llmsys.estimate.memory_timeline import MemoryTimeline
from llmsys.estimate.percentile_interval import PercentileInterval
from llmsys.estimate.plan.json_output import (
    LayoutPrice,
    PlannedProgram,
    PlanOutput,
    PricedLayout,
    TurnedAwayLayout,
)
from llmsys.estimate.plan.layout_candidate import SCHEDULES, EstimatedCandidate, PlanTarget
from llmsys.estimate.plan.layout_search import LayoutPlan
from llmsys.estimate.program_profile import ProgramProfile
from llmsys.estimate.step_time import StepTime

GIB = 2**30
# Layouts that are not likely to fit, of each table and object.
MAX_TURNED_AWAY = 5


def build_plan_output(
    found: LayoutPlan,
    place: PlanTarget,
    best: list[PricedLayout],
    programs: list[PlannedProgram],
    launch: str,
    dryrun: str,
) -> PlanOutput:
    """Build the object that `llmsys plan --json` prints.

    Args:
        found: plan that `search_layouts` returned.
        place: device and cluster that it was made for.
        best: the fastest layouts.
        programs: other programs, each in its fastest layout.
        launch: command that starts the fastest layout.
        dryrun: command that runs one rank of it without a GPU; may be empty.

    Returns:
        The object, without a run, a config and a page.
    """
    # `considered` counts no micro-batches and schedules
    fitting = {
        replace(one.choice, micro_sequences=0, schedule=SCHEDULES[0]) for one in found.ranked
    }
    return PlanOutput(
        device=place.device.name,
        considered=found.considered,
        fitting=len(fitting),
        min_fit_probability=place.min_fit_probability,
        best=best,
        pareto=[build_priced_layout(one, place.device) for one in found.pareto],
        turned_away=[_build_turned_away(one, place) for one in found.turned_away[:MAX_TURNED_AWAY]],
        rejected=found.rejected,
        programs=programs,
        launch=launch,
        dryrun=dryrun,
    )


def _build_turned_away(one: EstimatedCandidate, place: PlanTarget) -> TurnedAwayLayout:
    return TurnedAwayLayout(
        choice=one.choice.format_layout(),
        reason=str(place.explain_rejection(one)),
        **collect_price(one.step, one.memory, place.device),
    )


def build_priced_layout(one: EstimatedCandidate, device: DeviceProfile) -> PricedLayout:
    """Return a layout as `llmsys plan --json` prints it.

    Args:
        one: a layout that fits.
        device: profile that it is priced on.

    Returns:
        Its choices and its price.
    """
    return PricedLayout(
        choice=one.choice.format_layout(),
        engine=one.choice.engine.model_dump(mode="json"),
        layout=one.choice.layout.to_settings(),
        recompute=one.choice.recompute,
        micro_sequences=one.choice.micro_sequences,
        largest={item.name: item.bytes for item in one.memory.list_largest_items(3)},
        **collect_price(one.step, one.memory, device),
    )


def collect_price(
    step: StepTime,
    memory: MemoryTimeline,
    device: DeviceProfile,
    program: ProgramProfile | None = None,
) -> dict[str, Any]:
    """Return the fields of `LayoutPrice`.

    Args:
        step: time of a step in the layout.
        memory: memory of its fullest rank.
        device: profile that it is priced on.
        program: who runs it; None: llmsys.

    Returns:
        Values by field.
    """
    residual = get_memory_residual(step.ranks, program)
    return {
        "needed_bytes": residual.compute_interval(memory),
        "fit_probability": residual.compute_fit_probability(memory, device.memory_bytes),
        "step_seconds": step.seconds,
        "tokens_per_second_per_device": step.tokens_per_second_per_device,
        "utilisation": step.mfu,
        "peak_bytes": memory.peak_bytes,
        "driver_bytes": memory.driver_bytes,
        "peak_instant": memory.peak_instant,
    }


def format_plan(data: PlanOutput) -> str:
    """Format a plan as tables: the best, the Pareto set, and the reasons against the neighbors.

    Args:
        data: what `build_plan_output` returned.

    Returns:
        Lines of text.
    """
    return "\n".join(_iter_plan_lines(data))


def _iter_plan_lines(data: PlanOutput) -> Iterator[str]:
    yield (
        f"{data.device}: {data.considered} layouts considered, {data.fitting} fit with "
        f"{data.min_fit_probability:.0%} or more"
    )
    yield ""
    best = [(one.choice, one) for one in data.best]
    yield from _iter_candidate_lines("fastest", best)
    shown = {one.choice for one in data.best}
    if smaller := [(one.choice, one) for one in data.pareto if one.choice not in shown]:
        yield ""
        yield from _iter_candidate_lines("slower, with less memory", smaller[:5])
    if data.turned_away:
        yield ""
        yield f"faster, but not likely to fit (--min-fit-probability {data.min_fit_probability:g})"
        width = max(len(one.choice) for one in data.turned_away)
        for one in data.turned_away:
            yield f"  {one.choice:<{width}}  {one.step_seconds.p50:.3g} s  {one.reason}"
    if data.programs:
        yield ""
        rows = [(f"{one.program} {one.layout}", one) for one in data.programs]
        yield from _iter_candidate_lines("other programs, each in its fastest layout", rows)
    if (run := data.run) is not None:
        yield ""
        yield (
            f"the run in the fastest layout: {_format_interval(run.hours)} hours, "
            f"{_format_interval(run.amount)} {run.currency} (P50, P10 to P90), "
            f"at {run.price_per_hour:g} {run.currency} an hour for each device"
        )
    if data.rejected:
        yield ""
        yield f"neighbours of {data.best[0].choice}, and the constraint that binds each"
        width = max(len(one.change) for one in data.rejected)
        yield from (f"  {one.change:<{width}}  {one.reason}" for one in data.rejected)


def _iter_candidate_lines(title: str, rows: Sequence[tuple[str, LayoutPrice]]) -> Iterator[str]:
    width = max(len(title), *(len(name) for name, _ in rows)) + 2
    yield (
        f"{title:<{width}}{'step P10–P50–P90, s':>24}{'tokens/s/device':>17}{'MFU':>7}"
        f"{'peak':>10}  {'fits':<5}  fullest"
    )
    for name, one in rows:
        step = one.step_seconds
        seconds = f"{step.p10:.3g}–{step.p50:.3g}–{step.p90:.3g}"
        peak = (one.peak_bytes + one.driver_bytes) / GIB
        yield (
            f"{name:<{width}}{seconds:>24}{one.tokens_per_second_per_device:>17,.0f}"
            f"{one.utilisation:>7.1%}{peak:>6.1f} GiB  "
            f"{_format_percent(one.fit_probability):<5}  {one.peak_instant}"
        )


def _format_percent(probability: float) -> str:
    """The number of `format_fit_probability`, for a column: 97%, >99% or <1%."""
    words = format_fit_probability(probability).removeprefix("fits with ")
    return words.replace("over ", ">").replace("under ", "<")


def _format_interval(value: PercentileInterval) -> str:
    return f"{value.p50:,.4g} ({value.p10:,.4g} to {value.p90:,.4g})"
