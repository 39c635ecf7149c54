"""Render the page of an ablation: differences with their intervals, datasets, and what each variant
changes.

Reads the record; writes one HTML file.
"""

import json
from pathlib import Path

from markupsafe import Markup

from llmsys.ablation.plan import BASE
from llmsys.ablation.record import AblationRecord
from llmsys.ablation.table import format_difference, list_notes, list_rows, list_set_lines
from llmsys.report.html_markup import build_paragraph, build_table, escape_plot_text
from llmsys.report.html_page import render_document
from llmsys.report.plots import BLUE, GREEN, ORANGE, PURPLE, Figure, Trace, compute_bars_height
from llmsys.report.report_section import ReportSection
from llmsys.storage.atomic_write import write_bytes_atomically

_COLOURS = (BLUE, ORANGE, GREEN, PURPLE)


def write_ablation_page(record: AblationRecord, path: Path) -> Path:
    """Write the page.

    Args:
        record: The record.
        path: HTML file to write.

    Returns:
        `path`.
    """
    head, rows = list_rows(record)
    results = build_table(head, rows, range(1, len(head)))
    sets = [build_paragraph(line) for line in list_set_lines(record)]
    notes = [build_paragraph(line, is_muted=True) for line in list_notes(record)]
    parts = [
        ReportSection("results", "Results", [results, *sets, *notes], list(_iter_figures(record))),
        ReportSection("seeds", "Seeds", [_build_seeds_table(record)], heading="Each seed"),
        ReportSection(
            "changes", "Changes", [_build_changes_table(record)], heading="What a variant changes"
        ),
    ]
    clear = [
        f"{name} on {heldout}: {format_difference(found)}"
        for name, by_set in record.differences.items()
        for heldout, found in by_set.items()
        if found.is_clear
    ]
    seeds = max((len(runs) for runs in record.runs.values()), default=0)
    numbers = [
        ("variants", str(len(record.variants) - 1), "and the base"),
        ("seeds", str(seeds), "of each"),
        ("clear differences", str(len(clear)), "whose interval of 95 % does not hold 0"),
    ]
    page = render_document(("ablation", f"{len(record.variants)} datasets"), numbers, clear, parts)
    write_bytes_atomically(path, page.encode("utf-8", errors="replace"))
    return path


def _iter_figures(record: AblationRecord) -> list[Figure]:
    """Return one plot with the differences of all variants; none before there are any."""
    names = [name for name in record.variants if name != BASE and name in record.differences]
    traces: list[Trace] = []
    for number, heldout in enumerate(record.sets):
        found = [(name, record.differences[name].get(heldout)) for name in names]
        known = [(name, one) for name, one in found if one is not None]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": escape_plot_text(heldout),
                "x": [one.mean for _, one in known],
                "y": [escape_plot_text(name) for name, _ in known],
                "error_x": {"type": "data", "array": [one.half_width or 0 for _, one in known]},
                "marker": {"color": _COLOURS[number % len(_COLOURS)], "size": 9},
            }
        )
    if not names:
        return []
    layout = {
        "xaxis": {"title": {"text": "bits per byte, variant minus base"}, "zeroline": True},
        "yaxis": {"automargin": True, "autorange": "reversed"},
        "showlegend": True,
    }
    return [
        Figure(
            "plot-differences",
            "Difference to the base",
            traces,
            layout,
            "Left is better. Bars: intervals of 95 % over seeds.",
            compute_bars_height(len(names) * max(1, len(record.sets)), names),
        )
    ]


def _build_seeds_table(record: AblationRecord) -> Markup:
    sets = list(record.sets)
    rows = []
    for name in record.variants:
        for seed, run in sorted(record.runs.get(name, {}).items(), key=lambda one: int(one[0])):
            scores = [
                f"{run.scores[one].bits_per_byte:.4f}" if one in run.scores else "–" for one in sets
            ]
            rows.append([name, seed, *scores])
    return build_table(("variant", "seed", *sets), rows, range(1, 2 + len(sets)))


def _build_changes_table(record: AblationRecord) -> Markup:
    rows = [
        (name, f"data.{key}", *(json.dumps(value, ensure_ascii=False) for value in values))
        for name, variant in record.variants.items()
        for key, values in variant.changes.items()
    ]
    return build_table(("variant", "key", "base", "variant"), rows)
