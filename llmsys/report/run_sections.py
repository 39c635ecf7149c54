"""Build the sections about a run: comparison with compressors, curves, expert load, samples.

Reads a `RunRecord`; gives `ReportSection`s and the key numbers.

Invariants:
- A section with nothing to show is left out; the record's notes give the reason.
"""

import math
from typing import Any

from llmsys.progress import format_duration
from llmsys.report import plots
from llmsys.report.compressor_comparison import describe_heldout_bytes, is_heldout_too_small
from llmsys.report.cost_sections import (
    build_answers_section,
    build_cost_numbers,
    build_metrics_section,
    build_prediction_section,
    build_profile_section,
)
from llmsys.report.family_section import build_family_section
from llmsys.report.html_markup import (
    build_paragraph,
    format_amount,
    format_number,
    format_percent,
    render_template,
)
from llmsys.report.norms_section import build_norms_section
from llmsys.report.plots import Figure
from llmsys.report.promise_section import build_promise_section
from llmsys.report.report_section import Numbers, ReportSection
from llmsys.report.run_record import RunRecord, is_finite


def build_run_sections(record: RunRecord, tokens_per_byte: float | None) -> list[ReportSection]:
    """Return the sections of a run that have something to show.

    Args:
        record: The run.
        tokens_per_byte: Of the training text, to show the training loss in bits per byte; None when
            unknown.
    """
    parts = [
        _build_compressor_section(record),
        build_answers_section(record),
        build_metrics_section(record),
        _build_training_section(record, tokens_per_byte),
        build_family_section(record),
        build_promise_section(record),
        build_prediction_section(record),
        build_profile_section(record),
        build_norms_section(record),
        _build_experts_section(record),
        _build_samples_section(record),
    ]
    return [one for one in parts if one is not None]


# --- Key numbers ---


def build_run_numbers(record: RunRecord) -> Numbers:
    """Return the key numbers of a run."""
    numbers: Numbers = [("state", *describe_run_state(record))]
    evaluation = record.last_evaluation
    if evaluation and is_finite(evaluation.get("bits_per_byte")):
        rivals = [
            ("xz", evaluation.get("xz_bits_per_byte")),
            ("gzip", evaluation.get("gzip_bits_per_byte")),
        ]
        remark = ", ".join(f"{name} {value:.3f}" for name, value in rivals if is_finite(value))
        size = evaluation.get("evaluated_bytes")
        remark += f" {describe_heldout_bytes(size if is_finite(size) else None)}" if remark else ""
        numbers.append(("bits per byte", f"{evaluation['bits_per_byte']:.3f}", remark))
    if evaluation and is_finite(evaluation.get("loss")):
        numbers.append(("validation loss", f"{evaluation['loss']:.3f}", "nats per token"))
    parameters, active = (
        record.get_start_value("parameters"),
        record.get_start_value("parameters_active"),
    )
    if is_finite(parameters):
        remark = (
            f"{format_amount(active)} active per token"
            if is_finite(active) and active != parameters
            else ""
        )
        numbers.append(("parameters", format_amount(parameters), remark))
    if record.curves.step:
        tokens, speed = (
            record.curves.get_last_value("tokens"),
            record.curves.get_last_value("tokens_per_second"),
        )
        remark = f"step {record.curves.step[-1]:,.0f}"
        numbers.append(
            ("tokens trained", format_amount(tokens) if tokens == tokens else "–", remark)
        )
        if speed == speed:
            numbers.append(("tokens per second", format_amount(speed), _format_machine(record)))
    return numbers + build_cost_numbers(record)


def describe_run_state(record: RunRecord) -> tuple[str, str]:
    """Return the state of the run as a word, and its progress or duration.

    Args:
        record: The run.

    Returns:
        State and remark, both for people.
    """
    if record.finish is not None:
        seconds = record.finish.get("seconds")
        return "finished", f"in {format_duration(seconds)}" if is_finite(seconds) else ""
    if not record.curves.step:
        return ("started", "no step logged yet") if record.starts else ("not started", "")
    steps = record.get_start_value("steps")
    done = record.curves.step[-1]
    how_far = (
        f"{format_percent(done, steps)} of {format_number(steps)} steps"
        if is_finite(steps)
        else f"step {done:,.0f}"
    )
    return "unfinished", how_far


