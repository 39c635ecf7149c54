"""Time, money and energy as lines for people: the interval, what the step is spent on, and every assumption."""

from collections.abc import Iterator
from typing import Any


def iter_cost_lines(result: dict[str, Any]) -> Iterator[str]:
    """The lines below the estimate's own; none for an estimate without a device."""
    if (time := result.get("time")) is None:
        return
    used = time["utilisation"]
    yield ""
    yield f"on {time['ranks']} × {time['device']}; P50, with P10 to P90 behind it"
    yield _format_text_row("seconds of a step", _format_interval(time["step_seconds"]), "")
    whole = time["step_seconds"]["p50"]
    for name, seconds in sorted(time["parts_seconds"].items(), key=lambda one: -one[1]):
        if seconds >= 0.005 * whole:
            yield _format_text_row(f"  {name}", f"{seconds:.4g}", f"{seconds / whole:.0%}")
    yield _format_text_row("tokens per second", f"{time['tokens_per_second_per_device']:,.0f}", "on each device")
    yield _format_text_row("utilisation in a step", f"{used['model_causal']:.1%}", "of the peak, causal-exact model operations")
    yield _format_text_row("", f"{used['model_full']:.1%}", "attention over all of s²")
    yield _format_text_row("", f"{used['hardware']:.1%}", "with recomputation")
    if time["run"] is not None:
        yield from _iter_run_cost_lines(time["run"], result["money"], result.get("energy"))


def _iter_run_cost_lines(run: dict[str, Any], money: dict[str, Any], energy: dict[str, Any] | None) -> Iterator[str]:
    minutes, failures = run["checkpoint_every_seconds"] / 60, run["failures_per_day"]
    yield _format_text_row(
        "goodput", f"{run['goodput']:.1%}", f"{failures:.2g} failures a day, a checkpoint every {minutes:.3g} minutes"
    )
    yield _format_text_row(
        "utilisation of the run", f"{run['utilisation_model_causal']:.1%}", "with what real runs lose beside steps"
    )
    yield _format_text_row("hours", _format_interval(run["hours"]), "")
    yield _format_text_row("accelerator-hours", _format_interval(money["accelerator_hours"]), "")
    yield _format_text_row(money["currency"], _format_interval(money["amount"]), _format_assumptions(money["assumptions"]))
    if energy is not None:
        watts = f"{energy['watts_per_device']:.0f} W each"
        yield _format_text_row("kWh", _format_interval(energy["kwh"]), f"{watts}, {_format_assumptions(energy['assumptions'])}")


def _format_assumptions(values: dict[str, Any]) -> str:
    return "assumed: " + ", ".join(f"{name} {value:g}" for name, value in values.items())


def _format_interval(value: dict[str, float]) -> str:
    return f"{_format_number(value['p50'])} ({_format_number(value['p10'])} to {_format_number(value['p90'])})"


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _format_text_row(title: str, value: str, note: str) -> str:
    return f"{title:<22}{value:>34}  {note}".rstrip()
