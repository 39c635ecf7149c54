"""Count the text of the elements of a page: characters, characters in links, and characters in paragraphs.

The counts are prefix sums over runs, so that the count of an element is the difference of two numbers. Boilerplate runs
(`extract.boilerplate`) count as empty.
"""

from itertools import accumulate

from data_pipeline.extract.boilerplate import BODY, PARAGRAPH, classify_attributes, mark_boilerplate_runs
from data_pipeline.extract.html_tree import HEADINGS, HtmlTree, parse_tree


class ElementStats:
    """A tree, the lengths of its runs, which of them are boilerplate (`out`), and prefix sums of the others."""

    def __init__(self, tree: HtmlTree, lengths: list[int], paragraphs: list[int], out: list[bool]) -> None:
        self.tree, self.lengths, self.out = tree, lengths, out
        self._characters = _compute_prefix_sums(lengths, out)
        self._linked = _compute_prefix_sums(tree.linked, out)
        self._paragraphs = _compute_prefix_sums(paragraphs, out)

    def count_characters(self, element: int) -> int:
        """Return the characters in an element."""
        return self._characters[self.tree.last[element]] - self._characters[self.tree.first[element]]

    def count_link_characters(self, element: int) -> int:
        """Return the characters in links in an element."""
        return self._linked[self.tree.last[element]] - self._linked[self.tree.first[element]]

    def count_paragraph_characters(self, element: int) -> int:
        """Return the characters in paragraphs in an element."""
        return self._paragraphs[self.tree.last[element]] - self._paragraphs[self.tree.first[element]]

    def is_body(self, element: int) -> bool:
        """Return whether an element is named as the one that holds the content and little else."""
        attributes = self.tree.attributes[element]
        return bool(attributes) and bool(classify_attributes(attributes) & BODY)


def parse_page(html: bytes) -> ElementStats:
    """Parse a page; the caller has checked its limits."""
    tree = parse_tree(html)
    lengths, paragraphs = _compute_run_lengths(tree)
    return ElementStats(tree, lengths, paragraphs, mark_boilerplate_runs(tree, lengths, paragraphs))


def _compute_run_lengths(tree: HtmlTree) -> tuple[list[int], list[int]]:
    """Return the characters of each run, and again only for paragraphs: long runs, not made of links, no headings."""
    lengths = list(map(len, tree.text))
    tag, runs = tree.tag, zip(lengths, tree.linked, tree.owner, strict=True)
    return lengths, [
        length if length >= PARAGRAPH and linked * 4 <= length and tag[owner] not in HEADINGS else 0
        for length, linked, owner in runs
    ]


def _compute_prefix_sums(counts: list[int], out: list[bool]) -> list[int]:
    """Return the sums of the counts before each run, without boilerplate, and the total."""
    return [0, *accumulate([0 if gone else count for count, gone in zip(counts, out, strict=True)])]
