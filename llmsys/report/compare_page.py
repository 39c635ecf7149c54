"""Render one page about several runs: their curves, the config keys that differ, and their scores.

Reads run folders, finished or not; writes one HTML file. Curves are drawn over tokens, training
time and FLOPs (6 x active parameters x tokens; Kaplan et al. 2020).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, assert_never

from markupsafe import Markup

from llmsys.errors import DataError
from llmsys.progress import format_duration
from llmsys.report.html_markup import (
    build_paragraph,
    build_table,
    format_amount,
    format_number,
)
from llmsys.report.html_page import render_document
from llmsys.report.plots import (
    BLUE,
    GREEN,
    MAX_POINTS,
    ORANGE,
    PURPLE,
    SMOOTHED_FROM,
    THINNING_RULE,
    Figure,
    Trace,
    build_line,
    compute_running_mean,
    downsample_points,
)
from llmsys.report.report_section import ReportSection, compute_curves_height
from llmsys.report.run_record import MISSING, RunRecord, is_finite, read_run
from llmsys.report.run_sections import describe_run_state
from llmsys.storage.atomic_write import write_bytes_atomically

COLOURS = (BLUE, ORANGE, GREEN, PURPLE)
DASHES = ("solid", "dash", "dot", "dashdot")
MAX_RUNS = len(COLOURS) * len(DASHES)
# Keys that differ between any two runs and explain no curve.
NAMES = ("run.name", "run.folder")
SECONDS_PER_HOUR = 3600.0
# Names in the card of all runs, and characters of a config value.
SHOWN_NAMES, VALUE_CHARACTERS = 4, 200
# Of the longest run to the shortest, from which the horizontal axis is logarithmic.
LENGTH_RATIO = 8.0


# Texts of which all of these are equal are one text.
TEXT_MEASURES = ("evaluated_bytes", "gzip_bits_per_byte", "xz_bits_per_byte")
Measure = Literal["nats per token", "bits per byte", "nothing"]


@dataclass(frozen=True)
class Comparability:
    """The loss by which runs can be compared.

    Attributes:
        measure: `nats per token` (and bits per byte) on equal held-out tokens; `bits per byte` on
            equal texts that tokenizers cut differently; `nothing` on different texts or objectives.
        reason: Why not more; empty where all can be compared.
    """

    measure: Measure
    reason: str = ""


def find_comparability(runs: Sequence[RunRecord]) -> Comparability:
    """Find what can be compared between the held-out losses of runs.

    Texts are equal if their bytes are as many and take as much with gzip and xz.

    Args:
        runs: The runs; those without an evaluation are left out.

    Returns:
        The measure, and why it is not another.
    """
    evaluated = [run for run in runs if run.last_evaluation is not None]
    events = [run.last_evaluation or {} for run in evaluated]
    objectives = {str((run.config.get("objective") or {}).get("kind")) for run in evaluated}
    if len(objectives) > 1:
        return Comparability(
            "nothing",
            f"Their objectives differ ({', '.join(sorted(objectives))}), so their losses are of "
            "different things.",
        )
    texts = {tuple(event.get(name) for name in TEXT_MEASURES): event for event in events}
    if len(texts) > 1:
        sizes = ", ".join(
            f"{event['evaluated_bytes']:,} bytes" if event.get("evaluated_bytes") else "unknown"
            for event in texts.values()
        )
        return Comparability(
            "nothing",
            f"Their held-out texts differ ({sizes}), so no loss of one can be compared with that "
            "of another. Hold out the same documents: data.heldout_inputs.",
        )
    if len({event.get("evaluated_tokens") for event in events}) > 1:
        return Comparability(
            "bits per byte",
            "Their tokenizers cut the same text into different numbers of tokens, so losses per "
            "token cannot be compared. Bits per byte can.",
        )
    return Comparability("nats per token")


def read_compared_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Read the runs of one page.

    Args:
        folders: Run folders, at least two.

    Returns:
        A record of each.

    Raises:
        DataError: There are fewer than two runs, too many, or a folder has no steps.
    """
    if len(set(folders)) < 2 or len(folders) > MAX_RUNS:
        raise DataError(
            f"{len(set(folders))} runs cannot be compared on one page. Give 2 to {MAX_RUNS} run "
            "folders."
        )
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        if not run.curves.step:
            raise DataError(
                f"{run.folder} has no logged step, so there is nothing to compare. Leave it out."
            )
    return runs


