"""Render the page of a coordinate check: the change and the size of activations over the width."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from llmsys.report.html_page import render_document
from llmsys.report.plots import BLUE, GREEN, ORANGE, PURPLE, Figure, build_line
from llmsys.report.report_section import Numbers, ReportSection
from llmsys.storage.local_files import write_bytes_atomically

COLOURS = (BLUE, ORANGE, GREEN, PURPLE)


class CoordinateCurves(Protocol):
    """One row of llmsys/doctor/coordinate_check.py, which is a layer above this one."""

    @property
    def parametrization(self) -> str:
        """Kind of the parametrization."""

    @property
    def part(self) -> str:
        """Kind of the activation."""

    @property
    def sizes(self) -> Mapping[int, float]:
        """Root mean square after the steps, by width."""

    @property
    def changes(self) -> Mapping[int, float]:
        """Root mean square of the change, by width."""

    @property
    def exponent(self) -> float:
        """Slope of log change over log width."""


def write_coordinate_page(rows: Sequence[CoordinateCurves], steps: int, path: Path) -> Path:
    """Write the page of a coordinate check.

    Args:
        rows: One for each parametrization and kind of activation.
        steps: Steps that every model has taken.
        path: HTML file to write.

    Returns:
        `path`.
    """
    kinds = list(dict.fromkeys(row.parametrization for row in rows))
    numbers: Numbers = []
    parts = []
    for kind in kinds:
        own = [row for row in rows if row.parametrization == kind]
        worst = max(own, key=lambda row: row.exponent)
        numbers.append((kind, f"{worst.exponent:+.2f}", f"largest exponent, of {worst.part}"))
        figures = [_plot_curves(kind, "changes", own), _plot_curves(kind, "sizes", own)]
        parts.append(ReportSection(kind, kind, figures=figures))
    notes = [
        "The exponent is the slope of log change over log width: 0 where wider models change by "
        "as much."
    ]
    titles = ("coordinates", f"activations after {steps} steps")
    write_bytes_atomically(path, render_document(titles, numbers, notes, parts).encode())
    return path


def _plot_curves(kind: str, values: str, rows: Sequence[CoordinateCurves]) -> Figure:
    traces = []
    for row, colour in zip(rows, COLOURS, strict=False):
        points: Mapping[int, float] = getattr(row, values)
        traces.append(
            build_line(row.part, list(points), list(points.values()), colour, markers=True)
        )
    widths = sorted({width for row in rows for width in row.changes})
    layout = {
        "xaxis": {
            "title": {"text": "hidden_size"},
            "type": "log",
            "tickvals": widths,
            "ticktext": [*map(str, widths)],
        },
        # more ticks make plotly label every digit, and 9 covers 10
        "yaxis": {"title": {"text": "root mean square"}, "type": "log", "nticks": 5},
        "showlegend": True,
        "hovermode": "closest",
    }
    title = "Change of activations" if values == "changes" else "Size of activations"
    return Figure(f"{kind}-{values}", f"{title}, {kind}", traces, layout, height=360)
