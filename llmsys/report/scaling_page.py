"""Render the page of a fitted scaling law: loss against compute, parameters and tokens, with the runs as dots.

Reads runs and their fit; writes one HTML file. Curves are dotted beyond the largest run.
"""

from collections.abc import Sequence
from math import log10
from pathlib import Path
from typing import Any

from llmsys.estimate.scaling.chinchilla import ParametricLaw
from llmsys.estimate.scaling.law import BudgetRequest
from llmsys.estimate.scaling.law_fit import UNKNOWNS, LawFit, TrainingRun
from llmsys.local_files import write_bytes_atomically
from llmsys.report.html_markup import Html, build_section, build_table, format_amount, format_number
from llmsys.report.html_page import render_document
from llmsys.report.plots import BLUE, FAINT, GREEN, ORANGE, PURPLE, Figure, Trace, build_line
from llmsys.report.report_section import ReportSection, build_report_section

COLOURS = (BLUE, ORANGE, GREEN, PURPLE)
# Range of the plotted law, as a multiple of the largest run.
BEYOND = 30.0


def write_scaling_report(points: Sequence[TrainingRun], fit: LawFit, path: Path) -> Path:
    """Write the page of a fitted law.

    Args:
        points: The runs.
        fit: The law fitted to them, with intervals.
        path: HTML file to write.

    Returns:
        `path`.
    """
    numbers = [
        ("runs", format_number(len(points)), "points of the fit"),
        ("irreducible loss", f"{fit.law.irreducible:.3f}", _format_interval(fit, "E")),
        ("alpha", f"{fit.law.alpha:.3f}", _format_interval(fit, "alpha")),
        ("beta", f"{fit.law.beta:.3f}", _format_interval(fit, "beta")),
    ]
    parts = [
        build_report_section("compute", "Compute", [plot_loss_against_compute(points, fit)], None),
        build_report_section(
            "parameters", "Parameters", [plot_loss_against_axis(points, fit.law, "parameters", "tokens")], None
        ),
        build_report_section(
            "tokens", "Tokens", [plot_loss_against_axis(points, fit.law, "tokens", "parameters")], None
        ),
        ReportSection("constants", "Constants", build_section("constants", "Constants", _build_constants_table(fit))),
        ReportSection("runs", "Runs", build_section("runs", "Runs", _build_runs_table(points, fit))),
    ]
    titles = ("scaling law", f"fitted on {len(points)} runs")
    notes = [
        "Intervals of 5 to 95 % come from resampled runs. They do not cover other data, another schedule, or "
        "sizes far beyond the largest run."
    ]
    write_bytes_atomically(path, render_document(titles, numbers, notes, parts).encode())
    return path


def plot_loss_against_compute(points: Sequence[TrainingRun], fit: LawFit) -> Figure:
    """Return the loss of each run over 6 N D, with the law's lowest loss for each budget."""
    low, high = fit.law.origin.spans[2].low, fit.law.origin.spans[2].high
    runs = _build_dots("runs", [point.flops for point in points], points, BLUE)
    inside, outside = _build_log_grid(low, high), _build_log_grid(high, high * BEYOND)
    frontier = [(flops, fit.law.find_optimum(BudgetRequest(flops)).loss or 0.0) for flops in inside]
    ahead = [(flops, fit.law.find_optimum(BudgetRequest(flops)).loss or 0.0) for flops in outside]
    traces = [
        runs,
        build_line("best of the law", *_split_columns(frontier), ORANGE),
        build_line("beyond the runs", *_split_columns(ahead), FAINT)
        | {"line": {"color": FAINT, "width": 2, "dash": "dot"}},
    ]
    return Figure("by-compute", "Loss against compute", traces, _build_axes_layout("FLOPs (6 N D)"), height=380)


def plot_loss_against_axis(points: Sequence[TrainingRun], law: ParametricLaw, axis: str, other: str) -> Figure:
    """Return loss over parameters or tokens, with one curve of the law per value of the other, at most four."""
    values = sorted({getattr(point, other) for point in points})
    shown = values if len(values) <= len(COLOURS) else [values[i * (len(values) - 1) // 3] for i in range(4)]
    grid = _build_log_grid(min(getattr(p, axis) for p in points), max(getattr(p, axis) for p in points))
    traces: list[Trace] = []
    for value, colour in zip(shown, COLOURS, strict=False):
        members = [point for point in points if getattr(point, other) == value]
        traces.append(
            _build_dots(f"{format_amount(value)} {other}", [getattr(p, axis) for p in members], members, colour)
        )
        sized = [(x, law.predict_loss(x, value) if axis == "parameters" else law.predict_loss(value, x)) for x in grid]
        traces.append(
            build_line(f"law, {format_amount(value)} {other}", *_split_columns(sized), colour) | {"showlegend": False}
        )
    return Figure(f"by-{axis}", f"Loss against {axis}", traces, _build_axes_layout(axis), height=380)


def _build_dots(name: str, x: Sequence[float], points: Sequence[TrainingRun], colour: str) -> Trace:
    dots = build_line(name, x, [point.loss for point in points], colour)
    return dots | {"mode": "markers", "marker": {"color": colour, "size": 8}}


def _build_axes_layout(x_title: str) -> dict[str, Any]:
    return {
        "xaxis": {"title": {"text": x_title}, "type": "log"},
        "yaxis": {"title": {"text": "loss, nats per token"}, "type": "log"},
        "showlegend": True,
        "hovermode": "closest",
    }


def _build_log_grid(low: float, high: float, count: int = 40) -> list[float]:
    start, stop = log10(low), log10(high)
    return [10 ** (start + (stop - start) * i / (count - 1)) for i in range(count)]


def _split_columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def _format_interval(fit: LawFit, name: str) -> str:
    low, high = fit.intervals[name]
    return f"{low:.4g} to {high:.4g}"


def _build_constants_table(fit: LawFit) -> Html:
    law = fit.law
    values = (law.irreducible, law.parameter_factor, law.token_factor, law.alpha, law.beta)
    rows = [(name, f"{value:.6g}", _format_interval(fit, name)) for name, value in zip(UNKNOWNS, values, strict=True)]
    return build_table(("L = E + A / N^alpha + B / D^beta", "value", "5 to 95 %"), rows, numeric=(1, 2))


def _build_runs_table(points: Sequence[TrainingRun], fit: LawFit) -> Html:
    rows = [
        (
            point.name,
            format_amount(point.parameters),
            format_amount(point.tokens),
            f"{point.loss:.4f}",
            f"{100 * residual:+.2f} %",
        )
        for point, residual in zip(points, fit.residuals, strict=True)
    ]
    return build_table(("run", "parameters", "tokens", "loss", "above the law"), rows, numeric=(1, 2, 3, 4))
