"""Lines that start with a bullet or end with an ellipsis, as the dialects of Gopher's quality rule count them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from data_pipeline.rules.document_batch import DocumentBatch, compute_share
from data_pipeline.rules.verdict import Floats


@dataclass(frozen=True)
class LineMarkDialect:
    """What a dialect takes for a line, a bullet and an ellipsis.

    `splitlines` are Python's lines, stripped where marks are looked for; `not blank` are stripped lines between
    newlines; `runs of newlines` leaves lines as they are, and an empty one at an end of the text counts.
    """

    bullets: tuple[str, ...]
    ellipses: tuple[str, ...]
    lines: Literal["splitlines", "not blank", "runs of newlines"]


def measure_line_marks(batch: DocumentBatch, marks: LineMarkDialect) -> dict[str, Floats]:
    """Shares of the lines with a bullet and with an ellipsis."""
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
    """The text split at runs of newlines; a newline at an end of the text leaves an empty line, given last."""
    lines = list(filter(None, text.split("\n")))
    lines += [""] * (text.startswith("\n") + text.endswith("\n"))
    return lines or [""]


def split_nonblank_lines(text: str) -> list[str]:
    """Stripped lines between newlines, without those of which nothing is left."""
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