def write_comparison(runs: Sequence[RunRecord], output: Path) -> Path:
    """Write the page of several runs.

    Args:
        runs: The runs, from `read_compared_runs`.
        output: HTML file to write.

    Returns:
        `output`.
    """
    titles = _choose_titles(runs)
    thinned = any(len(run.curves.step) > MAX_POINTS for run in runs)
    note = build_paragraph(THINNING_RULE, is_muted=True) if thinned else None
    found = find_comparability(runs)
    reason = build_paragraph(found.reason) if found.reason else None
    figures = list(_iter_figures(runs, titles, found.measure))
    parts = [
        ReportSection("curves", "Curves", [reason, note], figures),
        ReportSection("scores", "Scores", [_build_scores_table(runs, titles)]),
        ReportSection(
            "config", "Config", [_build_keys_table(runs, titles)], heading="Differing keys"
        ),
    ]
    best = _find_best(runs, titles, found.measure)
    more = f" and {len(titles) - SHOWN_NAMES} more" if len(titles) > SHOWN_NAMES else ""
    numbers = [
        ("runs", str(len(runs)), ", ".join(titles[:SHOWN_NAMES]) + more),
        *([("lowest loss", *best)] if best else []),
        *([("not comparable", "–", found.reason)] if found.measure == "nothing" else []),
    ]
    page = render_document(("comparison", f"{len(runs)} runs"), numbers, [], parts)
    write_bytes_atomically(output, page.encode("utf-8", errors="replace"))
    return output


def _choose_titles(runs: Sequence[RunRecord]) -> list[str]:
    """Return the names of the runs; their folders where two have the same name."""
    names = [run.name for run in runs]
    return [str(run.folder) if names.count(run.name) > 1 else run.name for run in runs]


def _find_best(
    runs: Sequence[RunRecord], titles: Sequence[str], measure: Measure
) -> tuple[str, str] | None:
    """Return the lowest loss with its unit and run, in bits per byte where it is of text."""
    if measure == "nothing":
        return None
    for key, unit in (("bits_per_byte", "bits per byte"), ("loss", "nats per token")):
        scored = [
            (event[key], title)
            for run, title in zip(runs, titles, strict=True)
            if (event := run.last_evaluation) is not None and is_finite(event.get(key))
        ]
        if scored:
            return f"{min(scored)[0]:.4f}", f"{unit}, held out: {min(scored)[1]}"
    return None


def _iter_figures(
    runs: Sequence[RunRecord], titles: Sequence[str], measure: Measure
) -> Iterator[Figure]:
    match measure:
        case "nats per token":
            unit_of_loss = "nats per token"
            caption_of_loss = (
                "Lines: training loss, long ones as running means. Diamonds: held-out loss."
            )
        case "bits per byte":
            unit_of_loss = "bits per byte, held out"
            caption_of_loss = "Held-out loss, which does not depend on the tokenizer."
        case "nothing":
            unit_of_loss = "nats per token"
            caption_of_loss = (
                "Lines: training loss, long ones as running means. Diamonds: held-out loss. "
                "Compare the shapes, not the heights."
            )
        case unreachable:
            assert_never(unreachable)
    axes = (
        ("tokens", "Loss against tokens", "tokens trained", [1.0] * len(runs)),
        ("time", "Loss against time", "hours of training steps", None),
        (
            "flops",
            "Loss against compute",
            "FLOPs (6 N D, N active parameters)",
            [_get_flops(run) for run in runs],
        ),
    )
    for name, title, unit, factors in axes:
        traces: list[Trace] = []
        for number, run in enumerate(runs):
            tokens = list(run.curves.columns["tokens"])
            x = (
                compute_training_hours(run)
                if factors is None
                else [factors[number] * one for one in tokens]
            )
            traces += _build_run_traces(run, titles[number], number, tokens, x, measure)
        if any(trace["x"] for trace in traces):
            layout = {
                "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
                "yaxis": {"title": {"text": unit_of_loss}},
                "showlegend": True,
                "hovermode": "closest",
            }
            caption = caption_of_loss
            if _has_stub(traces):
                layout["xaxis"] = {"title": {"text": unit}, "type": "log"}
                caption += " The runs differ much in length, so the axis is logarithmic."
            yield Figure(
                f"plot-{name}", title, traces, layout, caption, compute_curves_height(traces)
            )


def _has_stub(traces: Sequence[Trace]) -> bool:
    """Return whether the shortest curve would be a stub on the axis of the longest."""
    ends = [float(trace["x"][-1]) for trace in traces if trace["x"]]
    return max(ends) > LENGTH_RATIO * min(ends)


def _get_flops(run: RunRecord) -> float:
    """Return the FLOPs of one token; nan where the run has not recorded its parameters."""
    active = run.get_start_value("parameters_active")
    return 6.0 * active if is_finite(active) else MISSING


def compute_training_hours(run: RunRecord) -> list[float]:
    """Return the hours of training steps up to each logged step, at the speed that each of them
    measured.
    """
    tokens, speeds = run.curves.columns["tokens"], run.curves.columns["tokens_per_second"]
    spent = [
        (after - before) / speed if speed > 0 else MISSING
        for (before, after), speed in zip(pairwise([0.0, *tokens]), speeds, strict=True)
    ]
    return [seconds / SECONDS_PER_HOUR for seconds in accumulate(spent)]


