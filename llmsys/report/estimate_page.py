"""Render the page of an estimate: memory over one step, a roofline of a layer, and a timeline of
the step.

Reads the object that `llmsys estimate --json` prints, kernels and a timeline. Writes one HTML file.
"""

from collections.abc import Iterator, Sequence
from math import log10
from pathlib import Path
from typing import Any

from markupsafe import Markup

from llmsys.estimate.device_profile import DeviceProfile
from llmsys.estimate.json_output import EstimateOutput, MemoryInstant, StepMemory, StepSeconds
from llmsys.estimate.roofline import LayerKernel
from llmsys.estimate.step_timeline import StepTimeline
from llmsys.estimate.summary_table import format_count, format_gib
from llmsys.report.html_markup import (
    build_table,
    escape_plot_text,
    format_amount,
)
from llmsys.report.html_page import render_document
from llmsys.report.plots import (
    BLUE,
    FAINT,
    GREEN,
    ORANGE,
    PURPLE,
    Figure,
    Trace,
    build_bars_layout,
    build_line,
)
from llmsys.report.report_section import Numbers, ReportSection
from llmsys.storage.atomic_write import write_bytes_atomically

# Categories of memory with a colour; smaller ones are summed.
NUM_CATEGORIES = 8
CATEGORY_COLOURS = (
    BLUE, ORANGE, GREEN, PURPLE, "theme:yellow", "theme:sky", "theme:muted", "theme:ink", FAINT
)  # fmt: skip
ACTIVITY_COLOURS = {
    "forward": BLUE,
    "backward": ORANGE,
    "exchange": GREEN,
    "update": PURPLE,
    "bubble": FAINT,
}
GIB = 2**30
# Kernels of a roofline that are as near as this share one dot.
DOT_DECADES = 0.1


def write_estimate_page(
    result: EstimateOutput,
    title: str,
    path: Path,
    *,
    device: DeviceProfile | None = None,
    kernels: Sequence[LayerKernel] = (),
    timeline: StepTimeline | None = None,
) -> Path:
    """Write the page of an estimate.

    Args:
        result: what `estimate_run` or `add_costs` returned.
        title: name of the config.
        path: HTML file to write.
        device: profile that the run is priced on.
        kernels: kernels of a layer, for the roofline.
        timeline: the step laid out in time.

    Returns:
        `path`.
    """
    counts, flops = result.parameters, result.flops
    numbers: Numbers = [
        (
            "parameters",
            format_count(counts.total),
            f"{format_count(counts.active.all)} active per token",
        ),
        ("FLOPs of a step", format_count(flops.forward_backward), flops.convention),
    ]
    notes = []
    memory, time = result.memory, result.time
    if memory is not None:
        numbers.append(("peak memory per rank", format_gib(memory.peak_bytes), memory.peak_instant))
    else:
        notes.append("A bare model has no run: no memory of a step, no time.")
    if time is not None:
        step = time.step_seconds
        numbers.append(
            (
                "seconds per step",
                f"{step.p50:.3g}",
                f"P10 to P90: {step.p10:.3g} to {step.p90:.3g}",
            )
        )
        numbers.append(
            ("utilisation", f"{time.utilisation.model_causal:.1%}", "of the peak, in a step")
        )
    elif device is None:
        notes.append("No device was given: no roofline and no timeline. Add --device NAME.")
    rows = [
        (name, f"{count:,}", f"{count / counts.total:.1%}")
        for name, count in counts.by_component.items()
    ]
    table = build_table(("component", "parameters", "share"), rows, numeric=(1, 2))
    parts = list(iter_step_sections(memory, time, device, kernels, timeline))
    parts.append(ReportSection("parameters", "Parameters", [table]))
    write_bytes_atomically(
        path, render_document((title, "estimate"), numbers, notes, parts).encode()
    )
    return path


