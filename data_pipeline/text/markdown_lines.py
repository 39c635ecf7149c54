"""Remove from Markdown what rules removed from the text form of the same document.

Rules see texts. Some remove lines, others cut words out of them. A line of the text form is in a
line of the Markdown, in the same order (`extract.markdown_layout`), so that each line of the
Markdown is kept, cut or removed with its text.

Invariants:
- Time is linear in the lines, but for runs of lines that were cut.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

# What Markdown adds to a line: marks of headings, lists, tables and code, escapes, indentation.
_MARKS = re.compile(r"[\s|\\#`-]+")
_FENCE = re.compile(r"\s*(?:(?:-|-?\d+\.) )*`{3,}[^`]*")
_SEPARATOR = re.compile(r"\s*\|(?: --- \|)+")
_MOST_SKIPPED: Final = 8  # lines of the text form without a line of Markdown
_MOST_CUT: Final = 64  # lines in a row that are compared letter by letter


def apply_line_changes(before: str, after: str, markdown: str) -> str:
    """Remove and cut lines of Markdown as rules did in its text form.

    Args:
        before: The text form as it was extracted.
        after: The text form as the rules left it.
        markdown: The document as Markdown.

    Returns:
        The Markdown with what is left; blocks of code without lines are removed.
    """
    if before == after:
        return markdown
    # Lines of marks alone are not told from those that Markdown added: they stay.
    old, reduced = _reduce_lines(before)
    kept = _match_lines(old, _reduce_lines(after)[0])
    written: list[str] = []
    position = 0
    for line in markdown.split("\n"):
        parts = _find_parts(_MARKS.sub("", line), reduced, position)
        if parts:
            position = parts[-1] + 1
        left = [kept[part] for part in parts]
        if all(each is not None for each in left):
            written.append(_cut_line(line, [old[part] for part in parts], left))
        elif any(each is not None for each in left):
            # a row of a table, some of whose cells were lines of their own
            written.append(line)
    return _remove_empty_blocks(written)


def _reduce_lines(text: str) -> tuple[list[str], list[str]]:
    """Return the lines of a text without white space around them, and without marks."""
    lines = [line.strip() for line in text.split("\n")]
    reduced = [_MARKS.sub("", line) for line in lines]
    both = [pair for pair in zip(lines, reduced, strict=True) if pair[1]]
    return [line for line, _ in both], [content for _, content in both]


def _find_parts(content: str, reduced: Sequence[str], position: int) -> list[int]:
    """Return the lines of the text form that are in a line of Markdown, both without marks; none
    for a line that Markdown added.
    """
    parts: list[int] = []
    place = 0
    for number in range(position, len(reduced)):
        found = content.find(reduced[number], place) if place < len(content) else -1
        if found < 0:
            break
        parts.append(number)
        place = found + len(reduced[number])
    if not parts and content:
        # Normalization may have changed a line in one of the forms.
        for number in range(position, min(len(reduced), position + _MOST_SKIPPED)):
            if reduced[number] == content:
                return [number]
    return parts


def _cut_line(line: str, old: Sequence[str], new: Sequence[str | None]) -> str:
    """Return a line with its parts as rules left them."""
    for was, now in zip(old, new, strict=True):
        if now is not None and was != now:
            line = line.replace(was, now, 1)
    return line


def _match_lines(old: Sequence[str], new: Sequence[str]) -> list[str | None]:
    """Return for each old line what is left of it, None where it was removed."""
    places: dict[str, list[int]] = {}
    for number, line in enumerate(old):
        places.setdefault(line, []).append(number)
    kept: list[str | None] = [None] * len(old)
    # Lines that were only kept or removed are found by their whole text, cut ones between them.
    matched: list[tuple[int, int]] = [(-1, -1)]
    for number, line in enumerate(new):
        found = places.get(line, ())
        place = bisect_left(found, matched[-1][0] + 1)
        if place < len(found):
            kept[found[place]] = line
            matched.append((found[place], number))
    matched.append((len(old), len(new)))
    for (old_start, new_start), (old_end, new_end) in pairwise(matched):
        start = old_start + 1
        for line in new[new_start + 1 : new_end]:
            for number in range(start, min(old_end, start + _MOST_CUT)):
                if _is_cut_from(line, old[number]):
                    kept[number] = line
                    start = number + 1
                    break
    return kept


def _is_cut_from(new: str, old: str) -> bool:
    """Return whether a line is another one without some of its characters."""
    characters = iter(old)
    return all(character in characters for character in new)


def _remove_empty_blocks(lines: Sequence[str]) -> str:
    """Return the lines without fences around nothing, separators without a header, and more than
    one blank line in a row.
    """
    written: list[str] = []
    opened = ""  # the fence of the code that the next line belongs to
    begin = 0  # lines before it
    has_code = False
    for line in lines:
        is_fence = _FENCE.fullmatch(line) is not None
        if is_fence and not opened:
            opened = "`" * line.count("`")
            begin = len(written)
            has_code = False
        elif opened and line.strip() == opened:
            opened = ""
            if not has_code:
                del written[begin:]
                continue
        elif opened:
            has_code = has_code or bool(line.strip())
        elif _SEPARATOR.fullmatch(line) and not (written and "|" in written[-1]):
            continue
        if line.strip() or opened or not written or written[-1].strip():
            written.append(line)
    return "\n".join(written).strip("\n")