def _build_run_traces(
    run: RunRecord,
    title: str,
    number: int,
    tokens: Sequence[float],
    x: Sequence[float],
    measure: Measure,
) -> list[Trace]:
    """Return the training loss of a run, and its evaluations as diamonds of the same colour; the
    evaluations alone where only bits per byte can be compared.
    """
    colour, dash = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS)]
    loss = run.curves.columns["loss"]
    key = "bits_per_byte" if measure == "bits per byte" else "loss"
    smooth = len(loss) >= SMOOTHED_FROM
    points = compute_running_mean(x, loss) if smooth else downsample_points(x, loss)
    line = build_line(title, *points, colour, markers=len(points[0]) < 30)
    line["line"] = line["line"] | {"dash": dash}
    places = dict(zip(tokens, x, strict=True))
    measured = [
        (place, event[key])
        for _, event in sorted(run.evaluations.items())
        if is_finite(event.get(key))
        and is_finite(place := places.get(event.get("tokens", MISSING), MISSING))
    ]
    if measure == "bits per byte":
        evaluations = build_line(
            title, [a for a, _ in measured], [b for _, b in measured], colour, markers=True
        )
        evaluations["line"] = evaluations["line"] | {"dash": dash}
        return [evaluations]
    if not measured:
        return [line]
    diamonds = build_line(
        f"{title}, held out", [a for a, _ in measured], [b for _, b in measured], colour
    )
    marker = {"color": colour, "size": 9, "symbol": "diamond"}
    return [line, diamonds | {"mode": "markers", "marker": marker, "showlegend": False}]


def _build_scores_table(runs: Sequence[RunRecord], titles: Sequence[str]) -> Markup:
    sets = sorted({name for run in runs for name in (run.last_evaluation or {}).get("sets") or {}})
    metrics = sorted(
        {name for run in runs for name in (run.last_evaluation or {}).get("metrics") or {}}
    )
    head = (
        "run",
        "state",
        "steps",
        "tokens",
        "time",
        "parameters",
        "bits per byte",
        "nats per token",
        *sets,
        *metrics,
    )
    rows: list[list[str]] = []
    for run, title in zip(runs, titles, strict=True):
        event = run.last_evaluation or {}
        answers, own = event.get("sets") or {}, event.get("metrics") or {}
        tokens, hours = run.curves.get_last_value("tokens"), compute_training_hours(run)[-1]
        rows.append(
            [
                title,
                describe_run_state(run)[0],
                format_number(run.curves.step[-1]),
                format_amount(tokens) if tokens == tokens else "–",
                format_duration(hours * SECONDS_PER_HOUR) if hours == hours else "–",
                _format_value(run.get_start_value("parameters"), format_amount),
                _format_value(event.get("bits_per_byte"), "{:.4f}".format),
                _format_value(event.get("loss"), "{:.4f}".format),
                *(
                    _format_value(_get_accuracy(answers.get(name) or {}), "{:.1%}".format)
                    for name in sets
                ),
                *(
                    _format_value((own.get(name) or {}).get("value"), "{:.4g}".format)
                    for name in metrics
                ),
            ]
        )
    return build_table(head, rows, numeric=range(2, len(head)))


def _get_accuracy(answers: Mapping[str, Any]) -> Any:
    """Return the accuracy of a task; of one of the harness `acc` or, where it generates,
    `exact_match`.
    """
    return next(
        (answers[name] for name in ("accuracy", "acc", "exact_match") if name in answers), None
    )


def _format_value(value: Any, form: Any) -> str:
    return str(form(value)) if is_finite(value) else "–"


def list_differing_keys(configs: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return the keys whose values differ, with the value of each config; `–` where it has no
    such key.
    """
    flat = [dict(_iter_leaves(config, "")) for config in configs]
    keys = list(dict.fromkeys(key for values in flat for key in values))
    rows = [(key, [values.get(key, "–") for values in flat]) for key in keys if key not in NAMES]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _iter_leaves(value: Any, prefix: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _iter_leaves(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield (
            prefix,
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str),
        )


def _build_keys_table(runs: Sequence[RunRecord], titles: Sequence[str]) -> Markup:
    rows = list_differing_keys([run.config for run in runs])
    if not rows:
        return build_paragraph("Their configs are equal, apart from name and folder.")
    return build_table(
        ("key", *titles), [(key, *map(_shorten_value, values)) for key, values in rows]
    )


def _shorten_value(value: str) -> str:
    """Return the beginning of a long value, such as a list of files."""
    left = len(value) - VALUE_CHARACTERS
    return value if left <= 0 else f"{value[:VALUE_CHARACTERS]} … {left:,} more characters"
