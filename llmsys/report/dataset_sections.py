"""Build the sections about a dataset: funnel, languages, lengths, skipped records, files,
tokenizer.

Reads a `Manifest`; gives `ReportSection`s, the key numbers and the dataset's origin.

The tokenizer's section shows its fit to each language, and the pieces that no document needs.

Invariants:
- Text of a crawled page is escaped.
- Every rule that dropped documents is shown with its value and threshold.
"""

from collections.abc import Mapping

from markupsafe import Markup

from llmsys.dataset.manifest import LanguageUsage, Manifest, SkippedInput
from llmsys.report import plots
from llmsys.report.contamination_section import build_contamination_section
from llmsys.report.funnel_section import build_funnel_section, describe_input, format_offset
from llmsys.report.html_markup import (
    build_details,
    build_paragraph,
    build_table,
    format_amount,
    format_bytes,
    format_number,
    format_percent,
    render_template,
)
from llmsys.report.plots import Figure
from llmsys.report.report_section import Numbers, ReportSection

MAX_TOKENIZER_BARS = 24
CODE = Markup("<code>{}</code>")
HEAD = (
    "language",
    "documents",
    "text",
    "tokens",
    "bytes per token",
    "words per token",
    "unknown",
    "as bytes",
)


def build_tokenizer_section(manifest: Manifest) -> ReportSection | None:
    """Return bytes and words per token by language, unknowns, and unused pieces with examples."""
    usage = manifest.usage
    if usage is None or not usage.languages:
        return None
    rows = [_build_row(name, one) for name, one in usage.languages.items()]
    facts = (
        f"{format_number(usage.dead_pieces)} of {format_number(usage.pieces)} pieces occur in no "
        f"document. {format_number(usage.checked_documents)} documents were also encoded by the "
        "tokenizer library, with equal ids."
    )
    if usage.by_library:
        facts += f" The library encoded every document: {usage.by_library}."
    content = [build_table(HEAD, rows, numeric=range(1, len(HEAD))), build_paragraph(facts)]
    if usage.dead_examples:
        pieces = [CODE.format(piece.replace(" ", "␣")) for piece in usage.dead_examples]
        content.append(
            build_details(
                f"the first {len(pieces)} pieces that occur in no document",
                build_paragraph(Markup(" ").join(pieces)),
            )
        )
    return ReportSection("tokenizer", "Tokenizer", content, _build_figures(usage.languages))


def _build_figures(languages: Mapping[str, LanguageUsage]) -> list[Figure]:
    """Return bytes per token of the languages with the most text, longest tokens first; [] for a
    single language.
    """
    # the manifest has them in order of their bytes
    most = list(languages.items())[:MAX_TOKENIZER_BARS]
    if len(most) < 2:
        return []
    found = sorted(
        ((one.bytes / max(one.tokens, 1), name or "(none)") for name, one in most), reverse=True
    )
    values, names = [value for value, _ in found], [name for _, name in found]
    traces, layout = plots.build_bars(
        names, values, [f"{value:.2f}" for value in values], "bytes of text per token"
    )
    caption = (
        "In UTF-8 a character takes one byte in Latin script, two in Greek, Cyrillic, Hebrew and "
        "Arabic, three in most other scripts."
    )
    if len(languages) > MAX_TOKENIZER_BARS:
        caption += (
            f" The {MAX_TOKENIZER_BARS} languages with the most text; the table has all "
            f"{len(languages)}."
        )
    title = "Bytes per token by language"
    return [
        Figure(
            "plot-tokenizer", title, traces, layout, caption, plots.compute_bars_height(len(names))
        )
    ]


def _build_row(name: str, one: LanguageUsage) -> tuple[str, ...]:
    tokens = max(one.tokens, 1)
    return (
        name or "(none)",
        format_number(one.documents),
        format_bytes(one.bytes),
        format_number(one.tokens),
        f"{one.bytes / tokens:.2f}",
        f"{one.words / tokens:.2f}",
        format_percent(one.unknown_tokens, tokens),
        format_percent(one.byte_tokens, tokens),
    )


MAX_BARS = 20
MAX_SKIP_ROWS = 100


def build_dataset_numbers(manifest: Manifest) -> Numbers:
    """Return the key numbers of a dataset."""
    numbers: Numbers = []
    if manifest.funnel:
        first, last = manifest.funnel[0], manifest.funnel[-1]
        remark = (
            f"{format_percent(last.documents_out, first.documents_in)} of "
            f"{format_number(first.documents_in)}"
        )
        numbers.append(("documents kept", format_number(last.documents_out), remark))
        numbers.append(
            ("clean text", format_bytes(last.bytes_out), f"from {describe_input(manifest)}")
        )
    tokens = sum(split.tokens for split in manifest.splits.values())
    if tokens:
        text = sum(split.bytes for split in manifest.splits.values())
        numbers.append(("tokens", format_amount(tokens), f"{text / tokens:.2f} bytes per token"))
    if manifest.answers:
        amount = sum(manifest.answers.values())
        numbers.append(
            (
                "answer tokens",
                format_amount(amount),
                f"{format_percent(amount, tokens)} of all, with a loss",
            )
        )
    if manifest.vocab_size:
        numbers.append(
            ("vocabulary", format_number(manifest.vocab_size), str(manifest.token_dtype))
        )
    return numbers


