"""Build plots as data: each function turns numbers into a `Figure` that the page's script draws
with plotly.

Invariants:
- The same numbers give the same figure.
- Colours are names (theme:…) that the page resolves for light or dark.
- A curve has at most `MAX_POINTS` points.
"""

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from llmsys.report.html_markup import escape_plot_text, format_amount

MAX_POINTS = 2_000
THINNING_RULE = (
    f"Curves longer than {MAX_POINTS:,} points are downsampled: the minimum and maximum of each of "
    f"{MAX_POINTS // 2:,} equal intervals are drawn."
)
# In a line of a bar's label: half the width of a phone.
LABEL_CHARACTERS = 24
# In a line of a legend: the width of a phone.
LEGEND_CHARACTERS = 40
# Minimum number of points of a curve with a running mean.
SMOOTHED_FROM = 200

BLUE, ORANGE, GREEN, PURPLE, FAINT = (
    f"theme:{name}" for name in ("blue", "orange", "green", "purple", "faint")
)

Trace = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One plot: its anchor on the page, plotly's traces and layout, and a caption."""

    anchor: str
    title: str
    traces: list[Trace]
    layout: dict[str, Any]
    caption: str = ""
    height: int = 300
    views: list[dict[str, Any]] = field(default_factory=list)
    """Other readings of the same plot: {label, y: one list per trace, title of the y axis}; the
    first is drawn.
    """
    slider_steps: list[dict[str, Any]] = field(default_factory=list)
    """States of a heat map in time: {label, z}; the last is drawn, a slider shows the others."""

    def to_dict(self) -> dict[str, Any]:
        """Return the data that the page's script needs to draw the figure."""
        return {
            "id": self.anchor,
            "traces": self.traces,
            "layout": self.layout,
            "views": self.views,
            "moments": [moment["z"] for moment in self.slider_steps],
            "labels": [moment["label"] for moment in self.slider_steps],
        }


# --- Curves over the run ---


