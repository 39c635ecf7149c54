"""What the page says about a dataset: the funnel with its reasons, languages, lengths, what could not be read, files.

Reads a `Manifest`; gives `Part`s, the key numbers and the dataset's origin. Promises: every text of a crawled page is
shown as text, and every dropped document's rule with its value and threshold.
"""

from collections.abc import Sequence

from llmsys.manifest import DropCount, DropExample, FunnelStage, Manifest, SkippedInput
from llmsys.report import plots
from llmsys.report.contamination_section import build_contamination_section
from llmsys.report.html_markup import (
    Html,
    build_definition_list,
    build_details,
    build_section,
    build_table,
    build_tag,
    format_amount,
    format_bytes,
    format_number,
    format_percent,
    format_user_text,
    join_html,
)
from llmsys.report.input_units import describe_funnel_bytes, describe_input, format_offset
from llmsys.report.plots import Figure
from llmsys.report.run_sections import Numbers, ReportSection, build_report_section
from llmsys.report.threshold_sections import build_early_exit_note, build_silent_tests_table, build_threshold_block
from llmsys.report.tokenizer_section import build_tokenizer_section
from llmsys.threshold_report import ThresholdReport

MAX_BARS = 20
MAX_SKIP_ROWS = 100


def build_dataset_numbers(manifest: Manifest) -> Numbers:
    """Return the numbers a reader looks for first."""
    numbers: Numbers = []
    if manifest.funnel:
        first, last = manifest.funnel[0], manifest.funnel[-1]
        remark = f"{format_percent(last.documents_out, first.documents_in)} of {format_number(first.documents_in)}"
        numbers.append(("documents kept", format_number(last.documents_out), remark))
        numbers.append(("clean text", format_bytes(last.bytes_out), f"from {describe_input(manifest)}"))
    tokens = sum(split.tokens for split in manifest.splits.values())
    if tokens:
        text = sum(split.bytes for split in manifest.splits.values())
        numbers.append(("tokens", format_amount(tokens), f"{text / tokens:.2f} bytes per token"))
    if manifest.vocab_size:
        numbers.append(("vocabulary", format_number(manifest.vocab_size), str(manifest.token_dtype)))
    return numbers


def list_missing_notes(manifest: Manifest) -> list[str]:
    """What a reader would look for and not find, with the reason."""
    notes = []
    if not manifest.splits:
        notes.append("No token files yet: only documents were prepared. `llmsys prepare CONFIG` goes on to tokens.")
    if manifest.funnel and not manifest.funnel[-1].documents_out:
        notes.append("Not one document was kept; the funnel says which rule dropped them.")
    return notes


def build_dataset_sections(manifest: Manifest) -> list[ReportSection]:
    """Return all parts of a dataset that have something to show."""
    about_text = [
        _build_funnel_section(manifest),
        build_contamination_section(manifest),
        _build_distributions_section(manifest),
    ]
    parts = [*about_text, build_tokenizer_section(manifest), _build_reading_section(manifest)]
    return [one for one in parts if one is not None]


# --- Funnel ---


def _build_funnel_section(manifest: Manifest) -> ReportSection | None:
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
        *_build_drop_reasons(drops, manifest.borders),
    )


def _build_drop_reasons(
    drops: Sequence[tuple[FunnelStage, DropCount]], borders: Sequence[ThresholdReport]
) -> list[Html | None]:
    """Return every test that dropped documents, with examples; then those that dropped none."""
    if not drops:
        return [build_silent_tests_table(borders)]
    tests = [
        _build_drop_details(stage, drop, [one for one in borders if (one.rule, one.test) == (drop.rule, drop.test)])
        for stage, drop in drops
    ]
    note = build_early_exit_note() if borders else None
    return [build_tag("h3", "Why documents were dropped"), note, *tests, build_silent_tests_table(borders)]


def _build_changes_table(stages: tuple[FunnelStage, ...]) -> list[Html]:
    """What was changed in the documents that stay, counted by what was done."""
    rows = [
        (format_title(stage.stage), what, format_number(count))
        for stage in stages
        for what, count in sorted(stage.changed.items(), key=lambda one: (-one[1], one[0]))
    ]
    if not rows:
        return []
    return [
        build_tag("h3", "What was changed in documents that stay"),
        build_table(("stage", "what", "times"), rows, numeric=[2]),
    ]


def _build_funnel_figure(stages: tuple[FunnelStage, ...]) -> Figure:
    names = [format_title(stage.stage) for stage in stages]
    kept = plots.build_bars(names, [s.documents_out for s in stages], ["" for _ in stages], "documents")[0][0]
    gone_count = [s.documents_in - s.documents_out for s in stages]
    gone = plots.build_bars(names, gone_count, ["" for _ in stages], "documents", plots.ORANGE)[0][0]
    kept |= {"name": "kept", "hovertemplate": "%{y}: %{x:,} kept<extra></extra>"}
    gone |= {"name": "dropped here", "hovertemplate": "%{y}: %{x:,} dropped<extra></extra>"}
    layout = plots.build_bars_layout("documents") | {"barmode": "stack", "showlegend": True}
    height = plots.compute_bars_height(len(names), names)
    return Figure("plot-funnel", "What is left after each stage", [kept, gone], layout, height=height)


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
        "Which test dropped them",
        traces,
        layout,
        height=plots.compute_bars_height(len(counted), (name for name, _ in counted)),
    )


