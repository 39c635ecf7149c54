"""The page of a fitted scaling law: loss against compute, parameters and tokens, with the law through the runs.

Reads points and their fit; gives one HTML file like every other report. Curves end where the runs end, and what lies
beyond is drawn dotted.
"""

from collections.abc import Sequence
from math import log10
from pathlib import Path
from typing import Any

from llmsys.estimate.scaling.chinchilla import Parametric
from llmsys.estimate.scaling.fit import UNKNOWNS, Fit
from llmsys.estimate.scaling.law import Request
from llmsys.estimate.scaling.points import Point
from llmsys.publish import publish_bytes
from llmsys.report.markup import Html, amount, number, section, table
from llmsys.report.page import document
from llmsys.report.plots import BLUE, FAINT, GREEN, ORANGE, PURPLE, Figure, Trace, line
from llmsys.report.run_sections import Part, part

COLOURS = (BLUE, ORANGE, GREEN, PURPLE)
BEYOND = 30.0
"""How many times beyond the largest run the law is drawn."""


def write_scaling_report(points: Sequence[Point], fit: Fit, path: Path) -> Path:
    """Write the page and return its path."""
    numbers = [
        ("runs", number(len(points)), "points of the fit"),
        ("irreducible loss", f"{fit.law.irreducible:.3f}", _interval(fit, "E")),
        ("alpha", f"{fit.law.alpha:.3f}", _interval(fit, "alpha")),
        ("beta", f"{fit.law.beta:.3f}", _interval(fit, "beta")),
    ]
    parts = [
        part("compute", "Compute", [against_compute(points, fit)], None),
        part("parameters", "Parameters", [against(points, fit.law, "parameters", "tokens")], None),
        part("tokens", "Tokens", [against(points, fit.law, "tokens", "parameters")], None),
        Part("constants", "Constants", section("constants", "Constants", _constants(fit))),
        Part("runs", "Runs", section("runs", "Runs", _runs(points, fit))),
    ]
    titles = ("scaling law", f"fitted on {len(points)} runs")
    notes = [
        "Intervals of 5 to 95 % come from resampled runs. They do not know what a law cannot: other data, another "
        "schedule, or a size far beyond the largest run."
    ]
    publish_bytes(path, document(titles, numbers, notes, parts).encode())
    return path


def against_compute(points: Sequence[Point], fit: Fit) -> Figure:
    """Loss of each run over 6 N D, with the lowest loss that the law gives for each budget."""
    low, high = fit.law.origin.spans[2].low, fit.law.origin.spans[2].high
    runs = _dots("runs", [point.flops for point in points], points, BLUE)
    inside, outside = _grid(low, high), _grid(high, high * BEYOND)
    frontier = [(flops, fit.law.optimum(Request(flops)).loss or 0.0) for flops in inside]
    ahead = [(flops, fit.law.optimum(Request(flops)).loss or 0.0) for flops in outside]
    traces = [
        runs,
        line("best of the law", *_columns(frontier), ORANGE),
        line("beyond the runs", *_columns(ahead), FAINT) | {"line": {"color": FAINT, "width": 2, "dash": "dot"}},
    ]
    return Figure("by-compute", "Loss against compute", traces, _axes("FLOPs (6 N D)"), height=380)


def against(points: Sequence[Point], law: Parametric, axis: str, other: str) -> Figure:
    """Loss over one of parameters and tokens; a curve of the law for each value of the other, four at most."""
    values = sorted({getattr(point, other) for point in points})
    shown = values if len(values) <= len(COLOURS) else [values[i * (len(values) - 1) // 3] for i in range(4)]
    grid = _grid(min(getattr(p, axis) for p in points), max(getattr(p, axis) for p in points))
    traces: list[Trace] = []
    for value, colour in zip(shown, COLOURS, strict=False):
        members = [point for point in points if getattr(point, other) == value]
        traces.append(_dots(f"{amount(value)} {other}", [getattr(p, axis) for p in members], members, colour))
        sized = [(x, law.loss(x, value) if axis == "parameters" else law.loss(value, x)) for x in grid]
        traces.append(line(f"law, {amount(value)} {other}", *_columns(sized), colour) | {"showlegend": False})
    return Figure(f"by-{axis}", f"Loss against {axis}", traces, _axes(axis), height=380)


def _dots(name: str, x: Sequence[float], points: Sequence[Point], colour: str) -> Trace:
    dots = line(name, x, [point.loss for point in points], colour)
    return dots | {"mode": "markers", "marker": {"color": colour, "size": 8}}


def _axes(x_title: str) -> dict[str, Any]:
    return {
        "xaxis": {"title": {"text": x_title}, "type": "log"},
        "yaxis": {"title": {"text": "loss, nats per token"}, "type": "log"},
        "showlegend": True,
        "hovermode": "closest",
    }


def _grid(low: float, high: float, count: int = 40) -> list[float]:
    start, stop = log10(low), log10(high)
    return [10 ** (start + (stop - start) * i / (count - 1)) for i in range(count)]


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def _interval(fit: Fit, name: str) -> str:
    low, high = fit.intervals[name]
    return f"{low:.4g} to {high:.4g}"


def _constants(fit: Fit) -> Html:
    law = fit.law
    values = (law.irreducible, law.parameter_factor, law.token_factor, law.alpha, law.beta)
    rows = [(name, f"{value:.6g}", _interval(fit, name)) for name, value in zip(UNKNOWNS, values, strict=True)]
    return table(("L = E + A / N^alpha + B / D^beta", "value", "5 to 95 %"), rows, numeric=(1, 2))


def _runs(points: Sequence[Point], fit: Fit) -> Html:
    rows = [
        (point.name, amount(point.parameters), amount(point.tokens), f"{point.loss:.4f}", f"{100 * residual:+.2f} %")
        for point, residual in zip(points, fit.residuals, strict=True)
    ]
    return table(("run", "parameters", "tokens", "loss", "above the law"), rows, numeric=(1, 2, 3, 4))
