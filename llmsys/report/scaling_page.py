"""Render the pages of scaling laws: a fitted one with its runs as dots, and the published ones for
a budget.

Reads runs and their fit, or the comparison of laws; writes one HTML file. Curves are dotted beyond
the largest run.
"""

from collections.abc import Sequence
from math import log10
from pathlib import Path
from typing import Any

from markupsafe import Markup

from llmsys.estimate.scaling.chinchilla import ParametricLaw
from llmsys.estimate.scaling.json_output import LawRow, ScaleOutput
from llmsys.estimate.scaling.law import BudgetRequest
from llmsys.estimate.scaling.law_fit import UNKNOWNS, LawFit, TrainingRun
from llmsys.estimate.summary_table import format_count
from llmsys.report.html_markup import build_table, format_amount, format_number
from llmsys.report.html_page import render_document
from llmsys.report.plots import (
    BLUE,
    FAINT,
    GREEN,
    ORANGE,
    PURPLE,
    Figure,
    Trace,
    build_bars,
    build_line,
    compute_bars_height,
)
from llmsys.report.report_section import Numbers, ReportSection
from llmsys.storage.atomic_write import write_bytes_atomically

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
        ReportSection("compute", "Compute", figures=[plot_loss_against_compute(points, fit)]),
        ReportSection(
            "parameters",
            "Parameters",
            figures=[plot_loss_against_axis(points, fit.law, "parameters", "tokens")],
        ),
        ReportSection(
            "tokens",
            "Tokens",
            figures=[plot_loss_against_axis(points, fit.law, "tokens", "parameters")],
        ),
        ReportSection("constants", "Constants", [_build_constants_table(fit)]),
        ReportSection("runs", "Runs", [_build_runs_table(points, fit)]),
    ]
    titles = ("scaling law", f"fitted on {len(points)} runs")
    notes = [
        "Intervals of 5 to 95 % come from resampled runs. They do not cover other data, another "
        "schedule, or sizes far beyond the largest run."
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
    return Figure(
        "by-compute",
        "Loss against compute",
        traces,
        _build_axes_layout("FLOPs (6 N D)"),
        height=380,
    )


def plot_loss_against_axis(
    points: Sequence[TrainingRun], law: ParametricLaw, axis: str, other: str
) -> Figure:
    """Return loss over parameters or tokens, with one curve of the law per value of the other,
    at most four.
    """
    values = sorted({getattr(point, other) for point in points})
    shown = (
        values
        if len(values) <= len(COLOURS)
        else [values[i * (len(values) - 1) // 3] for i in range(4)]
    )
    grid = _build_log_grid(
        min(getattr(p, axis) for p in points), max(getattr(p, axis) for p in points)
    )
    traces: list[Trace] = []
    for value, colour in zip(shown, COLOURS, strict=False):
        members = [point for point in points if getattr(point, other) == value]
        traces.append(
            _build_dots(
                f"{format_amount(value)} {other}",
                [getattr(p, axis) for p in members],
                members,
                colour,
            )
        )
        sized = [
            (x, law.predict_loss(x, value) if axis == "parameters" else law.predict_loss(value, x))
            for x in grid
        ]
        traces.append(
            build_line(f"law, {format_amount(value)} {other}", *_split_columns(sized), colour)
            | {"showlegend": False}
        )
    return Figure(
        f"by-{axis}", f"Loss against {axis}", traces, _build_axes_layout(axis), height=380
    )


def _build_dots(name: str, x: Sequence[float], points: Sequence[TrainingRun], colour: str) -> Trace:
    dots = build_line(name, x, [point.loss for point in points], colour)
    return dots | {"mode": "markers", "marker": {"color": colour, "size": 8}}


def _build_axes_layout(x_title: str) -> dict[str, Any]:
    return {
        # more ticks make plotly label every digit
        "xaxis": {"title": {"text": x_title}, "type": "log", "nticks": 5},
        "yaxis": {"title": {"text": "loss, nats per token"}, "type": "log", "nticks": 5},
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


def _build_constants_table(fit: LawFit) -> Markup:
    law = fit.law
    values = (law.irreducible, law.parameter_factor, law.token_factor, law.alpha, law.beta)
    rows = [
        (name, f"{value:.6g}", _format_interval(fit, name))
        for name, value in zip(UNKNOWNS, values, strict=True)
    ]
    return build_table(
        ("L = E + A / N^alpha + B / D^beta", "value", "5 to 95 %"), rows, numeric=(1, 2)
    )


def _build_runs_table(points: Sequence[TrainingRun], fit: LawFit) -> Markup:
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
    return build_table(
        ("run", "parameters", "tokens", "loss", "above the law"), rows, numeric=(1, 2, 3, 4)
    )


def write_scale_page(result: ScaleOutput, path: Path) -> Path:
    """Write the page of a comparison of scaling laws: sizes and tokens that each recommends, and
    their spread.

    Args:
        result: what `compare_laws` returned.
        path: HTML file to write.

    Returns:
        `path`.
    """
    spread, laws = result.spread, result.laws
    numbers: Numbers = [
        (name, format_count(spread[name].median),
         f"{format_count(spread[name].low)} to {format_count(spread[name].high)}")
        for name in ("parameters", "tokens")
    ]  # fmt: skip
    ratio = spread["tokens_per_parameter"]
    numbers.append(
        (
            "tokens per parameter",
            f"{ratio.median:.1f}",
            f"{ratio.low:.1f} to {ratio.high:.1f}",
        )
    )
    names = [row.law for row in laws]
    ratios = [row.tokens_per_parameter for row in laws]
    bars = build_bars(names, ratios, [f"{one:.1f}" for one in ratios], "tokens per parameter",
                      [ORANGE if row.marked else BLUE for row in laws])  # fmt: skip
    figures = [
        _plot_law_optima(laws),
        Figure(
            "plot-ratio",
            "Tokens per parameter",
            *bars,
            height=compute_bars_height(len(names), names),
        ),
    ]
    rows = [
        (row.law, format_count(row.parameters), format_count(row.tokens),
         "–" if row.loss is None else f"{row.loss:.3f}",
         "; ".join(filter(None, [*row.remarks, row.evidence])))
        for row in laws
    ]  # fmt: skip
    table = build_table(("law", "parameters", "tokens", "loss", "remarks"), rows, numeric=(1, 2, 3))
    parts = [ReportSection("laws", "Laws", [table], figures)]
    notes = [
        "Losses depend on the data and tokenizer of each law and cannot be compared between laws."
    ]
    titles = ("scaling laws", f"{result.budget.flops:.3g} FLOPs")
    write_bytes_atomically(path, render_document(titles, numbers, notes, parts).encode())
    return path


def _plot_law_optima(laws: Sequence[LawRow]) -> Figure:
    """Return the front of laws: what each recommends, in parameters and tokens, from the
    smallest to the largest.
    """
    ordered = sorted(laws, key=lambda row: row.parameters)
    x, y = [row.parameters for row in ordered], [row.tokens for row in ordered]
    trace = build_line("recommendations", x, y, BLUE, markers=True)
    trace |= {"text": [row.law for row in ordered]}
    trace |= {"hovertemplate": "%{text}: %{x:.3s} parameters, %{y:.3s} tokens<extra></extra>"}
    layout = {
        "xaxis": {"title": {"text": "parameters"}, "type": "log"},
        "yaxis": {"title": {"text": "tokens"}, "type": "log"},
        "showlegend": False,
        "hovermode": "closest",
    }
    caption = "A dot for each law, from the smallest recommended model to the largest."
    return Figure("plot-optima", "Size against tokens", [trace], layout, caption, height=360)
