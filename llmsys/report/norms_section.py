"""Build the section about norms by layer: activations, gradients and relative updates over the run.

Reads the `norms` events of a `RunRecord`.

Invariants:
- A run without such events has no section.
- At most `MAX_RECORDS` events are drawn, evenly spaced, the last among them.
"""

import math
from typing import Any

from llmsys.report.html_markup import escape_plot_text
from llmsys.report.plots import Figure
from llmsys.report.report_section import ReportSection
from llmsys.report.run_record import RunRecord, is_finite

MAX_RECORDS = 400
# Pixels of a layer's row, and of what surrounds the rows.
ROW, FRAME = 16, 120

KINDS = (
    ("gradient", "Gradient norms", "norm of the gradient of each layer before clipping"),
    (
        "update",
        "Relative updates",
        "norm of the change of each layer in the step, over the norm of its weights",
    ),
    (
        "activation",
        "Activations",
        "root mean square of each block's output over tokens and channels",
    ),
)


def build_norms_section(record: RunRecord) -> ReportSection | None:
    """Build heat maps of the norms by layer and step.

    Args:
        record: The run.

    Returns:
        The section; None without `norms` events.
    """
    if not record.norms:
        return None
    steps = sorted(record.norms)
    stride = math.ceil(len(steps) / MAX_RECORDS)
    steps = steps[::-1][::stride][::-1]
    figures = [_build_figure(record, steps, *kind) for kind in KINDS]
    shown = [figure for figure in figures if figure is not None]
    return ReportSection("norms", "Norms by layer", figures=shown)


def _build_figure(
    record: RunRecord, steps: list[int], kind: str, title: str, meaning: str
) -> Figure | None:
    events = [record.norms[step] for step in steps]
    layers = list(dict.fromkeys(layer for event in events for layer in event[kind]))
    if not layers:
        return None
    values = [[_get_value(event, kind, layer) for event in events] for layer in layers]
    shown = [value for row in values for value in row if value is not None]
    trace: dict[str, Any] = {
        "type": "heatmap",
        "x": steps,
        "y": [escape_plot_text(layer) for layer in layers],
        "z": [
            [None if value is None else round(math.log10(value), 3) for value in row]
            for row in values
        ],
        "text": [["–" if value is None else f"{value:.3g}" for value in row] for row in values],
        "colorscale": "theme:heat-scale",
        "colorbar": {
            "title": {"text": "log₁₀", "side": "right"},
            "thickness": 12,
            "outlinewidth": 0,
            "len": 1,
        },
        "hovertemplate": "%{y}, step %{x}: %{text}<extra></extra>",
        "hoverongaps": False,
    }
    layout = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"type": "category", "autorange": "reversed", "automargin": True},
        "hovermode": "closest",
    }
    reach = f" From {min(shown):.3g} to {max(shown):.3g}." if shown else ""
    caption = f"The {meaning}.{reach}"
    return Figure(
        f"plot-norms-{kind}", title, [trace], layout, caption, FRAME + ROW * max(8, len(layers))
    )


def _get_value(event: dict[str, Any], kind: str, layer: str) -> float | None:
    """Return a positive finite number, which a logarithm needs; None for any other value."""
    value = event[kind].get(layer)
    if kind == "update" and is_finite(value):
        weight = event["weight"].get(layer)
        value = value / weight if is_finite(weight) and weight > 0 else None
    return value if is_finite(value) and value > 0 else None
