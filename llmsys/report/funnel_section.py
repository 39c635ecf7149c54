"""Build the funnel of a dataset's report: documents in and out of each stage, and why documents
were dropped.

Reads the funnel of a `Manifest` and `ThresholdReport`s.

The input is described in its own units: HTML only where there was HTML, rows where a file counts
rows.

Invariants:
- Every rule that dropped documents is shown with an example, its value and its threshold.
- Text of a crawled page is escaped.
"""

from collections.abc import Sequence

from llmsys.dataset.manifest import DropCount, DropExample, FunnelStage, Manifest, SkippedInput
from llmsys.dataset.manifest_section import ThresholdReport, is_counted_in_rows
from llmsys.report import plots
from llmsys.report.html_markup import (
    Html,
    build_definition_list,
    build_details,
    build_table,
    build_tag,
    format_bytes,
    format_number,
    format_percent,
    format_user_text,
    join_html,
)
from llmsys.report.plots import Figure
from llmsys.report.report_section import ReportSection, build_report_section
from llmsys.report.threshold_sections import (
    build_early_exit_note,
    build_silent_tests_table,
    build_threshold_block,
)


def describe_input(manifest: Manifest) -> str:
    """Return the amount of input: HTML that was extracted, text that came as text, or both."""
    given = manifest.read.given_text_bytes
    html = manifest.read.html_bytes - given
    if html <= 0:  # pairs have no pages at all
        return (
            f"{format_bytes(given or (manifest.funnel[0].bytes_in if manifest.funnel else 0))} of "
            "text"
        )
    return f"{format_bytes(html)} of HTML" + (
        f" and {format_bytes(given)} of text" if given else ""
    )


def describe_funnel_bytes(manifest: Manifest) -> str:
    """Return a sentence on the unit of the funnel's bytes."""
    given = manifest.read.given_text_bytes
    if manifest.read.html_bytes <= given:
        return "Bytes are UTF-8 text: the input was text, so nothing was extracted."
    if given:
        return "Bytes are HTML (or text, for text input) before extraction and UTF-8 text after it."
    return "Bytes are HTML before extraction and UTF-8 text after it."


def format_offset(skip: SkippedInput) -> str:
    """Return the location of a skipped record in its file: `row 12`, or `byte 1,234`."""
    return f"{'row' if is_counted_in_rows(skip.file) else 'byte'} {format_number(skip.offset)}"


MAX_BARS = 20


def build_funnel_section(manifest: Manifest) -> ReportSection | None:
    """Return the funnel with its figures, changes and reasons for drops; None without stages."""
    stages = manifest.funnel
    if not stages:
        return None
    figures = [_build_funnel_figure(stages)]
    drops = [(stage, drop) for stage in stages for drop in stage.dropped]
    if drops:
        figures.append(_build_drops_figure([drop for _, drop in drops]))
    rows = [
        (
            build_tag("b", format_title(stage.stage)),
            format_number(stage.documents_in),
            format_number(stage.documents_out),
            _build_dropped_cell(stage),
            format_bytes(stage.bytes_in),
            format_bytes(stage.bytes_out),
        )
        for stage in stages
    ]
    head = ("stage", "documents in", "documents out", "dropped", "bytes in", "bytes out")
    note = build_tag("p", describe_funnel_bytes(manifest), class_="muted")
    numbers = build_table(head, rows, numeric=range(1, 6))
    return build_report_section(
        "funnel",
        "Funnel",
        figures,
        numbers,
        note,
        *_build_changes_table(stages),
        *_build_drop_reasons(drops, manifest.thresholds),
    )


def _build_drop_reasons(
    drops: Sequence[tuple[FunnelStage, DropCount]], reports: Sequence[ThresholdReport]
) -> list[Html | None]:
    """Return every test that dropped documents, with examples; then the tests that dropped none."""
    if not drops:
        return [build_silent_tests_table(reports)]
    tests = [
        _build_drop_details(
            stage, drop, [one for one in reports if (one.rule, one.test) == (drop.rule, drop.test)]
        )
        for stage, drop in drops
    ]
    note = build_early_exit_note() if reports else None
    return [
        build_tag("h3", "Why documents were dropped"),
        note,
        *tests,
        build_silent_tests_table(reports),
    ]


