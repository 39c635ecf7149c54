"""A page by what its elements hold: how much text, how much of it in links, how much that reads like paragraphs.

Reads a `HtmlTree`, gives a `ElementStats` with sums over runs, so that what an element holds is the difference of two
numbers. Runs that stand in what is not content by tag or name (`extract.side`) are out, and count for nothing.
"""

from itertools import accumulate

from data_pipeline.extract.boilerplate import BODY, PARAGRAPH, classify_attributes, mark_boilerplate_runs
from data_pipeline.extract.html_tree import HEADINGS, HtmlTree, parse_tree


class ElementStats:
    """A tree, the lengths of its runs, which of them are out, and sums over the others."""

    def __init__(self, tree: HtmlTree, lengths: list[int], paragraphs: list[int], out: list[bool]) -> None:
        self.tree, self.lengths, self.out = tree, lengths, out
        self._characters = _compute_prefix_sums(lengths, out)
        self._linked = _compute_prefix_sums(tree.linked, out)
        self._paragraphs = _compute_prefix_sums(paragraphs, out)

    def count_characters(self, element: int) -> int:
        """Characters in an element."""
        return self._characters[self.tree.last[element]] - self._characters[self.tree.first[element]]

    def count_link_characters(self, element: int) -> int:
        """Characters in links in an element."""
        return self._linked[self.tree.last[element]] - self._linked[self.tree.first[element]]

    def count_paragraph_characters(self, element: int) -> int:
        """Characters in paragraphs in an element."""
        return self._paragraphs[self.tree.last[element]] - self._paragraphs[self.tree.first[element]]

    def is_body(self, element: int) -> bool:
        """Whether the name of an element says that it holds the content and little else."""
        attributes = self.tree.attributes[element]
        return bool(attributes) and bool(classify_attributes(attributes) & BODY)


def parse_page(html: bytes) -> ElementStats:
    """Read a page; limits are the caller's to check."""
    tree = parse_tree(html)
    lengths, paragraphs = _compute_run_lengths(tree)
    return ElementStats(tree, lengths, paragraphs, mark_boilerplate_runs(tree, lengths, paragraphs))


def _compute_run_lengths(tree: HtmlTree) -> tuple[list[int], list[int]]:
    """The characters of each run, and again where it reads like a paragraph: long, not made of links, no heading."""
    lengths = list(map(len, tree.text))
    tag, runs = tree.tag, zip(lengths, tree.linked, tree.owner, strict=True)
    return lengths, [
        length if length >= PARAGRAPH and linked * 4 <= length and tag[owner] not in HEADINGS else 0
        for length, linked, owner in runs
    ]


def _compute_prefix_sums(counts: list[int], out: list[bool]) -> list[int]:
    """The sum of what is not out before each run, and of all."""
    return [0, *accumulate([0 if gone else count for count, gone in zip(counts, out, strict=True)])]
