"""Render the page of a plan: the Pareto front, one step of the best layout, and what binds the
others.

Reads the object that `llmsys plan --json` prints, and the best layout. Writes one HTML file.
"""

from collections.abc import Iterator
from pathlib import Path

from llmsys.estimate.device_profile import DeviceProfile
from llmsys.estimate.plan.json_output import PlanOutput, PricedLayout
from llmsys.estimate.plan.layout_candidate import EstimatedCandidate
from llmsys.estimate.roofline import list_layer_kernels
from llmsys.estimate.step_timeline import build_timeline_from_estimate, count_rank_micro_batch
from llmsys.estimate.summary_table import format_gib
from llmsys.report.estimate_page import iter_step_sections
from llmsys.report.html_markup import build_paragraph, build_table, escape_plot_text
from llmsys.report.html_page import render_document
from llmsys.report.plots import BLUE, ORANGE, Figure, Trace, build_line
from llmsys.report.report_section import Numbers, ReportSection
from llmsys.storage.atomic_write import write_bytes_atomically

GIB = 2**30


def write_plan_page(
    data: PlanOutput, title: str, path: Path, chosen: EstimatedCandidate, device: DeviceProfile
) -> Path:
    """Write the page of a plan: the Pareto front, one step of the best layout, and what binds the
    others.

    Args:
        data: what `build_plan_output` returned.
        title: name of the config.
        path: HTML file to write.
        chosen: the best layout.
        device: profile that it is priced on.

    Returns:
        `path`.
    """
    best = data.best[0]
    numbers: Numbers = [
        ("layouts that fit", f"{data.fitting:,}", f"of {data.considered:,}"),
        ("fastest step", f"{best.step_seconds.p50:.3g} s", best.choice),
        ("peak memory per device", format_gib(best.peak_bytes), best.peak_instant),
        ("utilisation", f"{best.utilisation:.1%}", data.device),
    ]
    head = (
        "layout",
        "step P50, s",
        "tokens/s/device",
        "utilisation",
        "peak",
        "instant of the peak",
    )
    rows = [
        (one.choice, f"{one.step_seconds.p50:#.3g}",
            f"{one.tokens_per_second_per_device:,.0f}",
         f"{one.utilisation:.1%}", format_gib(one.peak_bytes), one.peak_instant)
        for one in _list_shown_layouts(data)
    ]  # fmt: skip
    parts = [
        ReportSection(
            "front",
            "Time and memory",
            [build_table(head, rows, numeric=(1, 2, 3, 4))],
            [plot_pareto(data)],
        )
    ]
    parts += iter_candidate_sections(chosen, device)
    if data.rejected:
        table = build_table(
            ("change", "what binds"), [(one.change, one.reason) for one in data.rejected]
        )
        lead = build_paragraph(f"Neighbours of {best.choice}.")
        parts.append(ReportSection("rejected", "Rejected", [lead, table]))
    titles = (title, f"plan for {data.device}")
    write_bytes_atomically(path, render_document(titles, numbers, [], parts).encode())
    return path


def iter_candidate_sections(
    chosen: EstimatedCandidate, device: DeviceProfile
) -> Iterator[ReportSection]:
    """Yield memory, roofline and timeline of one step of a layout.

    Args:
        chosen: the layout.
        device: profile that it is priced on.

    Yields:
        Sections of a page.
    """
    config, settings = chosen.config, chosen.choice.layout.to_settings()
    time = chosen.step.to_output()
    sequences, tensor = count_rank_micro_batch(settings, config)
    kernels = list_layer_kernels(
        config.model, device, sequences, config.batch.sequence_length, tensor
    )
    timeline = build_timeline_from_estimate(time.parts_seconds, settings, config)
    yield from iter_step_sections(chosen.memory.to_output(), time, device, kernels, timeline)


def _list_shown_layouts(data: PlanOutput) -> list[PricedLayout]:
    listed = {one.choice: one for one in [*data.best, *data.pareto]}
    return sorted(listed.values(), key=lambda one: one.step_seconds.p50)


def plot_pareto(data: PlanOutput) -> Figure:
    """Return the layouts that no other beats in both time and memory as a line, and the fastest
    ones as dots.
    """
    front = sorted(data.pareto, key=lambda one: one.step_seconds.p50)
    traces: list[Trace] = []
    for name, rows, colour, mode in (
        ("Pareto front", front, ORANGE, "lines+markers"), ("fastest", data.best, BLUE, "markers")
    ):  # fmt: skip
        x, y = (
            [one.step_seconds.p50 for one in rows],
            [one.peak_bytes / GIB for one in rows],
        )
        trace = build_line(name, x, y, colour, markers=True) | {"mode": mode}
        trace |= {"text": [escape_plot_text(one.choice) for one in rows]}
        traces.append(trace | {"hovertemplate": "%{text}: %{x:.3g} s, %{y:.1f} GiB<extra></extra>"})
    layout = {
        "xaxis": {"title": {"text": "seconds per step, P50"}},
        "yaxis": {"title": {"text": "GiB at the peak"}, "rangemode": "tozero"},
        "showlegend": True,
        "hovermode": "closest",
    }
    return Figure(
        "plot-pareto",
        "Pareto front",
        traces,
        layout,
        "Lower and further left is better.",
        height=380,
    )
