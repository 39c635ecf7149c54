"""What the page says about a dataset: the funnel with its reasons, languages, lengths, what could not be read, files.

Reads a `Manifest`; gives `Part`s, the key numbers and the dataset's origin. Promises: every text of a crawled page is
shown as text, and every dropped document's rule with its value and threshold.
"""

from collections.abc import Sequence

from llmsys.manifest import Drop, Example, FunnelStage, Manifest, Skip
from llmsys.report import plots
from llmsys.report.contamination import contamination_part
from llmsys.report.input_units import describe_funnel_bytes, describe_input, format_offset
from llmsys.report.markup import (
    Html,
    amount,
    bytes_amount,
    definitions,
    fold,
    join,
    number,
    percent,
    section,
    table,
    tag,
    user_text,
)
from llmsys.report.plots import Figure
from llmsys.report.run_sections import Numbers, Part, part
from llmsys.report.threshold_sections import border_block, early_exit_note, silent_tests
from llmsys.report.tokenizer_usage import tokenizer_part
from llmsys.threshold import Border

MAX_BARS = 20
MAX_SKIP_ROWS = 100


def dataset_numbers(manifest: Manifest) -> Numbers:
    """The numbers a reader looks for first."""
    numbers: Numbers = []
    if manifest.funnel:
        first, last = manifest.funnel[0], manifest.funnel[-1]
        remark = f"{percent(last.documents_out, first.documents_in)} of {number(first.documents_in)}"
        numbers.append(("documents kept", number(last.documents_out), remark))
        numbers.append(("clean text", bytes_amount(last.bytes_out), f"from {describe_input(manifest)}"))
    tokens = sum(split.tokens for split in manifest.splits.values())
    if tokens:
        text = sum(split.bytes for split in manifest.splits.values())
        numbers.append(("tokens", amount(tokens), f"{text / tokens:.2f} bytes per token"))
    if manifest.vocab_size:
        numbers.append(("vocabulary", number(manifest.vocab_size), str(manifest.token_dtype)))
    return numbers


def dataset_notes(manifest: Manifest) -> list[str]:
    """What a reader would look for and not find, with the reason."""
    notes = []
    if not manifest.splits:
        notes.append("No token files yet: only documents were prepared. `llmsys prepare CONFIG` goes on to tokens.")
    if manifest.funnel and not manifest.funnel[-1].documents_out:
        notes.append("Not one document was kept; the funnel says which rule dropped them.")
    return notes


def dataset_parts(manifest: Manifest) -> list[Part]:
    """All parts of a dataset that have something to show."""
    about_text = [_funnel(manifest), contamination_part(manifest), _distributions(manifest)]
    parts = [*about_text, tokenizer_part(manifest), _reading(manifest)]
    return [one for one in parts if one is not None]


# --- Funnel ---


def _funnel(manifest: Manifest) -> Part | None:
    stages = manifest.funnel
    if not stages:
        return None
    figures = [_funnel_figure(stages)]
    drops = [(stage, drop) for stage in stages for drop in stage.dropped]
    if drops:
        figures.append(_drops_figure([drop for _, drop in drops]))
    rows = [
        (
            tag("b", title(stage.stage)),
            number(stage.documents_in),
            number(stage.documents_out),
            _dropped(stage),
            bytes_amount(stage.bytes_in),
            bytes_amount(stage.bytes_out),
        )
        for stage in stages
    ]
    head = ("stage", "documents in", "documents out", "dropped", "bytes in", "bytes out")
    note = tag("p", describe_funnel_bytes(manifest), class_="muted")
    numbers = table(head, rows, numeric=range(1, 6))
    return part("funnel", "Funnel", figures, numbers, note, *_changes(stages), *_reasons(drops, manifest.borders))


def _reasons(drops: Sequence[tuple[FunnelStage, Drop]], borders: Sequence[Border]) -> list[Html | None]:
    """Every test that dropped documents, with examples; then those that dropped none."""
    if not drops:
        return [silent_tests(borders)]
    tests = [
        _drop(stage, drop, [one for one in borders if (one.rule, one.test) == (drop.rule, drop.test)])
        for stage, drop in drops
    ]
    note = early_exit_note() if borders else None
    return [tag("h3", "Why documents were dropped"), note, *tests, silent_tests(borders)]


def _changes(stages: tuple[FunnelStage, ...]) -> list[Html]:
    """What was changed in the documents that stay, counted by what was done."""
    rows = [
        (title(stage.stage), what, number(count))
        for stage in stages
        for what, count in sorted(stage.changed.items(), key=lambda one: (-one[1], one[0]))
    ]
    if not rows:
        return []
    return [tag("h3", "What was changed in documents that stay"), table(("stage", "what", "times"), rows, numeric=[2])]


def _funnel_figure(stages: tuple[FunnelStage, ...]) -> Figure:
    names = [title(stage.stage) for stage in stages]
    kept = plots.bars(names, [s.documents_out for s in stages], ["" for _ in stages], "documents")[0][0]
    gone_count = [s.documents_in - s.documents_out for s in stages]
    gone = plots.bars(names, gone_count, ["" for _ in stages], "documents", plots.ORANGE)[0][0]
    kept |= {"name": "kept", "hovertemplate": "%{y}: %{x:,} kept<extra></extra>"}
    gone |= {"name": "dropped here", "hovertemplate": "%{y}: %{x:,} dropped<extra></extra>"}
    layout = plots.lying("documents") | {"barmode": "stack", "showlegend": True}
    height = plots.bars_height(len(names), names)
    return Figure("plot-funnel", "What is left after each stage", [kept, gone], layout, height=height)