def downsample_points(
    x: Sequence[float], y: Sequence[float], limit: int = MAX_POINTS
) -> tuple[list[float], list[float]]:
    """Return at most `limit` of the points, x ascending: the lowest and the highest of each
    interval.

    Peaks survive, which taking every n-th point would lose. Points with nan are left out.
    """
    points = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if len(points) > limit:
        stretches = limit // 2
        edges = [i * len(points) // stretches for i in range(stretches + 1)]
        kept: list[tuple[float, float]] = []
        for low, high in pairwise(edges):
            stretch = points[low:high]
            lowest = min(range(len(stretch)), key=lambda i: stretch[i][1])
            highest = max(range(len(stretch)), key=lambda i: stretch[i][1])
            kept.extend(stretch[i] for i in sorted({lowest, highest}))
        points = kept
    return [_round_value(a) for a, _ in points], [_round_value(b) for _, b in points]


def compute_running_mean(
    x: Sequence[float], y: Sequence[float], share: float = 0.02
) -> tuple[list[float], list[float]]:
    """Return the centred running mean of y over `share` of all points, without nan, at most
    `MAX_POINTS` / 4 points.
    """
    points = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    sums = [0.0, *accumulate(b for _, b in points)]
    half = max(1, int(len(points) * share / 2))
    every = max(1, -(-len(points) // (MAX_POINTS // 4)))
    means = []
    for i in range(0, len(points), every):
        reach = min(half, i, len(points) - 1 - i)  # shorter at the ends, but never to one side
        low, high = i - reach, i + reach + 1
        means.append((points[i][0], (sums[high] - sums[low]) / (high - low)))
    return [_round_value(a) for a, _ in means], [_round_value(b) for _, b in means]


def build_noisy_curve(
    name: str, x: Sequence[float], y: Sequence[float], colour: str = BLUE
) -> list[Trace]:
    """Return line traces of a noisy quantity: downsampled; a long one as its running mean over a
    faint original.
    """
    exact = build_exact_curve(name, x, y, colour)
    if len(exact[0]["x"]) < SMOOTHED_FROM:
        return exact
    faint = {"opacity": 0.35, "showlegend": False, "line": {"color": colour, "width": 1}}
    return [
        exact[0] | faint,
        build_line(f"{name}, running mean", *compute_running_mean(x, y), colour),
    ]


def build_exact_curve(
    name: str, x: Sequence[float], y: Sequence[float], colour: str = BLUE
) -> list[Trace]:
    """Return the line trace of a quantity without noise: only downsampled, with dots where the
    points are few.
    """
    thin_x, thin_y = downsample_points(x, y)
    return [build_line(name, thin_x, thin_y, colour, markers=len(thin_x) < 30)]


def build_line(
    name: str, x: Sequence[float], y: Sequence[float], colour: str, *, markers: bool = False
) -> Trace:
    """Return one line trace, with dots where the points are few."""
    return {
        "type": "scatter",
        "mode": "lines+markers" if markers else "lines",
        "name": "<br>".join(
            map(escape_plot_text, textwrap.wrap(name, LEGEND_CHARACTERS) or [name])
        ),
        "x": list(x),
        "y": list(y),
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "size": 6},
    }


def build_tokens_layout(
    y_title: str, *, from_zero: bool = False, exponents: str = "", legend: bool = False
) -> dict[str, Any]:
    """Return the layout of a curve against tokens trained."""
    y: dict[str, Any] = {"title": {"text": y_title}}
    if from_zero:
        y["rangemode"] = "tozero"
    if exponents:
        y["exponentformat"] = exponents
    return {
        "xaxis": {"title": {"text": "tokens trained"}, "rangemode": "tozero"},
        "yaxis": y,
        "showlegend": legend,
        "hovermode": "x unified",
    }


# --- Bars, histograms, heat maps ---


def build_bars(
    labels: Sequence[str],
    values: Sequence[float],
    texts: Sequence[str],
    x_title: str,
    colours: str | list[str] = BLUE,
) -> tuple[list[Trace], dict[str, Any]]:
    """Return horizontal bars, the first on top, each with its text, and their layout. Labels may
    be user text.
    """
    trace: Trace = {
        "type": "bar",
        "orientation": "h",
        "y": _write_labels(labels),
        "x": list(values),
        "text": [escape_plot_text(text) for text in texts],
        "textposition": "outside",
        "marker": {"color": colours},
        "hovertemplate": "%{y}: %{text}<extra></extra>",
        "cliponaxis": False,
    }
    # room for the text of the longest bar
    return [trace], build_bars_layout(x_title) | {
        "margin": {"r": max(52, 12 + 8 * max(map(len, texts), default=0))}
    }


def build_bars_layout(x_title: str) -> dict[str, Any]:
    """Return the layout of horizontal bars."""
    return {
        "xaxis": {"title": {"text": x_title}, "rangemode": "tozero"},
        "showlegend": False,
        "hovermode": "closest",
        # plotly would leave out labels of low rows
        "yaxis": {"type": "category", "autorange": "reversed", "automargin": True, "dtick": 1},
    }


def compute_bars_height(count: int, labels: Iterable[str] = ()) -> int:
    """Return the height of horizontal bars, with space for the lines of the longest label on each.

    Args:
        count: Number of bars.
        labels: Their labels.

    Returns:
        Pixels.
    """
    lines = max((len(wrap_label(label)) for label in labels), default=1)
    return 90 + max(30, 12 + 15 * lines) * max(count, 2)


def select_largest(items: Iterable[tuple[str, float]], limit: int) -> list[tuple[str, float]]:
    """Return the largest items; the rest is summed as one."""
    ordered = sorted(items, key=lambda item: (-item[1], item[0]))
    rest = ordered[limit:]
    return ordered[:limit] + (
        [(f"{len(rest)} others", sum(value for _, value in rest))] if rest else []
    )


def build_histogram(
    edges: Sequence[float], counts: Sequence[float], x_title: str, y_title: str
) -> tuple[list[Trace], dict[str, Any]]:
    """Return counts between edges as a filled outline, without empty ends; over two decades the
    axis is logarithmic.
    """
    filled = [number for number, count in enumerate(counts) if count] or [0]
    edges, counts = edges[filled[0] : filled[-1] + 2], counts[filled[0] : filled[-1] + 1]
    logarithmic = len(edges) > 1 and edges[-1] > 100 * max(edges[1], 1)
    lowest = min((edge for edge in edges if edge > 0), default=1.0)
    left = [max(edge, lowest / 2) if logarithmic else edge for edge in edges]
    bins = zip(edges, edges[1:], counts, strict=False)
    hovers = [f"{format_amount(a)} to {format_amount(b)}: {format_amount(n)}" for a, b, n in bins]
    trace: Trace = {
        "type": "scatter",
        "mode": "lines",
        "line": {"shape": "hv", "color": BLUE, "width": 1.5},
        "fill": "tozeroy",
        "fillcolor": "theme:blue-fill",
        "x": left,
        "y": [*counts, counts[-1] if counts else 0],
        "text": [*hovers, hovers[-1] if hovers else ""],
        "hovertemplate": "%{text}<extra></extra>",
    }
    x = {
        "title": {"text": x_title},
        **({"type": "log", "dtick": 1 if edges[-1] < 1e6 * left[0] else 2} if logarithmic else {}),
    }
    return [trace], {
        "xaxis": x,
        "yaxis": {"title": {"text": y_title}, "rangemode": "tozero"},
        "showlegend": False,
    }


def build_expert_heatmap(load_LE: list[list[float]]) -> tuple[list[Trace], dict[str, Any]]:
    """Return the load of each expert (columns) in each layer (rows). 1 is even; colours end at 0
    and 2.
    """
    trace: Trace = {
        "type": "heatmap",
        "z": load_LE,
        "zmin": 0,
        "zmax": 2,
        "colorscale": "theme:even-scale",
        "xgap": 1,
        "ygap": 1,
        "colorbar": {"title": {"text": "× even", "side": "right"}, "thickness": 12,
            "outlinewidth": 0, "len": 1,
                     "tickvals": [0, 0.5, 1, 1.5, 2], "ticktext": ["0", "0.5", "1", "1.5", "≥ 2"]},
        "hovertemplate": "layer %{y}, expert %{x}: %{z:.2f} × even<extra></extra>",
        "hoverongaps": False,
    }  # fmt: skip
    few = {"dtick": 1} if max(map(len, load_LE)) <= 32 else {}
    few_layers = {"dtick": 1} if len(load_LE) <= 32 else {}
    return [trace], {
        "xaxis": {"title": {"text": "expert"}, "showgrid": False, **few},
        "yaxis": {
            "title": {"text": "MoE layer"},
            "autorange": "reversed",
            "showgrid": False,
            **few_layers,
        },
        "hovermode": "closest",
    }


def _write_labels(labels: Sequence[str]) -> list[str]:
    """Return wrapped labels, all distinct: plotly would draw bars of equal labels as one."""
    before = [labels[:number].count(label) for number, label in enumerate(labels)]
    whole = [
        f"{label} ({same + 1})" if same else label
        for label, same in zip(labels, before, strict=True)
    ]
    return ["<br>".join(map(escape_plot_text, wrap_label(label))) for label in whole]


def wrap_label(label: str) -> list[str]:
    """Return the lines of a label: split between words, and inside a word that is longer than a
    line.
    """
    return textwrap.wrap(label, LABEL_CHARACTERS, break_on_hyphens=False) or [label]


def _round_value(value: float) -> float:
    """Return six significant digits: the resolution of a screen, at a third of the bytes. Counts
    stay integers.
    """
    return value if float(value).is_integer() else float(f"{value:.6g}")
