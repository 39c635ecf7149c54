"""A page by what its elements hold: how much text, how much of it in links, how much that reads like paragraphs.

Reads a `Tree`, gives a `Page` with sums over runs, so that what an element holds is the difference of two numbers.
Runs that stand in what is not content by tag or name (`extract.side`) are out, and count for nothing.
"""

from itertools import accumulate

from data_pipeline.extract.hint import BODY, hint
from data_pipeline.extract.side import side_runs, side_runs_if_emptied
from data_pipeline.extract.tree import HEADINGS, Tree, read_tree

PARAGRAPH = 80  # characters from which a run reads like a paragraph


class Page:
    """A tree, the lengths of its runs, which of them are out, and sums over the others."""

    def __init__(self, tree: Tree, lengths: list[int], out: list[bool]) -> None:
        self.tree, self.lengths, self.out = tree, lengths, out
        self._characters = [0, *accumulate([0 if gone else length for length, gone in zip(lengths, out, strict=True)])]
        self._linked = [0, *accumulate([0 if gone else count for count, gone in zip(tree.linked, out, strict=True)])]
        self._paragraphs = [
            0,
            *accumulate([length if self._is_paragraph(run) else 0 for run, length in enumerate(lengths)]),
        ]

    def _is_paragraph(self, run: int) -> bool:
        """Whether a run is long, not out, not made of links, and no heading."""
        length = self.lengths[run]
        if length < PARAGRAPH or self.out[run] or self.tree.linked[run] * 4 > length:
            return False
        return self.tree.tag[self.tree.owner[run]] not in HEADINGS

    def size(self, element: int) -> int:
        """Characters in an element."""
        return self._characters[self.tree.last[element]] - self._characters[self.tree.first[element]]

    def links(self, element: int) -> int:
        """Characters in links in an element."""
        return self._linked[self.tree.last[element]] - self._linked[self.tree.first[element]]

    def paragraphs(self, element: int) -> int:
        """Characters in paragraphs in an element."""
        return self._paragraphs[self.tree.last[element]] - self._paragraphs[self.tree.first[element]]

    def is_body(self, element: int) -> bool:
        """Whether the name of an element says that it holds the content and little else."""
        attributes = self.tree.attributes[element]
        return bool(attributes) and bool(hint(attributes) & BODY)


def read_page(html: bytes) -> Page:
    """Read a page; footers and asides, which are many, are read only where they may be content."""
    tree = read_tree(html, empty_sides=True)
    lengths = list(map(len, tree.text))
    out = side_runs_if_emptied(tree, lengths)
    if out is None:
        tree = read_tree(html)
        lengths = list(map(len, tree.text))
        out = side_runs(tree, lengths)
    return Page(tree, lengths, out)