def list_missing_notes(manifest: Manifest) -> list[str]:
    """Return notes on parts that are missing, with the reason and the next step."""
    notes = []
    if not manifest.splits:
        notes.append(
            "No token files yet: only documents were prepared. `llmsys prepare CONFIG` continues "
            "with tokens."
        )
    if manifest.funnel and not manifest.funnel[-1].documents_out:
        notes.append("No documents were kept; the funnel shows which rules dropped them.")
    return notes


def build_dataset_sections(manifest: Manifest) -> list[ReportSection]:
    """Return the sections of a dataset that have something to show."""
    about_text = [
        build_funnel_section(manifest),
        build_contamination_section(manifest),
        _build_distributions_section(manifest),
    ]
    parts = [*about_text, build_tokenizer_section(manifest), _build_reading_section(manifest)]
    return [one for one in parts if one is not None]


# --- Distributions ---


def _build_distributions_section(manifest: Manifest) -> ReportSection | None:
    figures: list[Figure] = []
    if manifest.languages:
        counts = plots.select_largest(
            ((code, one.documents) for code, one in manifest.languages.items()), MAX_BARS
        )
        codes, values = [_shorten_code(code) for code, _ in counts], [value for _, value in counts]
        traces, layout = plots.build_bars(
            codes, values, [format_number(value) for value in values], "documents"
        )
        caption = "All extracted documents, before the language filter."
        height = plots.compute_bars_height(len(counts), codes)
        figures.append(Figure("plot-languages", "Languages", traces, layout, caption, height))
    if sum(manifest.lengths.counts):
        traces, layout = plots.build_histogram(
            manifest.lengths.edges, manifest.lengths.counts, "characters", "documents"
        )
        caption = f"{format_number(sum(manifest.lengths.counts))} kept documents."
        figures.append(
            Figure("plot-lengths", "Length of kept documents", traces, layout, caption, 320)
        )
    if not figures:
        return None
    return ReportSection(
        "distributions", "Languages", figures=figures, heading="Languages and lengths", num_large=0
    )


def _shorten_code(code: str) -> str:
    """Return the name of a language that fits two lines of a label; a model of one's own can
    name them anyhow.
    """
    most = 2 * plots.LABEL_CHARACTERS
    return code if len(code) <= most else f"{code[: most - 1]}…"


# --- Reading ---


def _build_reading_section(manifest: Manifest) -> ReportSection | None:
    read = manifest.read
    skipped = sum(skip.count for skip in read.skipped)
    facts = (
        f"Files: {format_number(read.files)}, records: {format_number(read.records)}, "
        f"{describe_input(manifest)}; records that could not be used: {format_number(skipped)}."
    )
    skips = _build_skips_table(read.skipped) if read.skipped else []
    return ReportSection("reading", "Reading", [build_paragraph(facts), *skips])


def _build_skips_table(skips: tuple[SkippedInput, ...]) -> list[Markup]:
    ordered = sorted(skips, key=lambda skip: (-skip.count, skip.file, skip.offset))
    rows = [
        (skip.reason, format_number(skip.count), skip.file, format_offset(skip))
        for skip in ordered[:MAX_SKIP_ROWS]
    ]
    blocks = [build_table(("reason", "records", "file", "first at"), rows, numeric=[1, 3])]
    if left := len(ordered) - len(rows):
        remark = f"{format_number(left)} more rows are in manifest.json."
        blocks.append(build_paragraph(remark, is_muted=True))
    return blocks


# --- Where it came from ---


def build_dataset_origin(manifest: Manifest) -> Markup:
    """Return fingerprints, splits and files of the dataset, for the section on origins."""
    splits = [
        (
            name,
            format_number(split.documents),
            format_number(split.tokens),
            format_bytes(split.bytes),
            format_number(split.num_files),
        )
        for name, split in manifest.splits.items()
    ]
    # An index has no size.
    files = [
        (file.name, file.rows, file.tokens, format_bytes(file.size), file.digest)
        for split in manifest.splits.values()
        for file in split.files
    ]
    files += [
        (split.index.name, split.documents, split.tokens, "", split.index.digest)
        for split in manifest.splits.values()
        if split.index is not None
    ]
    return render_template(
        "dataset_origin.html",
        manifest=manifest,
        splits=splits,
        num_files=sum(split.num_files for split in manifest.splits.values()),
        files=[
            (name, format_number(rows), format_number(tokens), size, CODE.format(digest))
            for name, rows, tokens, size, digest in files
        ],
    )