def _format_machine(record: RunRecord) -> str:
    world, engine = record.get_start_value("world_size"), record.get_start_value("engine")
    return f"{world} × {record.get_start_value('device') or 'device'}, {engine}" if world else ""


# --- Parts ---


def _build_compressor_section(record: RunRecord) -> ReportSection | None:
    evaluation = record.last_evaluation
    if evaluation is None or not is_finite(evaluation.get("bits_per_byte")):
        return None
    rivals = [
        ("this model", "bits_per_byte"),
        ("xz -9", "xz_bits_per_byte"),
        ("gzip -9", "gzip_bits_per_byte"),
    ]
    shown = [
        (name, float(evaluation[key])) for name, key in rivals if is_finite(evaluation.get(key))
    ]
    best = min(shown[1:], key=lambda one: one[1], default=None)
    traces, layout = plots.build_bars(
        [name for name, _ in shown],
        [value for _, value in shown],
        [f"{value:.3f}" for _, value in shown],
        "bits per byte of held-out text",
        [plots.BLUE] + [plots.FAINT] * (len(shown) - 1),
    )
    if best is None:
        verdict = "No compressor was measured for comparison."
    elif is_heldout_too_small(evaluation.get("evaluated_bytes") or 0):
        verdict = "The held-out text is too small to compare the model with compressors."
    elif shown[0][1] < best[1]:
        verdict = (
            f"The model needs {1 - shown[0][1] / best[1]:.0%} fewer bits than {best[0]}, the "
            "better compressor."
        )
    else:
        verdict = f"The model does not beat {best[0]} yet."
    sizes = {
        "bytes": evaluation.get("evaluated_bytes"),
        "tokens": evaluation.get("evaluated_tokens"),
    }
    measured = [f"{format_amount(size)} {word}" for word, size in sizes.items() if is_finite(size)]
    size = sizes["bytes"] if is_finite(sizes["bytes"]) else None
    step = format_number(evaluation["step"])
    caption = f"{verdict} Lower is better. Compared {describe_heldout_bytes(size)}, at step {step}"
    caption += f" ({' = '.join(measured)} of held-out documents)." if measured else "."
    figure = Figure(
        "plot-yardstick",
        "Against compressors",
        traces,
        layout,
        caption,
        plots.compute_bars_height(len(shown)),
    )
    return ReportSection("yardstick", "Compressors", figures=[figure])


def _build_training_section(
    record: RunRecord, tokens_per_byte: float | None
) -> ReportSection | None:
    curves = record.curves
    if not curves.step:
        return None
    tokens, columns = curves.columns["tokens"], curves.columns
    figures = [_build_loss_figure(record, tokens_per_byte)]
    small = [
        ("learning_rate", "Learning rate", "learning rate", plots.BLUE, "power"),
        ("gradient_norm", "Gradient norm", "norm before clipping", plots.ORANGE, ""),
        ("tokens_per_second", "Speed", "tokens per second", plots.GREEN, ""),
        ("utilisation", "Utilisation", "share of the peak", plots.BLUE, ""),
    ]
    for name, title, unit, colour, exponents in small:
        if any(value == value for value in columns[name]):
            draw = plots.build_exact_curve if name == "learning_rate" else plots.build_noisy_curve
            traces = draw(unit, tokens, columns[name], colour)
            layout = plots.build_tokens_layout(unit, from_zero=True, exponents=exponents)
            figures.append(
                Figure(f"plot-{name.replace('_', '-')}", title, traces, layout, height=240)
            )
    waiting = [
        100 * wait / whole if whole > 0 else math.nan
        for wait, whole in zip(columns["data_wait_seconds"], columns["seconds"], strict=True)
    ]
    if any(value == value for value in waiting):
        traces = plots.build_noisy_curve("waiting for data", tokens, waiting, plots.PURPLE)
        layout = plots.build_tokens_layout("% of the time", from_zero=True)
        figures.append(Figure("plot-data-wait", "Waiting for data", traces, layout, height=240))
    is_thinned = len(curves.step) > plots.MAX_POINTS
    note = build_paragraph(plots.THINNING_RULE, is_muted=True) if is_thinned else None
    return ReportSection("training", "Training", [note], figures, num_large=1)


