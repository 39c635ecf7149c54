"""Write the page of dry runs: memory over time, its peak, collectives, waits, kernels and
parameters.

Reads the results of `run_dry_run`; writes one HTML file and one JSON file.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from llmsys.dryrun.summary import (
    format_block_check,
    format_collective_check,
    format_compiled_saving,
    format_fit,
)
from llmsys.estimate.memory_timeline import GIB
from llmsys.report.estimate_page import CATEGORY_COLOURS, NUM_CATEGORIES
from llmsys.report.html_markup import build_details, build_table, format_number
from llmsys.report.html_page import render_document
from llmsys.report.plots import Figure, Trace
from llmsys.report.report_section import ReportSection, compute_curves_height
from llmsys.storage.atomic_write import write_bytes_atomically


def write_dry_run(results: Sequence[dict[str, Any]], folder: Path) -> tuple[Path, Path]:
    """Write `dryrun.html` and `dryrun.json`.

    Args:
        results: of `run_dry_run`; the first one is shown in detail.
        folder: made where it is missing.

    Returns:
        Paths of the page and of the JSON file, {ranks: [result, …]}.
    """
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "dryrun.html"
    data = folder / "dryrun.json"
    write_bytes_atomically(data, json.dumps({"ranks": list(results)}).encode())
    write_bytes_atomically(page, render_dry_run(results).encode())
    return page, data


def render_dry_run(results: Sequence[dict[str, Any]]) -> str:
    """Return the page as text."""
    first = results[0]
    memory = first["memory"]
    parameters = first["parameters"]
    numbers = [
        (
            "memory needed",
            f"{first['needed_bytes'] / GIB:.1f} GiB",
            f"of {first['capacity_bytes'] / GIB:.1f} GiB",
        ),
        ("tensors at the peak", f"{memory['peak_bytes'] / GIB:.2f} GiB", memory["peak_phase"]),
        ("against the estimate", f"{first['estimate']['difference']:+.1%}", "of what tensors hold"),
        (
            "waits of the host",
            format_number(first["num_waits"]),
            f"{first['recorded_micro_batches']} micro-batches",
        ),
        (
            "sent and received",
            f"{sum(one['bytes'] for one in first['collectives']) / GIB:.1f} GiB",
            "in a step",
        ),
        (
            "imbalance",
            f"{parameters['imbalance']:.3f}",
            "parameters of the largest rank over the mean",
        ),
    ]
    parts = [
        ReportSection(
            "memory",
            "Memory",
            [_build_phases(first), _build_owner_table(first)],
            [plot_memory(first)],
        ),
        ReportSection("estimate", "Estimate", [_build_estimate_table(first["estimate"])]),
        ReportSection(
            "collectives",
            "Collectives",
            [_build_collective_table(first), _build_check_table(results)],
        ),
        ReportSection("waits", "Waits", [_build_wait_table(first)]),
        ReportSection(
            "kernels", "Kernels", [_build_choice_table(first), _build_kernel_table(first)]
        ),
        ReportSection(
            "ranks", "Ranks", [_build_rank_table(results), _build_kind_table(parameters)]
        ),
    ]
    notes = [format_fit(one) for one in results if not one["fits"]]
    notes += [
        f"rank {one['rank']}: {format_collective_check(one['collective_check'])[0]}"
        for one in results
        if one["collective_check"]["differences"]
    ]
    notes += [
        f"rank {one['rank']}: {format_block_check(one['block_check'])[0]}"
        for one in results
        if one["block_check"]["differences"]
    ]
    notes += [
        *filter(None, [format_compiled_saving(first)]),
        "Tensors have shapes and no numbers. Streams run one after the other, so memory that an "
        "overlap of communication and computation holds longer is not in the peak.",
    ]
    title = f"dry run of {first['request']['config']}"
    return render_document((title, format_fit(first)), numbers, notes, parts)


def plot_memory(result: dict[str, Any]) -> Figure:
    """Return memory over the events of the run, stacked by category."""
    timeline = result["memory"]["timeline"]
    names = sorted(
        {name for point in timeline for name in point["bytes"]},
        key=lambda name: -max(point["bytes"].get(name, 0) for point in timeline),
    )
    # each shown category has its own colour
    groups = [(name, [name]) for name in names[:NUM_CATEGORIES]]
    if rest := names[NUM_CATEGORIES:]:
        groups.append(("everything else", rest))
    events = [point["event"] for point in timeline]
    traces: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "memory",
            "name": name,
            "x": events,
            "y": [
                round(sum(point["bytes"].get(one, 0) for one in members) / GIB, 4)
                for point in timeline
            ],
            "line": {"width": 0.5, "color": colour},
        }
        for (name, members), colour in zip(groups, CATEGORY_COLOURS, strict=False)
    ]
    layout = {
        "xaxis": {"title": {"text": "allocations and frees, in order"}},
        "yaxis": {"title": {"text": "GiB"}},
        "showlegend": True,
    }
    height = compute_curves_height(traces)
    return Figure(
        "memory-over-time", "Memory over time, by category", traces, layout, height=height
    )


def _build_phases(result: dict[str, Any]) -> Markup:
    rows = [(phase["name"], format_number(phase["event"])) for phase in result["memory"]["phases"]]
    return build_details(
        "Phases of the run", build_table(("phase", "first allocation or free"), rows, numeric=(1,))
    )


def _build_owner_table(result: dict[str, Any]) -> Markup:
    rows = [
        (one["category"], one["owner"] or "model", one["tensor"], f"{one['bytes'] / GIB:.3f}")
        for one in result["memory"]["owners"]
    ]
    return build_table(("at the peak", "made by", "tensor", "GiB"), rows, numeric=(3,))


def _build_estimate_table(estimate: dict[str, Any]) -> Markup:
    rows = []
    for phase in estimate["phases"]:
        for name, row in [
            (phase["instant"], phase),
            *((item["item"], item) for item in phase["items"]),
        ]:
            sizes = row["dry_run_bytes"] / GIB, row["estimate_bytes"] / GIB
            rows.append(
                (
                    phase["phase"],
                    name,
                    *(f"{size:.2f}" for size in sizes),
                    f"{sizes[0] - sizes[1]:+.2f}",
                )
            )
    return build_table(
        ("phase", "item", "dry run, GiB", "estimate, GiB", "more"), rows, numeric=(2, 3, 4)
    )


def _build_collective_table(result: dict[str, Any]) -> Markup:
    rows = [
        (
            one["operation"],
            one["axis"],
            str(one["ranks"]),
            format_number(one["count"]),
            f"{one['bytes'] / GIB:.3f}",
        )
        for one in result["collectives"]
    ]
    return build_table(("operation", "axis", "ranks", "in a step", "GiB"), rows, numeric=(2, 3, 4))


def _build_check_table(results: Sequence[dict[str, Any]]) -> Markup:
    rows = []
    for one in results:
        check = one["collective_check"]
        blocks = one["block_check"]
        found = [*check["differences"], *blocks["differences"]]
        found += [f"not checked: {name}" for name in (*check["unchecked"], *blocks["unchecked"])]
        rows += [(str(one["rank"]), text) for text in found or ["as the layout asks"]]
    return build_table(
        ("rank", "collectives, shards and blocks against config and layout"), rows, numeric=(0,)
    )


def _build_wait_table(result: dict[str, Any]) -> Markup:
    rows = [
        (one["line"], one["module"], one["cause"], format_number(one["count"]))
        for one in result["waits"]
    ]
    return build_table(("line", "module", "cause", "count"), rows, numeric=(3,))


def _build_choice_table(result: dict[str, Any]) -> Markup:
    rows = [
        (
            f"{one['layers']} {one['stack']}, {one['attention']}",
            one["kernel"],
            one["reason"],
            one["cost"],
        )
        for one in result["kernels"]
    ]
    return build_table(("layers", "attention kernel", "reason", "cost"), rows)


def _build_kernel_table(result: dict[str, Any]) -> Markup:
    names = dict.fromkeys([*result["attention"], *result["flops"], *result["operations"]])
    rows = [
        (
            name,
            format_number(result["attention"].get(name, result["operations"].get(name, 0))),
            f"{result['flops'].get(name, 0) / 1e12:.1f}",
        )
        for name in names
    ]
    return build_table(("operation", "in a step", "TFLOP"), rows, numeric=(1, 2))


def _build_rank_table(results: Sequence[dict[str, Any]]) -> Markup:
    rows = [
        (
            str(one["rank"]),
            "fits" if one["fits"] else "does not fit",
            f"{one['memory']['peak_bytes'] / GIB:.2f}",
            format_number(one["parameters"]["own"]),
        )
        for one in results
    ]
    return build_table(("rank", "verdict", "peak, GiB", "parameters"), rows, numeric=(2, 3))


def _build_kind_table(parameters: dict[str, Any]) -> Markup:
    rows = [
        (
            str(kind["first_rank"]),
            format_number(kind["num_ranks"]),
            format_number(kind["parameters"]),
        )
        for kind in parameters["kinds"]
    ]
    return build_table(
        ("first rank of a kind", "ranks", "parameters of each"), rows, numeric=(1, 2)
    )
