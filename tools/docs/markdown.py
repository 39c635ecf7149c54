"""Markdown that the reference pages share: tables, code, and anchors."""

import re
from collections.abc import Iterable, Sequence


def format_code(text: object) -> str:
    """Return `text` as inline code that may stand in a table."""
    escaped = str(text).replace("|", "\\|").replace("\n", " ")
    return f"`` {escaped} ``" if "`" in escaped else f"`{escaped}`"


def format_text(text: str) -> str:
    """Return prose of a docstring or a field's description as Markdown of one line; `code` in it
    stays code.
    """
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    escaped = (
        part if part.startswith("`") else re.sub(r"([\\*_<>\[\]{}])", r"\\\1", part)
        for part in parts
    )
    return "".join(escaped).replace("|", "\\|")


def format_docstring(text: str | None) -> str:
    """Return the paragraphs of a docstring as Markdown; indented parts, such as attributes,
    become code.
    """
    paragraphs = re.split(r"\n\s*\n", (text or "").strip())
    return "\n\n".join(
        f"```text\n{paragraph}\n```"
        if re.search(r"^\s{4,}\S", paragraph, re.MULTILINE)
        else format_text(paragraph)
        for paragraph in paragraphs
    )


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; the cells are Markdown already."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def format_anchor(name: str) -> str:
    """Return the anchor of a class or kind, for headings such as `## Title {#anchor}`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
