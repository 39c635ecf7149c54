"""What the page says about a tokenizer: how well it fits each language, and the pieces that no document needs.

Reads the `usage` of a `Manifest`; gives a `Part`, or none where there are no tokens.
"""

from llmsys.manifest import LanguageUsage, Manifest
from llmsys.report.markup import bytes_amount, fold, number, percent, table, tag
from llmsys.report.run_sections import Part, part

HEAD = ("language", "documents", "text", "tokens", "bytes per token", "words per token", "unknown", "as bytes")


def tokenizer_part(manifest: Manifest) -> Part | None:
    """Bytes and words per token by language, unknowns, and dead pieces with examples."""
    usage = manifest.usage
    if usage is None or not usage.languages:
        return None
    rows = [_row(name, one) for name, one in usage.languages.items()]
    facts = (
        f"{number(usage.dead_pieces)} of {number(usage.pieces)} pieces are in no document. "
        f"{number(usage.checked_documents)} documents were encoded a second time by the tokenizer's library, "
        f"with the same ids."
    )
    if usage.by_library:
        facts += f" The library encoded every document: {usage.by_library}."
    examples = [tag("code", piece.replace(" ", "␣")) for piece in usage.dead_examples]
    spaced = [one for example in examples for one in (example, " ")]
    dead = fold([f"the first {len(examples)} of the pieces in no document"], tag("p", spaced)) if examples else None
    return part("tokenizer", "Tokenizer", [], table(HEAD, rows, numeric=range(1, 8)), tag("p", facts), dead)


def _row(name: str, one: LanguageUsage) -> tuple[str, ...]:
    tokens = max(one.tokens, 1)
    return (
        name or "(none)",
        number(one.documents),
        bytes_amount(one.bytes),
        number(one.tokens),
        f"{one.bytes / tokens:.2f}",
        f"{one.words / tokens:.2f}",
        percent(one.unknown_tokens, tokens),
        percent(one.byte_tokens, tokens),
    )
