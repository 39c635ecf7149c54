"""Measure lines that start with a bullet or end with an ellipsis, per dialect of Gopher's quality rule."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from data_pipeline.rules.document_batch import DocumentBatch, compute_share
from data_pipeline.rules.verdict import Floats


@dataclass(frozen=True)
class LineMarkDialect:
    """The lines, bullets and ellipses of a dialect.

    Attributes:
        bullets: prefixes that count as bullets.
        ellipses: suffixes that count as ellipses.
        lines: `splitlines` are Python's lines, stripped where marks are searched. `not blank` are stripped lines
            between newlines. `runs of newlines` keeps lines unchanged and counts an empty one at either end of the
            text.
    """

    bullets: tuple[str, ...]
    ellipses: tuple[str, ...]
    lines: Literal["splitlines", "not blank", "runs of newlines"]


def measure_line_marks(batch: DocumentBatch, marks: LineMarkDialect) -> dict[str, Floats]:
    """Return the shares of lines with a bullet and with an ellipsis."""
    lines_of = _LINES[marks.lines]
    documents = [lines_of(text) for text in batch.texts]
    strips = marks.lines == "splitlines"
    bullets = batch.to_counts(_count_bullet_lines(lines, marks.bullets, strips) for lines in documents)
    ellipses = batch.to_counts(
        _count_ellipsis_lines(lines, marks.ellipses, strips) if any(mark in text for mark in marks.ellipses) else 0
        for text, lines in zip(batch.texts, documents, strict=True)
    )
    counts = batch.to_counts(map(len, documents))
    return {"bullet_line_share": compute_share(bullets, counts), "ellipsis_line_share": compute_share(ellipses, counts)}


def split_at_newline_runs(text: str) -> list[str]:
    """Split a text at runs of newlines; a newline at either end of the text adds an empty line at the end."""
    lines = list(filter(None, text.split("\n")))
    lines += [""] * (text.startswith("\n") + text.endswith("\n"))
    return lines or [""]


def split_nonblank_lines(text: str) -> list[str]:
    """Return the stripped lines between newlines without the empty ones."""
    return list(filter(None, map(str.strip, text.split("\n"))))


_LINES: dict[str, Callable[[str], list[str]]] = {
    "splitlines": str.splitlines,
    "not blank": split_nonblank_lines,
    "runs of newlines": split_at_newline_runs,
}


def _count_bullet_lines(lines: list[str], bullets: tuple[str, ...], strips: bool) -> int:
    firsts = [line[:1] for line in (map(str.lstrip, lines) if strips else lines)]
    return sum(map(firsts.count, bullets))


def _count_ellipsis_lines(lines: list[str], ellipses: tuple[str, ...], strips: bool) -> int:
    return sum(line.endswith(ellipses) for line in (map(str.rstrip, lines) if strips else lines))
