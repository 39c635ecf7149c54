"""A plan and a checked layout as text and as plain values."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from llmsys.estimate.device_profile import DeviceProfile
from llmsys.estimate.plan.layout_candidate import SCHEDULES, EstimatedCandidate
from llmsys.estimate.plan.layout_search import LayoutPlan

GIB = 2**30


def plan_to_dict(found: LayoutPlan, device: DeviceProfile, count: int) -> dict[str, Any]:
    """Convert a plan to plain values.

    Args:
        found: plan that `search_layouts` returned.
        device: profile that it was made for.
        count: number of layouts in `best`.

    Returns:
        Keys: device, considered, fitting, best (a list), pareto, rejected.
    """
    return {
        "device": device.name,
        "considered": found.considered,
        # `considered` counts no micro-batches and schedules
        "fitting": len(
            {replace(one.choice, micro_sequences=0, schedule=SCHEDULES[0]) for one in found.ranked}
        ),
        "best": [convert_candidate_to_dict(one) for one in found.ranked[:count]],
        "pareto": [convert_candidate_to_dict(one) for one in found.pareto],
        "rejected": [{"change": one.change, "reason": one.reason} for one in found.rejected],
    }


def convert_candidate_to_dict(one: EstimatedCandidate) -> dict[str, Any]:
    """One choice with its price."""
    return {
        "choice": one.choice.format_layout(),
        "engine": one.choice.engine.model_dump(mode="json"),
        "layout": one.choice.layout.to_settings(),
        "recompute": one.choice.recompute,
        "micro_sequences": one.choice.micro_sequences,
        "step_seconds": one.step.seconds.to_dict(),
        "tokens_per_second_per_device": one.step.tokens_per_second_per_device,
        "utilisation": one.step.mfu,
        "peak_bytes": one.memory.peak_bytes,
        "driver_bytes": one.memory.driver_bytes,
        "peak_instant": one.memory.peak_instant,
        "largest": {item.name: item.bytes for item in one.memory.list_largest_items(3)},
    }


def format_plan(data: dict[str, Any]) -> str:
    """Format a plan as tables: the best, the Pareto set, and the reasons against the neighbors.

    Args:
        data: values that `plan_to_dict` returned.

    Returns:
        Lines of text.
    """
    return "\n".join(_iter_plan_lines(data))


def _iter_plan_lines(data: dict[str, Any]) -> Iterator[str]:
    yield f"{data['device']}: {data['considered']} layouts considered, {data['fitting']} fit"
    yield ""
    yield from _iter_candidate_lines("fastest", data["best"])
    shown = {one["choice"] for one in data["best"]}
    if smaller := [one for one in data["pareto"] if one["choice"] not in shown]:
        yield ""
        yield from _iter_candidate_lines("slower, with less memory", smaller[:5])
    if others := data.get("programs"):
        yield ""
        rows = [one | {"choice": f"{one['program']} {one['layout']}"} for one in others]
        yield from _iter_candidate_lines("other programs, each in its fastest layout", rows)
    if (run := data.get("run")) is not None:
        hours, money = (_format_interval(run[key]) for key in ("hours", "amount"))
        yield ""
        yield (
            f"the run in the fastest layout: {hours} hours, {money} {run['currency']} (P50, P10 "
            "to P90)"
        )
    if data["rejected"]:
        yield ""
        yield f"neighbours of {data['best'][0]['choice']}, and the constraint that binds each"
        width = max(len(one["change"]) for one in data["rejected"])
        yield from (f"  {one['change']:<{width}}  {one['reason']}" for one in data["rejected"])


def _iter_candidate_lines(title: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    width = max(len(title), *(len(one["choice"]) for one in rows)) + 2
    yield (
        f"{title:<{width}}{'step P10–P50–P90, s':>24}{'tokens/s/device':>17}{'MFU':>7}{'peak':>10} "
        " fullest"
    )
    for one in rows:
        seconds = "–".join(f"{one['step_seconds'][key]:.3g}" for key in ("p10", "p50", "p90"))
        peak = (one["peak_bytes"] + one["driver_bytes"]) / GIB
        yield (
            f"{one['choice']:<{width}}{seconds:>24}{one['tokens_per_second_per_device']:>17,.0f}"
            f"{one['utilisation']:>7.1%}{peak:>6.1f} GiB  {one['peak_instant']}"
        )


def _format_interval(value: dict[str, float]) -> str:
    return f"{value['p50']:,.4g} ({value['p10']:,.4g} to {value['p90']:,.4g})"