def iter_step_sections(
    memory: StepMemory | None,
    time: StepSeconds | None,
    device: DeviceProfile | None,
    kernels: Sequence[LayerKernel],
    timeline: StepTimeline | None,
) -> Iterator[ReportSection]:
    """Yield the sections of one step: memory, the kernels of a layer, and the timeline; those that
    are known.

    Args:
        memory: memory of a rank over the step.
        time: seconds of the step.
        device: profile that the step is priced on.
        kernels: kernels of a layer, for the roofline.
        timeline: the step laid out in time.

    Yields:
        Sections of a page.
    """
    if memory is not None:
        room = None if device is None else device.memory_bytes
        yield ReportSection("memory", "Memory over one step", figures=[plot_memory(memory, room)])
    if device is not None and kernels:
        table = _build_kernel_table(kernels)
        yield ReportSection(
            "roofline", "Kernels of a layer", [table], [plot_roofline(kernels, device)]
        )
    if time is not None and timeline is not None:
        figures = [plot_timeline(timeline, time)]
        yield ReportSection("timeline", "Timeline of one step", [_build_parts_table(time)], figures)


def plot_memory(memory: StepMemory, room: float | None) -> Figure:
    """Return bytes of a rank by instant and category, the peak marked, with the device's memory
    as a line.
    """
    instants = memory.instants
    totals: dict[str, float] = {}
    for instant in instants:
        for name, size in instant.items.items():
            totals[name] = max(totals.get(name, 0.0), size)
    largest = sorted(totals, key=lambda name: -totals[name])[:NUM_CATEGORIES]
    names = [_mark_peak(one, memory) for one in instants]
    traces: list[Trace] = []
    for name, colour in zip([*largest, "everything else"], CATEGORY_COLOURS, strict=False):
        sizes = [
            one.items.get(name, 0.0)
            if name != "everything else"
            else sum(size for other, size in one.items.items() if other not in largest)
            for one in instants
        ]
        traces.append(
            _build_stacked_bar(name, names, [size / GIB for size in sizes], colour, "GiB")
        )
    peak = memory.peak_bytes / GIB
    layout = build_bars_layout("GiB on one rank") | {
        "barmode": "stack",
        "showlegend": True,
        "hovermode": "closest",
    }
    layout["shapes"] = [] if room is None else [_build_limit(room / GIB)]
    caption = f"The peak, {peak:.1f} GiB, is {memory.peak_instant} (▶)."
    caption += (
        ""
        if room is None
        else f" The dashed line is the {room / GIB:.1f} GiB that a program can allocate."
    )
    return Figure(
        "plot-memory", "By category", traces, layout, caption, height=120 + 34 * len(names)
    )


def _mark_peak(instant: MemoryInstant, memory: StepMemory) -> str:
    return f"▶ {instant.name}" if instant.name == memory.peak_instant else instant.name


def _build_limit(value: float) -> dict[str, Any]:
    line = {"color": "theme:ink", "width": 1.5, "dash": "dash"}
    return {
        "type": "line",
        "x0": value,
        "x1": value,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": line,
    }


def _build_stacked_bar(
    name: str, labels: Sequence[str], values: Sequence[float], colour: str, unit: str
) -> Trace:
    return {
        "type": "bar",
        "orientation": "h",
        "name": escape_plot_text(name),
        "y": [escape_plot_text(label) for label in labels],
        "x": [round(value, 4) for value in values],
        "marker": {"color": colour},
        "hovertemplate": f"%{{y}}: %{{x:.2f}} {unit}<extra>{escape_plot_text(name)}</extra>",
    }


def plot_roofline(kernels: Sequence[LayerKernel], device: DeviceProfile) -> Figure:
    """Return the roof of a device, and each kernel of a layer below it."""
    peak, bandwidth = device.get_peak_flops("bf16"), device.memory_bandwidth
    corner = peak / bandwidth
    low = min(0.3, *(one.intensity for one in kernels)) / 2
    # room for half a label right of the last dot on a phone
    high = max(3 * corner, *(4 * one.intensity for one in kernels))
    roof = build_line(
        "roof: peak and memory", [low, corner, high], [low * bandwidth, peak, peak], ORANGE
    )
    groups = _group_kernels(kernels)
    first = [kernels[group[0]] for group in groups]
    dots = build_line(
        "kernels", [one.intensity for one in first], [one.rate for one in first], BLUE
    ) | {
        "mode": "markers+text",
        "text": [", ".join(str(number + 1) for number in group) for group in groups],
        "textposition": ["top center", "bottom center"] * len(groups),
        "textfont": {"size": 10, "color": "theme:ink"},
        "hovertext": [
            "<br>".join(escape_plot_text(kernels[number].name) for number in group)
            for group in groups
        ],
        "marker": {"color": BLUE, "size": 9},
        "hovertemplate": "%{hovertext}: %{x:.3g} FLOP/byte, %{y:.3s}FLOP/s<extra></extra>",
    }
    layout = {
        "xaxis": {"title": {"text": "operations per byte"}, "type": "log"},
        "yaxis": {
            "title": {"text": "FLOP/s"},
            "type": "log",
            "exponentformat": "power",
            "dtick": 1,
        },
        "showlegend": True,
        "hovermode": "closest",
    }
    caption = (
        f"Forward pass of one micro-batch in bf16 on {device.name}. The roof's corner is at "
        f"{corner:,.0f} operations per byte; kernels left of it wait for memory. Rates are from "
        "the device profile, numbers as in the table."
    )
    return Figure("plot-roofline", "Roofline", [roof, dots], layout, caption, height=420)


