"""Build the funnel of a dataset's report: documents in and out of each stage, why documents were
dropped, and the documents nearest to each threshold.

Reads the funnel of a `Manifest` and `ThresholdReport`s.

The input is described in its own units: HTML only where there was HTML, rows where a file counts
rows.

Invariants:
- Every rule that dropped documents is shown with an example, its value and its threshold.
- Text of a crawled page is escaped.
- The number of documents per test, and of characters of each, is bounded, whatever the dataset's
  size.
"""

from collections import defaultdict
from collections.abc import Sequence

from markupsafe import Markup

from llmsys.dataset.manifest import DropCount, DropExample, FunnelStage, Manifest, SkippedInput
from llmsys.dataset.manifest_section import CLOSE, ThresholdReport, is_counted_in_rows
from llmsys.report import plots
from llmsys.report.html_markup import (
    format_bytes,
    format_number,
    format_percent,
    render_template,
)
from llmsys.report.plots import Figure
from llmsys.report.report_section import ReportSection

URL_CHARACTERS = 2_000  # of an endless address; a longer one says how much is missing
EARLY_EXIT = (
    "A document is dropped at the first test that it fails, and later tests are not run on it. A "
    "looser threshold therefore keeps at most as many more documents as are counted here. Kept "
    "documents passed every test; their values are in the columns of documents/. llmsys prepare "
    "CONFIG --sweep rule.field=a,b,c counts what other thresholds would keep."
)
HEAD = ("stage", "documents in", "documents out", "dropped", "bytes in", "bytes out")
NAME = Markup("<b>{}</b>")
# The number of dropped documents, with a small bar of its share.
DROPPED = Markup(
    '<span>{} <span class="muted">{}</span><span class="meter" aria-hidden="true">'
    '<i style="width:{:.1f}%"></i></span></span>'
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
    silent: dict[str, list[ThresholdReport]] = defaultdict(list)
    for border in manifest.thresholds:
        if not border.dropped.documents and border.kept.documents:
            silent[border.rule].append(border)
    content = render_template(
        "funnel.html",
        head=HEAD,
        rows=[_build_stage_row(stage) for stage in stages],
        numeric=range(1, len(HEAD)),
        note=describe_funnel_bytes(manifest),
        changes=[
            (format_title(stage.stage), what, format_number(count))
            for stage in stages
            for what, count in sorted(stage.changed.items(), key=lambda one: (-one[1], one[0]))
        ],
        drops=[
            (stage, drop, _select_thresholds(drop, manifest.thresholds)) for stage, drop in drops
        ],
        early_exit=EARLY_EXIT if manifest.thresholds else "",
        silent=silent,
        num_silent=sum(map(len, silent.values())),
        list_facts=list_example_facts,
        format_title=format_title,
        format_rule=format_rule,
        close=f"{CLOSE:.0%}",
        max_url_characters=URL_CHARACTERS,
    )
    return ReportSection("funnel", "Funnel", [content], figures)


def _build_stage_row(stage: FunnelStage) -> tuple[str, ...]:
    gone = stage.documents_in - stage.documents_out
    share = 100 * gone / stage.documents_in if stage.documents_in else 0
    return (
        NAME.format(format_title(stage.stage)),
        format_number(stage.documents_in),
        format_number(stage.documents_out),
        DROPPED.format(format_number(gone), format_percent(gone, stage.documents_in), share),
        format_bytes(stage.bytes_in),
        format_bytes(stage.bytes_out),
    )


def _select_thresholds(
    drop: DropCount, borders: Sequence[ThresholdReport]
) -> list[ThresholdReport]:
    """Return the thresholds of a test that dropped documents."""
    return [
        border
        for border in borders
        if (border.rule, border.test) == (drop.rule, drop.test) and border.dropped.documents
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


def list_example_facts(example: DropExample) -> list[tuple[str, str]]:
    """Return what is known of a dropped document, as (name, value)."""
    facts = [
        (name, value if isinstance(value, str) else format_number(value))
        for name, value in (("value", example.value), ("threshold", example.threshold))
        if value is not None
    ]
    return [*facts, ("page", example.url)]


def format_rule(border: ThresholdReport) -> str:
    """Return the test as a condition: words < 50 is dropped. Where languages differ, it has the
    lowest and the highest threshold.
    """
    sign = ">" if border.drops == "above" else "<"
    low, high = border.thresholds[0], border.thresholds[-1]
    threshold = format_number(low)
    if low != high:
        threshold += f" to {format_number(high)} (by language)"
    return f"{format_title(border.test)} {sign} {threshold} is dropped"


def format_title(name: str) -> str:
    """Return the name of a stage, rule or test as text: near_duplicates → near duplicates."""
    return name.replace("_", " ")