def _build_loss_figure(record: RunRecord, tokens_per_byte: float | None) -> Figure:
    """Return training and evaluation loss, with a second view in bits per byte where tokens per
    byte are known.
    """
    curves = record.curves
    traces = plots.build_noisy_curve("training", curves.columns["tokens"], curves.columns["loss"])
    bits_per_nat = (tokens_per_byte or 0.0) / math.log(2)
    bits: list[list[float | None]] = [
        [_round_value(y * bits_per_nat) for y in trace["y"]] for trace in traces
    ]
    evaluations = [event for _, event in sorted(record.evaluations.items())]
    measured = [
        event
        for event in evaluations
        if is_finite(event.get("loss")) and is_finite(event.get("tokens"))
    ]
    if measured:
        tokens, losses = (
            [event["tokens"] for event in measured],
            [event["loss"] for event in measured],
        )
        diamonds = {
            "mode": "lines+markers",
            "marker": {"color": plots.ORANGE, "size": 9, "symbol": "diamond"},
        }
        traces = [*traces, plots.build_line("held out", tokens, losses, plots.ORANGE) | diamonds]
        bits = [*bits, [event.get("bits_per_byte") for event in measured]]
    views: list[dict[str, Any]] = []
    caption = "Shown in bits per byte once manifest.json or an evaluation has the tokens per byte."
    if tokens_per_byte:
        nats = [trace["y"] for trace in traces]
        views = [
            {"label": unit, "title": unit, "y": y}
            for unit, y in (("nats per token", nats), ("bits per byte", bits))
        ]
        caption = (
            f"A byte of training text is {tokens_per_byte:.4f} tokens: bits per byte = nats × "
            f"{bits_per_nat:.4f}."
        )
    return Figure(
        "plot-loss",
        "Loss",
        traces,
        plots.build_tokens_layout("nats per token", legend=True),
        caption,
        380,
        views,
    )


def _build_experts_section(record: RunRecord) -> ReportSection | None:
    loads = record.experts
    if not loads.step:
        return None
    positions = sorted(loads.whole)
    heats = [[[round(one, 3) for one in layer] for layer in loads.whole[p]] for p in positions]
    moments = [
        {"label": f"step {format_number(loads.step[p])}", "z": z}
        for p, z in zip(positions, heats, strict=True)
    ]
    traces, layout = plots.build_expert_heatmap(heats[-1])
    heat = Figure(
        "plot-experts",
        "Expert load by layer",
        traces,
        layout,
        "Share of a layer's tokens routed to each expert, times the number of experts: 1 is "
        f"balanced. {len(moments)} of {len(loads.step)} records can be chosen.",
        100 + max(160, min(560, 30 * len(heats[-1]))),
        slider_steps=moments,
    )
    lines = [
        *plots.build_noisy_curve(
            "most loaded expert of all layers", loads.tokens, loads.busiest, plots.ORANGE
        ),
        *plots.build_noisy_curve(
            "most loaded expert, mean over layers", loads.tokens, loads.busiest_mean, plots.BLUE
        ),
        *plots.build_noisy_curve(
            "least loaded expert of all layers", loads.tokens, loads.idlest, plots.GREEN
        ),
    ]
    over_time = Figure(
        "plot-balance",
        "Expert balance over the run",
        lines,
        plots.build_tokens_layout("load, × even", from_zero=True, legend=True),
        "The closer the three lines are to 1, the more balanced the experts.",
    )
    return ReportSection("experts", "Experts", figures=[heat, over_time])


def _build_samples_section(record: RunRecord) -> ReportSection | None:
    steps = sorted(
        (step for step, event in record.samples.items() if event.get("samples")), reverse=True
    )
    if not steps:
        return None
    texts = {step: _list_texts(record.samples[step]) for step in steps}
    content = render_template("samples.html", steps=steps, texts=texts)
    return ReportSection("samples", "Samples", [content])


def _list_texts(event: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the prompts of an event, each with the text after it."""
    pairs = [(str(one.get("prompt", "")), str(one.get("text", ""))) for one in event["samples"]]
    return [(prompt, text.removeprefix(prompt)[:4_000]) for prompt, text in pairs]


def _round_value(value: float) -> float:
    return float(f"{value:.6g}")
