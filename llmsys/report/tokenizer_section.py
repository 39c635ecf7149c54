"""Build the section about a tokenizer: its fit to each language, and the pieces that no document needs.

Reads the `usage` of a `Manifest`; returns None where there are no tokens.
"""

from collections.abc import Mapping

from llmsys.manifest import LanguageUsage, Manifest
from llmsys.report import plots
from llmsys.report.html_markup import build_details, build_table, build_tag, format_bytes, format_number, format_percent
from llmsys.report.plots import Figure
from llmsys.report.report_section import ReportSection, build_report_section

MAX_BARS = 24
HEAD = ("language", "documents", "text", "tokens", "bytes per token", "words per token", "unknown", "as bytes")


def build_tokenizer_section(manifest: Manifest) -> ReportSection | None:
    """Return bytes and words per token by language, unknowns, and unused pieces with examples."""
    usage = manifest.usage
    if usage is None or not usage.languages:
        return None
    rows = [_build_row(name, one) for name, one in usage.languages.items()]
    facts = (
        f"{format_number(usage.dead_pieces)} of {format_number(usage.pieces)} pieces occur in no document. "
        f"{format_number(usage.checked_documents)} documents were also encoded by the tokenizer library, with "
        "equal ids."
    )
    if usage.by_library:
        facts += f" The library encoded every document: {usage.by_library}."
    examples = [build_tag("code", piece.replace(" ", "␣")) for piece in usage.dead_examples]
    spaced = [one for example in examples for one in (example, " ")]
    dead = (
        build_details([f"the first {len(examples)} pieces that occur in no document"], build_tag("p", spaced))
        if examples
        else None
    )
    return build_report_section(
        "tokenizer",
        "Tokenizer",
        _build_figures(usage.languages),
        build_table(HEAD, rows, numeric=range(1, 8)),
        build_tag("p", facts),
        dead,
    )


def _build_figures(languages: Mapping[str, LanguageUsage]) -> list[Figure]:
    """Return bytes per token of the languages with the most text, longest tokens first; [] for a single language."""
    most = list(languages.items())[:MAX_BARS]  # the manifest has them in order of their bytes
    if len(most) < 2:
        return []
    found = sorted(((one.bytes / max(one.tokens, 1), name or "(none)") for name, one in most), reverse=True)
    values, names = [value for value, _ in found], [name for _, name in found]
    traces, layout = plots.build_bars(names, values, [f"{value:.2f}" for value in values], "bytes of text per token")
    caption = (
        "In UTF-8 a character takes one byte in Latin script, two in Greek, Cyrillic, Hebrew and Arabic, three in "
        "most other scripts."
    )
    if len(languages) > MAX_BARS:
        caption += f" The {MAX_BARS} languages with the most text; the table has all {len(languages)}."
    title = "Bytes per token by language"
    return [Figure("plot-tokenizer", title, traces, layout, caption, plots.compute_bars_height(len(names)))]


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
