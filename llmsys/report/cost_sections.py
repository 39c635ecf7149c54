"""Build the sections about question sets, utilisation and memory, and predicted against measured
cost.

Reads a `RunRecord`. A section with nothing to show is None.
"""

import math
from typing import Any

from llmsys.estimate.prediction_error import describe_measured_memory, format_memory_size
from llmsys.report.html_markup import build_details, build_paragraph, build_table
from llmsys.report.report_section import Numbers, ReportSection
from llmsys.report.run_record import RunRecord


def build_cost_numbers(record: RunRecord) -> Numbers:
    """Return utilisation and its base, memory of the fullest rank, and the number of dead
    experts.
    """
    share, memory = (
        record.curves.get_last_value("utilisation"),
        record.curves.get_last_value("memory_bytes"),
    )
    numbers: Numbers = []
    if not math.isnan(share):
        numbers.append(
            ("utilisation", f"{share:.1%}", str((record.last_step or {}).get("utilisation_of", "")))
        )
    if not math.isnan(memory):
        numbers.append(("memory", format_memory_size(memory), "of the fullest rank"))
    if record.experts.whole:
        loads = record.experts.whole[max(record.experts.whole)]
        dead = sum(share == 0 for layer in loads for share in layer)
        numbers.append(
            ("dead experts", str(dead), f"of {sum(map(len, loads))} in all layers, last record")
        )
    return numbers


def build_answers_section(record: RunRecord) -> ReportSection | None:
    """Return a table of the question sets of the latest evaluation that has them."""
    asked = [
        event
        for _, event in sorted(record.evaluations.items())
        if isinstance(event.get("sets"), dict)
    ]
    if not asked:
        return None
    keys = ("accuracy", "accuracy_per_byte", "accuracy_per_token")
    rows = [
        [name, *(f"{one[key]:.1%}" for key in keys), f"{one['questions']:,}"]
        for name, one in asked[-1]["sets"].items()
        if all(isinstance(one.get(key), float | int) for key in (*keys, "questions"))
    ]
    head = ("set", "by likelihood", "per byte", "per token", "questions")
    lead = build_paragraph(
        "Accuracy: share of questions whose correct answer was the most likely, after step "
        f"{asked[-1]['step']:,}."
    )
    tables = [build_table(head, rows, numeric=[1, 2, 3, 4])] if rows else []
    harness = [
        [name, metric, f"{value:.4f}", f"{one['questions']:,}"]
        for name, one in asked[-1]["sets"].items()
        if "accuracy" not in one and isinstance(one.get("questions"), int)
        for metric, value in one.items()
        if metric != "questions" and isinstance(value, float) and math.isfinite(value)
    ]
    if harness:
        tables.append(
            build_table(("harness task", "metric", "value", "questions"), harness, numeric=[2, 3])
        )
    return ReportSection("answers", "Answers", [lead, *tables])


def build_metrics_section(record: RunRecord) -> ReportSection | None:
    """Return a table of the user's own metrics after each evaluation."""
    measured = {
        step: one["metrics"]
        for step, one in sorted(record.evaluations.items())
        if one.get("metrics")
    }
    if not measured:
        return None
    names = sorted({name for values in measured.values() for name in values})
    rows = [
        [
            f"{step:,}",
            *(f"{values[name]['value']:.4g}" if name in values else "–" for name in names),
        ]
        for step, values in measured.items()
    ]
    lead = build_paragraph("Means over the held-out targets, of evaluation.metrics.")
    table = build_table(("step", *names), rows, numeric=range(len(names) + 1))
    return ReportSection("metrics", "Your metrics", [lead, table])


def build_prediction_section(record: RunRecord) -> ReportSection | None:
    """Return a table of the estimate before the first step, and the measured steps, with a sentence
    on what both are of.
    """
    said, took = record.prediction, record.measured
    if said is None:
        return None
    memory, seconds = said["memory"], said["step_seconds"]
    rows = [
        [
            f"memory, {memory['instant']}",
            format_memory_size(memory["peak_bytes"]),
            *_format_measured(took, "peak_bytes", memory["peak_bytes"]),
        ]
    ]
    if seconds is not None:
        interval = f"{seconds['p50']:.3g} s ({seconds['p10']:.3g} to {seconds['p90']:.3g})"
        rows.append(
            [
                f"step on {said['device']}",
                interval,
                *_format_measured(took, "step_seconds", seconds["p50"]),
            ]
        )
        tokens = record.get_start_value("tokens_per_step")
        if isinstance(tokens, int):
            rows.append(_build_speed_row(tokens, seconds, took))
    notes = [build_paragraph(describe_measured_memory(memory), is_muted=True)]
    if seconds is None:
        missing = f"No estimated step time: {said.get('why_no_time')}"
        notes.append(build_paragraph(missing, is_muted=True))
    table = build_table(("", "predicted", "measured", "residual"), rows, numeric=[1, 2, 3])
    return ReportSection("prediction", "Prediction", [table, *notes])


def _build_speed_row(
    tokens: int, seconds: dict[str, float], took: dict[str, Any] | None
) -> list[str]:
    """Return the row of tokens per second, of full steps and without waits for data, as the row of
    steps is.
    """
    middle, slow, fast = (tokens / seconds[name] for name in ("p50", "p90", "p10"))
    row = ["tokens/s of such steps", f"{middle:,.0f} ({slow:,.0f} to {fast:,.0f})"]
    if took is None:
        return [*row, "–", "–"]
    found = tokens / took["step_seconds"]
    return [*row, f"{found:,.0f}", f"{found / middle - 1:+.1%}"]


def build_profile_section(record: RunRecord) -> ReportSection | None:
    """Return the shares of kernels in the latest recorded step, and its longest kernels."""
    if not record.profiles:
        return None
    profile = record.profiles[max(record.profiles)]
    lead = build_paragraph(
        f"Step {profile['step']:,} of rank 0: {profile['seconds']:.3g} busy seconds; the host "
        f"waited for the device for {profile['host_wait_seconds']:.3g} s. The timeline is "
        f"{profile['trace']} in the run folder; https://ui.perfetto.dev opens it.",
    )
    kinds = [[name, f"{share:.1%}"] for name, share in profile["shares"].items()]
    kernels = [[name, f"{count:,}", f"{share:.1%}"] for name, count, share in profile["kernels"]]
    content = [
        lead,
        build_table(("kind of kernel", "share"), kinds, numeric=[1]),
        build_details(
            "Longest kernels", build_table(("kernel", "calls", "share"), kernels, numeric=[1, 2])
        ),
    ]
    return ReportSection("profile", "Profile", content)


def _format_measured(took: dict[str, Any] | None, key: str, predicted: float) -> list[str]:
    if took is None:
        return ["–", "–"]
    measured = format_memory_size(took[key]) if key == "peak_bytes" else f"{took[key]:.3g} s"
    return [measured, f"{took[key] / predicted - 1:+.1%}"]