def _build_changes_table(stages: tuple[FunnelStage, ...]) -> list[Html]:
    """Return a table of the changes in documents that were kept, by kind."""
    rows = [
        (format_title(stage.stage), what, format_number(count))
        for stage in stages
        for what, count in sorted(stage.changed.items(), key=lambda one: (-one[1], one[0]))
    ]
    if not rows:
        return []
    return [
        build_tag("h3", "Changes to kept documents"),
        build_table(("stage", "what", "times"), rows, numeric=[2]),
    ]


def _build_funnel_figure(stages: tuple[FunnelStage, ...]) -> Figure:
    names = [format_title(stage.stage) for stage in stages]
    kept = plots.build_bars(
        names, [s.documents_out for s in stages], ["" for _ in stages], "documents"
    )[0][0]
    gone_count = [s.documents_in - s.documents_out for s in stages]
    gone = plots.build_bars(names, gone_count, ["" for _ in stages], "documents", plots.ORANGE)[0][
        0
    ]
    kept |= {"name": "kept", "hovertemplate": "%{y}: %{x:,} kept<extra></extra>"}
    gone |= {"name": "dropped here", "hovertemplate": "%{y}: %{x:,} dropped<extra></extra>"}
    layout = plots.build_bars_layout("documents") | {"barmode": "stack", "showlegend": True}
    height = plots.compute_bars_height(len(names), names)
    return Figure("plot-funnel", "Documents after each stage", [kept, gone], layout, height=height)


def _build_drops_figure(drops: list[DropCount]) -> Figure:
    counted = plots.select_largest(
        ((f"{format_title(d.rule)}: {format_title(d.test)}", d.documents) for d in drops), MAX_BARS
    )
    traces, layout = plots.build_bars(
        [name for name, _ in counted],
        [value for _, value in counted],
        [format_number(value) for _, value in counted],
        "documents dropped",
        plots.ORANGE,
    )
    return Figure(
        "plot-drops",
        "Drops by test",
        traces,
        layout,
        height=plots.compute_bars_height(len(counted), (name for name, _ in counted)),
    )


def _build_dropped_cell(stage: FunnelStage) -> Html:
    """Return the number of dropped documents, with a small bar of its share."""
    gone = stage.documents_in - stage.documents_out
    share = 100 * gone / stage.documents_in if stage.documents_in else 0
    return build_tag(
        "span",
        f"{format_number(gone)} ",
        build_tag("span", format_percent(gone, stage.documents_in), class_="muted"),
        build_tag(
            "span", build_tag("i", style=f"width:{share:.1f}%"), class_="meter", aria_hidden="true"
        ),
    )


def _build_drop_details(
    stage: FunnelStage, drop: DropCount, reports: Sequence[ThresholdReport]
) -> Html:
    """Return one test with examples: the documents nearest to its threshold where it has one."""
    summary = [
        build_tag("b", f"{format_title(drop.rule)}: {format_title(drop.test)}"),
        build_tag(
            "span",
            f" {format_number(drop.documents)} document{'' if drop.documents == 1 else 's'}, "
            f"{format_bytes(drop.bytes)}, {format_percent(drop.documents, stage.documents_in)} of "
            "the input",
            class_="muted",
        ),
    ]
    blocks = [build_threshold_block(border) for border in reports if border.dropped.documents]
    examples = blocks or [_build_example(example) for example in drop.examples]
    return build_details(
        summary, examples or build_tag("p", "No examples were kept.", class_="muted")
    )


def _build_example(example: DropExample) -> Html:
    values = [
        *_build_value_entry("value", example.value),
        *_build_value_entry("threshold", example.threshold),
        ("page", join_html(example.url)),
    ]
    return build_tag(
        "div",
        build_tag("p", build_tag("b", example.reason)),
        build_definition_list(values),
        format_user_text(example.excerpt),
        class_="example",
    )


def _build_value_entry(name: str, value: float | str | None) -> list[tuple[str, Html]]:
    return (
        []
        if value is None
        else [(name, join_html(value if isinstance(value, str) else format_number(value)))]
    )


def format_title(name: str) -> str:
    """Return the name of a stage, rule or test as text: near_duplicates → near duplicates."""
    return name.replace("_", " ")