def _build_dropped_cell(stage: FunnelStage) -> Html:
    """Return the number dropped, with a small bar of its share."""
    gone = stage.documents_in - stage.documents_out
    share = 100 * gone / stage.documents_in if stage.documents_in else 0
    return build_tag(
        "span",
        f"{format_number(gone)} ",
        build_tag("span", format_percent(gone, stage.documents_in), class_="muted"),
        build_tag("span", build_tag("i", style=f"width:{share:.1f}%"), class_="meter", aria_hidden="true"),
    )


def _build_drop_details(stage: FunnelStage, drop: DropCount, borders: Sequence[ThresholdReport]) -> Html:
    """Return one test with examples: the documents nearest to its threshold where it has one."""
    summary = [
        build_tag("b", f"{format_title(drop.rule)}: {format_title(drop.test)}"),
        build_tag(
            "span",
            f" {format_number(drop.documents)} document{'' if drop.documents == 1 else 's'}, "
            f"{format_bytes(drop.bytes)}, "
            f"{format_percent(drop.documents, stage.documents_in)} of what came in",
            class_="muted",
        ),
    ]
    blocks = [build_threshold_block(border) for border in borders if border.dropped.documents]
    examples = blocks or [_build_example(example) for example in drop.examples]
    return build_details(summary, examples or build_tag("p", "No examples were kept.", class_="muted"))


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
    return [] if value is None else [(name, join_html(value if isinstance(value, str) else format_number(value)))]


def format_title(name: str) -> str:
    """Return a stage, rule or test name as a reader would write it: near_duplicates → near duplicates."""
    return name.replace("_", " ")


# --- Distributions ---


def _build_distributions_section(manifest: Manifest) -> ReportSection | None:
    figures: list[Figure] = []
    if manifest.languages:
        counts = plots.select_largest(((code, one.documents) for code, one in manifest.languages.items()), MAX_BARS)
        codes, values = [code for code, _ in counts], [value for _, value in counts]
        traces, layout = plots.build_bars(codes, values, [format_number(value) for value in values], "documents")
        caption = "All extracted documents, before the language filter."
        height = min(plots.compute_bars_height(len(counts)), 480)
        figures.append(Figure("plot-languages", "Languages", traces, layout, caption, height))
    if sum(manifest.lengths.counts):
        traces, layout = plots.build_histogram(
            manifest.lengths.edges, manifest.lengths.counts, "characters", "documents"
        )
        caption = f"{format_number(sum(manifest.lengths.counts))} kept documents."
        figures.append(Figure("plot-lengths", "Length of kept documents", traces, layout, caption, 320))
    if not figures:
        return None
    html = build_section(
        "distributions", "Languages and lengths", build_tag("div", [one.to_html() for one in figures], class_="grid")
    )
    return ReportSection("distributions", "Languages", html, figures)


# --- Reading ---


def _build_reading_section(manifest: Manifest) -> ReportSection | None:
    read = manifest.read
    skipped = sum(skip.count for skip in read.skipped)
    facts = (
        f"{format_number(read.files)} files, {format_number(read.records)} records, {describe_input(manifest)}; "
        f"{format_number(skipped)} records could not be used."
    )
    return build_report_section(
        "reading", "Reading", [], build_tag("p", facts), _build_skips_table(read.skipped) if read.skipped else None
    )


def _build_skips_table(skips: tuple[SkippedInput, ...]) -> Html:
    ordered = sorted(skips, key=lambda skip: (-skip.count, skip.file, skip.offset))
    rows = [
        (skip.reason, format_number(skip.count), skip.file, format_offset(skip)) for skip in ordered[:MAX_SKIP_ROWS]
    ]
    left = len(ordered) - len(rows)
    more = build_tag("p", f"{format_number(left)} more rows are in manifest.json.", class_="muted") if left else None
    head = ("why it was skipped", "records", "file", "first at")
    return build_tag("div", build_table(head, rows, numeric=[1, 3]), more)


# --- Where it came from ---


def build_dataset_origin(manifest: Manifest) -> list[Html]:
    """Fingerprints, splits and files of the dataset, as parts of the section on origins."""
    identity = build_definition_list(
        [
            ("dataset", manifest.name),
            ("fingerprint", build_tag("code", manifest.fingerprint)),
            ("configuration digest", build_tag("code", manifest.config_digest)),
            ("tokenizer fingerprint", build_tag("code", manifest.tokenizer_fingerprint or "–")),
        ]
    )
    splits = [
        (
            name,
            format_number(split.documents),
            format_number(split.tokens),
            format_bytes(split.bytes),
            format_number(len(split.files)),
        )
        for name, split in manifest.splits.items()
    ]
    files = [
        (
            file.name,
            format_number(file.rows),
            format_number(file.tokens),
            format_bytes(file.size),
            build_tag("code", file.digest),
        )
        for split in manifest.splits.values()
        for file in split.files
    ]
    blocks = [build_tag("h3", "Dataset"), identity]
    if splits:
        blocks.append(build_table(("split", "documents", "tokens", "text", "files"), splits, numeric=range(1, 5)))
        head = ("token file", "documents", "tokens", "size", "xxh3_128")
        blocks.append(build_details(f"{len(files)} token files", build_table(head, files, numeric=[1, 2, 3])))
    return blocks
