"""Find the element that holds the main content of a page.

Each run that reads like a sentence adds weight to the elements around it, less to the farther ones.
The element with the most weight is the root (an idea of Readability, Arc90 2009). The root grows to
an enclosing element as long as that adds much text in paragraphs.

`ElementStats` counts the characters of each element, in all, in links and in paragraphs. The counts
are prefix sums over runs, so that the count of an element is the difference of two numbers.
Boilerplate runs (`extract.boilerplate`) count as empty."""

import re
from itertools import accumulate

from llmsys.data_pipeline.extract.boilerplate import (
    BODY,
    PARAGRAPH,
    classify_attributes,
    mark_boilerplate_runs,
)
from llmsys.data_pipeline.extract.html_tree import HEADINGS, HtmlTree, parse_tree


class ElementStats:
    """A tree, the lengths of its runs, which of them are boilerplate (`out`), and prefix sums of
    the others.
    """

    def __init__(
        self, tree: HtmlTree, lengths: list[int], paragraphs: list[int], out: list[bool]
    ) -> None:
        self.tree = tree
        self.lengths = lengths
        self.out = out
        self._characters = _compute_prefix_sums(lengths, out)
        self._linked = _compute_prefix_sums(tree.linked, out)
        self._paragraphs = _compute_prefix_sums(paragraphs, out)

    def count_characters(self, element: int) -> int:
        """Return the characters in an element."""
        return (
            self._characters[self.tree.last[element]] - self._characters[self.tree.first[element]]
        )

    def count_link_characters(self, element: int) -> int:
        """Return the characters in links in an element."""
        return self._linked[self.tree.last[element]] - self._linked[self.tree.first[element]]

    def count_paragraph_characters(self, element: int) -> int:
        """Return the characters in paragraphs in an element."""
        return (
            self._paragraphs[self.tree.last[element]] - self._paragraphs[self.tree.first[element]]
        )

    def is_body(self, element: int) -> bool:
        """Return whether an element is named as the one that holds the content and little else."""
        attributes = self.tree.attributes[element]
        return bool(attributes) and bool(classify_attributes(attributes) & BODY)


def parse_page(html: bytes) -> ElementStats:
    """Parse a page and count the text of its elements.

    Args:
        html: The page; the caller has checked its limits.

    Returns:
        The tree with its counts.
    """
    tree = parse_tree(html)
    lengths, paragraphs = _compute_run_lengths(tree)
    return ElementStats(tree, lengths, paragraphs, mark_boilerplate_runs(tree, lengths, paragraphs))


def _compute_run_lengths(tree: HtmlTree) -> tuple[list[int], list[int]]:
    """Return the characters of each run, and again only for paragraphs: long runs, not made of
    links, no headings.
    """
    lengths = list(map(len, tree.text))
    tag = tree.tag
    runs = zip(lengths, tree.linked, tree.owner, strict=True)
    return lengths, [
        # At most a quarter of a paragraph is links.
        length if length >= PARAGRAPH and linked * 4 <= length and tag[owner] not in HEADINGS else 0
        for length, linked, owner in runs
    ]


def _compute_prefix_sums(counts: list[int], out: list[bool]) -> list[int]:
    """Return the sums of the counts before each run, without boilerplate, and the total."""
    return [0, *accumulate([0 if gone else count for count, gone in zip(counts, out, strict=True)])]


# Elements that shape text; the weight of a run goes to the element around them.
_SHAPES = frozenset([
    "li", "ul", "ol", "dl", "dd", "dt", "tr", "tbody", "thead", "tfoot", "table", "blockquote", "p",
    "pre", "figure",
    "details",
])  # fmt: skip
_MARKS = ",.;!?"
_OTHER_MARKS = "،，、。"
_SENTENCE = 25  # minimum characters of a run with weight
# divisors of a run's weight for each enclosing element, innermost first
_SHARES = (1, 2, 6, 9, 12, 15)
_BODY_WEIGHT = 1.3  # factor for elements with the flag BODY
_LEAST_OF_THREAD = 0.8  # share of a discussion's paragraphs that its root holds
_GROWTH = 0.25  # minimum share of added text for the root to grow
_POST_OF_PAGE = re.compile(r'\sclass="[^"]*\bpostid-(\d+)\b')
_SHORT_POST = 250  # minimum characters of the post


def count_punctuation(text: str) -> int:
    """Count the punctuation marks of a text."""
    count = sum(map(text.count, _MARKS))
    return count if text.isascii() else count + sum(map(text.count, _OTHER_MARKS))


