"""Which runs of text stand in an element that is not content by its tag or name.

Reads a `HtmlTree`, the characters of its runs and those in paragraphs, gives a mark per run. Promises: an element that
holds a large share of the page, or most of its paragraphs, is never out for its name, and when names would leave next
to nothing, they are not believed.
"""

from itertools import accumulate

from data_pipeline.extract.hint import BODY, GUTTER, HIDDEN, MAIN, NOTHING, SIDE, classify_attributes
from data_pipeline.extract.tree import HtmlTree

PARAGRAPH = 80  # characters from which a run reads like a paragraph
_SAYS_SIDE = HIDDEN | GUTTER | SIDE
_SIDE_TAGS = frozenset(["footer", "menu", "figcaption", "aside", "form"])
_NEVER = frozenset(["#", "body", "html", "article", "main"])
_LARGEST_SIDE = 0.4  # of the characters of the page; what is larger is content, whatever it is called
_MOST_PARAGRAPHS = 0.5  # of the characters in paragraphs; what holds more is content, hidden until a program shows it
_LEAST_PARAGRAPHS = 400  # characters in paragraphs; with fewer, a notice at the foot may be most
_LARGEST_NAMED_MAIN = 0.15  # the same when a name speaks for the element as well
_ENOUGH = 250  # characters that have to be left, or names are believed less


def mark_boilerplate_runs(tree: HtmlTree, lengths: list[int], paragraphs: list[int]) -> list[bool]:
    """Mark the runs that are out, with less belief in names when little is left."""
    total = sum(lengths)
    for believe in (True, False):
        out = _mark_runs(tree, lengths, paragraphs, total, believe)
        if sum(length for length, gone in zip(lengths, out, strict=True) if not gone) >= min(_ENOUGH, total):
            return out
    return [False] * len(lengths)


def _mark_runs(tree: HtmlTree, lengths: list[int], paragraphs: list[int], total: int, believe: bool) -> list[bool]:
    """One pass over the elements; what is inside an element that is out is not looked at again."""
    out = [False] * len(lengths)
    before, paragraphs_before = [0, *accumulate(lengths)], [0, *accumulate(paragraphs)]
    most = max(paragraphs_before[-1] * _MOST_PARAGRAPHS, _LEAST_PARAGRAPHS)
    done = header_done = 0
    columns = zip(tree.tag, tree.attributes, tree.first, tree.last, strict=True)
    for tag, attributes, start, end in columns:
        if end <= start or end <= done:
            continue
        if tag == "header" and believe and end > header_done:
            header_done = end
            for run in range(start, end):
                if lengths[run] < PARAGRAPH or tree.linked[run] * 4 > lengths[run]:
                    out[run] = True
        said = classify_attributes(attributes) if attributes else NOTHING
        if not (said & _SAYS_SIDE or tag in _SIDE_TAGS) or tag in _NEVER:
            continue
        if tag not in _SIDE_TAGS and paragraphs_before[end] - paragraphs_before[start] > most:
            continue
        size = before[end] - before[start]
        if size <= total * _LARGEST_SIDE and _is_boilerplate(tag, said, size > total * _LARGEST_NAMED_MAIN, believe):
            out[start:end] = [True] * (end - start)
            done = end
    return out


def _is_boilerplate(tag: str, said: int, large: bool, believe: bool) -> bool:
    """Whether tag or name say that an element is not content."""
    if said & (HIDDEN | GUTTER):
        return True
    if not believe:
        return tag in ("footer", "menu")
    if tag in _SIDE_TAGS:
        return True
    return bool(said & SIDE) and not said & BODY and not (said & MAIN and large)