def _drops_figure(drops: list[Drop]) -> Figure:
    counted = plots.largest(((f"{title(d.rule)}: {title(d.test)}", d.documents) for d in drops), MAX_BARS)
    traces, layout = plots.bars(
        [name for name, _ in counted],
        [value for _, value in counted],
        [number(value) for _, value in counted],
        "documents dropped",
        plots.ORANGE,
    )
    return Figure(
        "plot-drops",
        "Which test dropped them",
        traces,
        layout,
        height=plots.bars_height(len(counted), (name for name, _ in counted)),
    )


def _dropped(stage: FunnelStage) -> Html:
    """The number dropped, with a small bar of its share."""
    gone = stage.documents_in - stage.documents_out
    share = 100 * gone / stage.documents_in if stage.documents_in else 0
    return tag(
        "span",
        f"{number(gone)} ",
        tag("span", percent(gone, stage.documents_in), class_="muted"),
        tag("span", tag("i", style=f"width:{share:.1f}%"), class_="meter", aria_hidden="true"),
    )


def _drop(stage: FunnelStage, drop: Drop, borders: Sequence[Border]) -> Html:
    """One test with examples: the documents nearest to its threshold where it has one."""
    summary = [
        tag("b", f"{title(drop.rule)}: {title(drop.test)}"),
        tag(
            "span",
            f" {number(drop.documents)} document{'' if drop.documents == 1 else 's'}, {bytes_amount(drop.bytes)}, "
            f"{percent(drop.documents, stage.documents_in)} of what came in",
            class_="muted",
        ),
    ]
    blocks = [border_block(border) for border in borders if border.dropped.documents]
    examples = blocks or [_example(example) for example in drop.examples]
    return fold(summary, examples or tag("p", "No examples were kept.", class_="muted"))


def _example(example: Example) -> Html:
    values = [*_value("value", example.value), *_value("threshold", example.threshold), ("page", join(example.url))]
    return tag(
        "div", tag("p", tag("b", example.reason)), definitions(values), user_text(example.excerpt), class_="example"
    )


def _value(name: str, value: float | str | None) -> list[tuple[str, Html]]:
    return [] if value is None else [(name, join(value if isinstance(value, str) else number(value)))]


def title(name: str) -> str:
    """A stage, rule or test name as a reader would write it: near_duplicates → near duplicates."""
    return name.replace("_", " ")


# --- Distributions ---


def _distributions(manifest: Manifest) -> Part | None:
    figures: list[Figure] = []
    if manifest.languages:
        counts = plots.largest(((code, one.documents) for code, one in manifest.languages.items()), MAX_BARS)
        codes, values = [code for code, _ in counts], [value for _, value in counts]
        traces, layout = plots.bars(codes, values, [number(value) for value in values], "documents")
        caption = "All extracted documents, before the language filter."
        height = min(plots.bars_height(len(counts)), 480)
        figures.append(Figure("plot-languages", "Languages", traces, layout, caption, height))
    if sum(manifest.lengths.counts):
        traces, layout = plots.histogram(manifest.lengths.edges, manifest.lengths.counts, "characters", "documents")
        caption = f"{number(sum(manifest.lengths.counts))} kept documents."
        figures.append(Figure("plot-lengths", "Length of kept documents", traces, layout, caption, 320))
    if not figures:
        return None
    html = section("distributions", "Languages and lengths", tag("div", [one.html() for one in figures], class_="grid"))
    return Part("distributions", "Languages", html, figures)


# --- Reading ---


def _reading(manifest: Manifest) -> Part | None:
    read = manifest.read
    skipped = sum(skip.count for skip in read.skipped)
    facts = (
        f"{number(read.files)} files, {number(read.records)} records, {describe_input(manifest)}; "
        f"{number(skipped)} records could not be used."
    )
    return part("reading", "Reading", [], tag("p", facts), _skips(read.skipped) if read.skipped else None)


def _skips(skips: tuple[Skip, ...]) -> Html:
    ordered = sorted(skips, key=lambda skip: (-skip.count, skip.file, skip.offset))
    rows = [(skip.reason, number(skip.count), skip.file, format_offset(skip)) for skip in ordered[:MAX_SKIP_ROWS]]
    left = len(ordered) - len(rows)
    more = tag("p", f"{number(left)} more rows are in manifest.json.", class_="muted") if left else None
    head = ("why it was skipped", "records", "file", "first at")
    return tag("div", table(head, rows, numeric=[1, 3]), more)


# --- Where it came from ---


def dataset_origin(manifest: Manifest) -> list[Html]:
    """Fingerprints, splits and files of the dataset, as parts of the section on origins."""
    identity = definitions(
        [
            ("dataset", manifest.name),
            ("fingerprint", tag("code", manifest.fingerprint)),
            ("configuration digest", tag("code", manifest.config_digest)),
            ("tokenizer fingerprint", tag("code", manifest.tokenizer_fingerprint or "–")),
        ]
    )
    splits = [
        (name, number(split.documents), number(split.tokens), bytes_amount(split.bytes), number(len(split.files)))
        for name, split in manifest.splits.items()
    ]
    files = [
        (file.name, number(file.rows), number(file.tokens), bytes_amount(file.size), tag("code", file.digest))
        for split in manifest.splits.values()
        for file in split.files
    ]
    blocks = [tag("h3", "Dataset"), identity]
    if splits:
        blocks.append(table(("split", "documents", "tokens", "text", "files"), splits, numeric=range(1, 5)))
        head = ("token file", "documents", "tokens", "size", "xxh3_128")
        blocks.append(fold(f"{len(files)} token files", table(head, files, numeric=[1, 2, 3])))
    return blocks