def score_elements(page: ElementStats) -> list[float]:
    """Score elements by the text that they hold.

    Args:
        page: A parsed page.

    Returns:
        The weight of each element: the sum of its runs, reduced by its share of links.
    """
    tree = page.tree
    tag = tree.tag
    parent = tree.parent
    linked = tree.linked
    out = page.out
    weights = [0.0] * len(tag)
    containers = _find_containers(tree)
    for run, length in enumerate(page.lengths):
        if length < _SENTENCE or out[run] or linked[run] * 2 > length:
            continue
        owner = tree.owner[run]
        if tag[owner] in HEADINGS:
            continue
        # As in Readability: a point for the run, one per mark, one per 100 characters up to three.
        weight = 1 + count_punctuation(tree.text[run]) + min(length / 100, 3)
        # An element with one run is taken for a paragraph: its text counts for the element around
        # it.
        alone = tree.last[owner] - tree.first[owner] == 1 and tag[owner] not in (
            "body",
            "article",
            "main",
        )
        element = containers[parent[owner] if alone else owner]
        for share in _SHARES:
            if element == 0:
                break
            weights[element] += weight / share
            element = parent[element]
    for element, weight in enumerate(weights):
        if weight:
            weight *= 1 - page.count_link_characters(element) / page.count_characters(element)
            weights[element] = weight * _BODY_WEIGHT if page.is_body(element) else weight
    return weights


def _find_containers(tree: HtmlTree) -> list[int]:
    """Return for each element the nearest one, itself included, that does not only shape text."""
    containers: list[int] = []
    for element, (tag, parent) in enumerate(zip(tree.tag, tree.parent, strict=True)):
        containers.append(containers[parent] if tag in _SHAPES else element)
    return containers


def find_root(page: ElementStats, weights: list[float]) -> int:
    """Find the element that holds the main content.

    Args:
        page: A parsed page.
        weights: Weight of each element.

    Returns:
        The heaviest element, extended while that adds much, and in a discussion to nearly all
        paragraphs; or the post in it that the page names.
    """
    heaviest = weights.index(max(weights))
    if page.tree.is_discussion:
        return _find_thread(page, heaviest)
    return _find_named_post(
        page,
        _find_twin_ancestor(page, heaviest)
        if page.is_body(heaviest)
        else _grow_root(page, heaviest),
    )


def _find_thread(page: ElementStats, root: int) -> int:
    """Return the nearest element around the root that holds four fifths of the paragraphs: the
    posts of a thread.
    """
    least = page.count_paragraph_characters(0) * _LEAST_OF_THREAD
    while root > 0 and page.count_paragraph_characters(root) < least:
        root = page.tree.parent[root]
    return root


def _grow_root(page: ElementStats, root: int) -> int:
    """Return the root, or the enclosing element that adds a quarter or more of text in
    paragraphs.
    """
    own = page.count_paragraph_characters(root)
    element = root
    while element > 0:
        element = page.tree.parent[element]
        around = page.count_paragraph_characters(element)
        if around - own > _GROWTH * own:
            root = element
            own = around
    return root


def _find_twin_ancestor(page: ElementStats, root: int) -> int:
    """Return the nearest element around all elements with the root's tag and name: an article in
    several pieces.
    """
    tree = page.tree
    first, last = tree.first[root], tree.last[root]
    for element, attributes in enumerate(tree.attributes):
        twin = attributes == tree.attributes[root] and tree.tag[element] == tree.tag[root]
        if twin and page.count_paragraph_characters(element):
            first, last = min(first, tree.first[element]), max(last, tree.last[element])
    while root > 0 and (tree.first[root] > first or tree.last[root] < last):
        root = tree.parent[root]
    return root


def _find_named_post(page: ElementStats, root: int) -> int:
    """Return the post inside the root that the page names (WordPress: half of the web), or the
    root.
    """
    tree = page.tree
    # WordPress names the post in the class of the body, one of the first elements.
    named = next(filter(None, map(_POST_OF_PAGE.search, tree.attributes[1:3])), None)
    if named is None:
        return root
    name = f' id="post-{named[1]}"'
    for element in range(root + 1, len(tree.tag)):
        if tree.first[element] >= tree.last[root]:
            break
        if name in tree.attributes[element] and page.count_characters(element) >= _SHORT_POST:
            return element
    return root
