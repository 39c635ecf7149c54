"""Time, money and energy as lines for people: the interval, what the step is spent on, and every assumption."""

from collections.abc import Iterator
from typing import Any


def priced_lines(result: dict[str, Any]) -> Iterator[str]:
    """The lines below the estimate's own; none for an estimate without a device."""
    if (time := result.get("time")) is None:
        return
    used = time["utilisation"]
    yield ""
    yield f"on {time['ranks']} × {time['device']}; P50, with P10 to P90 behind it"
    yield _row("seconds of a step", _three(time["step_seconds"]), "")
    whole = time["step_seconds"]["p50"]
    for name, seconds in sorted(time["parts_seconds"].items(), key=lambda one: -one[1]):
        if seconds >= 0.005 * whole:
            yield _row(f"  {name}", f"{seconds:.4g}", f"{seconds / whole:.0%}")
    yield _row("tokens per second", f"{time['tokens_per_second_per_device']:,.0f}", "on each device")
    yield _row("utilisation in a step", f"{used['model_causal']:.1%}", "of the peak, causal-exact model operations")
    yield _row("", f"{used['model_full']:.1%}", "attention over all of s²")
    yield _row("", f"{used['hardware']:.1%}", "with recomputation")
    if time["run"] is not None:
        yield from _run_lines(time["run"], result["money"], result.get("energy"))


def _run_lines(run: dict[str, Any], money: dict[str, Any], energy: dict[str, Any] | None) -> Iterator[str]:
    minutes, failures = run["checkpoint_every_seconds"] / 60, run["failures_per_day"]
    yield _row(
        "goodput", f"{run['goodput']:.1%}", f"{failures:.2g} failures a day, a checkpoint every {minutes:.3g} minutes"
    )
    yield _row(
        "utilisation of the run", f"{run['utilisation_model_causal']:.1%}", "with what real runs lose beside steps"
    )
    yield _row("hours", _three(run["hours"]), "")
    yield _row("accelerator-hours", _three(money["accelerator_hours"]), "")
    yield _row(money["currency"], _three(money["amount"]), _assumed(money["assumptions"]))
    if energy is not None:
        watts = f"{energy['watts_per_device']:.0f} W each"
        yield _row("kWh", _three(energy["kwh"]), f"{watts}, {_assumed(energy['assumptions'])}")


def _assumed(values: dict[str, Any]) -> str:
    return "assumed: " + ", ".join(f"{name} {value:g}" for name, value in values.items())


def _three(value: dict[str, float]) -> str:
    return f"{_short(value['p50'])} ({_short(value['p10'])} to {_short(value['p90'])})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _row(title: str, value: str, note: str) -> str:
    return f"{title:<22}{value:>34}  {note}".rstrip()