def _group_kernels(kernels: Sequence[LayerKernel]) -> list[list[int]]:
    """Return the numbers of kernels whose dots would lie on each other, from left to right."""
    groups: list[list[int]] = []
    for number in sorted(range(len(kernels)), key=lambda one: (kernels[one].intensity, one)):
        for group in groups:
            other, one = kernels[group[0]], kernels[number]
            apart = (log10(one.intensity / other.intensity), log10(one.rate / other.rate))
            if max(map(abs, apart)) < DOT_DECADES:
                group.append(number)
                break
        else:
            groups.append([number])
    return [sorted(group) for group in groups]


def _build_kernel_table(kernels: Sequence[LayerKernel]) -> Markup:
    total = sum(one.seconds for one in kernels)
    rows = [
        (f"{number}  {one.name}", format_amount(one.flops), format_amount(one.moved_bytes),
            f"{one.intensity:,.1f}",
         f"{1e6 * one.seconds:,.1f}", f"{one.seconds / total:.1%}")
        for number, one in enumerate(kernels, 1)
    ]  # fmt: skip
    return build_table(
        ("kernel", "FLOPs", "bytes", "FLOPs/byte", "µs", "share"), rows, numeric=(1, 2, 3, 4, 5)
    )


def plot_timeline(timeline: StepTimeline, time: StepSeconds | None = None) -> Figure:
    """Return what every pipeline rank does in one step: passes, bubbles, exchanges, the update."""
    traces: list[Trace] = []
    for kind, colour in ACTIVITY_COLOURS.items():
        found = [one for one in timeline.activities if one.kind == kind]
        if not found:
            continue
        bars = _build_stacked_bar(
            kind, [f"rank {one.rank}" for one in found], [one.seconds for one in found], colour, "s"
        )
        bars |= {
            "x": [float(f"{one.seconds:.6g}") for one in found],
            "base": [float(f"{one.start:.6g}") for one in found],
        }
        bars |= {"text": [one.text for one in found], "textposition": "none"}
        traces.append(bars | {"hovertemplate": "%{text}: %{x:.3g} s<extra></extra>"})
    layout = build_bars_layout("seconds") | {
        "barmode": "overlay",
        "showlegend": True,
        "bargap": 0.15,
    }
    layout["yaxis"] = layout["yaxis"] | {
        "categoryorder": "array",
        "categoryarray": [f"rank {rank}" for rank in range(timeline.ranks)]
    }  # fmt: skip
    drawn = "" if timeline.drawn == timeline.micro_batches else f"{timeline.drawn} of "
    caption = (
        f"{drawn}{timeline.micro_batches} micro-batches on {timeline.ranks} pipeline rank(s), P50. "
    )
    caption += (
        "Exchanges are the part that no computation hides; those of tensor, context and experts "
        "are in the passes."
    )
    if time is not None and (bubble := time.parts_seconds.get("bubble", 0.0)) > 0:
        caption += f" The estimate's bubble is {bubble:.3g} s of {time.step_seconds.p50:.3g} s."
    return Figure(
        "plot-timeline", "By rank", traces, layout, caption, height=150 + 34 * timeline.ranks
    )


def _build_parts_table(time: StepSeconds) -> Markup:
    whole = sum(time.parts_seconds.values())
    parts = sorted(time.parts_seconds.items(), key=lambda one: -one[1])
    rows = [
        (name, f"{seconds:.4g}", f"{seconds / whole:.1%}") for name, seconds in parts if seconds > 0
    ]
    return build_table(("part of the step", "seconds", "share"), rows, numeric=(1, 2))
