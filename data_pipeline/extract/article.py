"""The main content of a page: where it stands, and what within it is something else.

Reads HTML as UTF-8, gives text. Four steps, each a pass over elements or runs:

1. Runs inside elements that by tag or name are not content are out (`extract.side`).
2. Each run that reads like a paragraph gives weight to the elements around it, less to the farther ones, and the
   element with the most is the root (an idea of Readability, Arc90 2009); the root grows to an element around it for
   as long as that adds much text which reads like paragraphs.
3. Inside the root, lists and boxes that are mostly links are out.
4. Phrases about the page, and headings whose text went, are out.
"""

import re
from itertools import accumulate

from data_pipeline.extract.hint import BODY, TEASER, hint
from data_pipeline.extract.layout import lay_out
from data_pipeline.extract.phrase import is_phrase
from data_pipeline.extract.side import side_runs
from data_pipeline.extract.tree import HEADINGS, Tree, read_tree

_MARK = re.compile(r"[,.;!?،，、。]\s?")
# Elements that shape text; the weight of a run goes to what is around them.
_SHAPES = frozenset(
    [
        "li",
        "ul",
        "ol",
        "dl",
        "dd",
        "dt",
        "tr",
        "tbody",
        "thead",
        "tfoot",
        "table",
        "blockquote",
        "p",
        "pre",
        "figure",
        "details",
    ]
)
_BOXES = frozenset(["div", "section", "ul", "ol", "table", "p", "dl"])
_NO_PHRASES = HEADINGS | {"pre", "td", "th"}
_LEVELS = 6  # elements around a run that get some of its weight
_SENTENCE = 25  # characters from which a run can carry weight
_PARAGRAPH = 80  # characters from which a run counts when the root may grow
_LEAD = 60  # characters from which a run between headline and root is an introduction
_GROWTH = 0.25  # share of text that must be added for the root to grow
_BODY_WEIGHT = 1.3  # for an element whose name says that it holds the content
_POST_OF_PAGE = re.compile(r'\sclass="[^"]*\bpostid-(\d+)\b')
_SHORT_POST = 250  # characters; a shorter element is not taken for the post
_SIBLING_WEIGHT = 0.2  # of the root's weight; an element beside it with as much is content too
_MOSTLY_LINKS = 0.5
_LARGEST_BOX = 0.3  # of the root; a larger box is content even if it is mostly links


class _Page:
    """Sums over the runs that are not out, so that what an element holds is a difference of two numbers."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.lengths = [len(text) for text in tree.text]
        self.out = side_runs(tree, self.lengths)
        zero_if_out = zip(self.lengths, tree.linked, self.out, strict=True)
        kept = [(0, 0) if out else (length, linked) for length, linked, out in zero_if_out]
        self.characters = [0, *accumulate(length for length, _ in kept)]
        self.linked = [0, *accumulate(linked for _, linked in kept)]

    def size(self, element: int) -> int:
        return self.characters[self.tree.last[element]] - self.characters[self.tree.first[element]]

    def links(self, element: int) -> int:
        return self.linked[self.tree.last[element]] - self.linked[self.tree.first[element]]

    def reads_like_text(self, run: int, least: int) -> bool:
        """Whether a run is long enough, not out, not a heading, and not made of links."""
        length = self.lengths[run]
        return (
            length >= least
            and not self.out[run]
            and self.tree.linked[run] * 4 <= length
            and self.tree.tag[self.tree.owner[run]] not in HEADINGS
        )


def extract_article(html: bytes) -> str:
    """The text of a page's main content; empty when it has none. The caller has checked `extract.limit`."""
    tree = read_tree(html)
    kept, _ = main_content(tree)
    return lay_out(tree, kept)


def main_content(tree: Tree) -> tuple[list[int], int]:
    """The runs of the main content, in the order of the page, and the element that they stand in."""
    if not tree.text:
        return [], 0
    page = _Page(tree)
    weights = _weights(page)
    root = _named_post(page, _grown(page, max(range(len(weights)), key=weights.__getitem__)))
    keep = [False] * len(tree.text)
    for element in (root, *_siblings(page, weights, root)):
        for run in range(tree.first[element], tree.last[element]):
            keep[run] = not page.out[run]
    _add_lead(page, root, keep)
    _drop_link_boxes(page, root, keep)
    _drop_phrases(tree, keep)
    return _without_loose_headings(tree, keep), root


def _containers(tree: Tree) -> list[int]:
    """For each element itself or the nearest element around it that is not there to shape text."""
    containers = [0]
    for element in range(1, len(tree.tag)):
        containers.append(containers[tree.parent[element]] if tree.tag[element] in _SHAPES else element)
    return containers


def _weights(page: _Page) -> list[float]:
    """The weight of each element: what the runs in it give, less its share of links."""
    tree = page.tree
    weights = [0.0] * len(tree.tag)
    containers = _containers(tree)
    for run, length in enumerate(page.lengths):
        owner = tree.owner[run]
        if length < _SENTENCE or page.out[run] or tree.linked[run] * 2 > length or tree.tag[owner] in HEADINGS:
            continue
        weight = 1 + len(_MARK.findall(tree.text[run])) + min(length / 100, 3)
        alone = tree.last[owner] - tree.first[owner] == 1 and tree.tag[owner] not in ("body", "article", "main")
        element = containers[tree.parent[owner] if alone else owner]
        for level in range(_LEVELS):
            if element == 0:
                break
            weights[element] += weight / (1, 2, 6, 9, 12, 15)[level]
            element = tree.parent[element]
    for element, weight in enumerate(weights):
        if weight:
            weight *= 1 - page.links(element) / page.size(element)
            weights[element] = weight * _BODY_WEIGHT if _is_body(tree, element) else weight
    return weights


def _is_body(tree: Tree, element: int) -> bool:
    attributes = tree.attributes[element]
    return bool(attributes) and bool(hint(attributes) & BODY)


def _grown(page: _Page, root: int) -> int:
    """The root, or an element around it that adds a quarter or more of text that reads like paragraphs."""
    tree = page.tree
    lengths = (
        length if length >= _PARAGRAPH and page.reads_like_text(run, _PARAGRAPH) else 0
        for run, length in enumerate(page.lengths)
    )
    before = [0, *accumulate(lengths)]
    own = before[tree.last[root]] - before[tree.first[root]]
    element = root
    if _is_body(tree, root):
        return _around_twins(page, before, root)
    while element > 0:
        element = tree.parent[element]
        around = before[tree.last[element]] - before[tree.first[element]]
        if around - own > _GROWTH * own:
            root, own = element, around
    return root


def _around_twins(page: _Page, before: list[int], root: int) -> int:
    """The root, or the nearest element around it and all with the same tag and name: an article in several pieces."""
    tree = page.tree
    first, last = tree.first[root], tree.last[root]
    for element in range(1, len(tree.tag)):
        twin = tree.tag[element] == tree.tag[root] and tree.attributes[element] == tree.attributes[root]
        if twin and before[tree.last[element]] > before[tree.first[element]]:
            first, last = min(first, tree.first[element]), max(last, tree.last[element])
    while root > 0 and (tree.first[root] > first or tree.last[root] < last):
        root = tree.parent[root]
    return root


def _named_post(page: _Page, root: int) -> int:
    """The root, or the post inside it that the page says it is about (WordPress: half of the web)."""
    tree = page.tree
    named = next(filter(None, map(_POST_OF_PAGE.search, tree.attributes[1:3])), None)
    if named is None:
        return root
    name = f' id="post-{named[1]}"'
    for element in range(root + 1, len(tree.tag)):
        if tree.first[element] >= tree.last[root]:
            break
        if name in tree.attributes[element] and page.size(element) >= _SHORT_POST:
            return element
    return root


def _siblings(page: _Page, weights: list[float], root: int) -> list[int]:
    """Elements beside the root that hold content too: by their weight, or as a paragraph of their own."""
    tree = page.tree
    parent = tree.parent[root]
    least = max(10.0, weights[root] * _SIBLING_WEIGHT)
    found: list[int] = []
    if root == 0:
        return found
    for element in range(parent + 1, len(tree.tag)):
        if tree.parent[element] != parent or element == root:
            continue
        size = page.size(element)
        paragraph = tree.tag[element] == "p" and size > _PARAGRAPH and page.links(element) * 4 < size
        if weights[element] >= least or paragraph:
            found.append(element)
    return found


def _add_lead(page: _Page, root: int, keep: list[bool]) -> None:
    """Keep what reads like an introduction between the headline and the root, unless it is called a summary."""
    tree = page.tree
    if root == 0 or _is_body(tree, root):
        return
    start = tree.first[root]
    headline = next((run for run in range(start - 1, -1, -1) if tree.tag[tree.owner[run]] == "h1"), start)
    for run in range(headline + 1, start):
        length, owner = page.lengths[run], tree.owner[run]
        said = hint(tree.attributes[owner]) | hint(tree.attributes[tree.parent[owner]])
        if page.out[run] or said & TEASER or length < _LEAD or tree.linked[run] * 4 > length:
            continue
        keep[run] = _MARK.search(tree.text[run]) is not None


def _drop_link_boxes(page: _Page, root: int, keep: list[bool]) -> None:
    """Drop lists, tables and boxes inside the root that are mostly links."""
    tree = page.tree
    largest = page.size(root) * _LARGEST_BOX
    done = 0
    for element in range(root + 1, len(tree.tag)):
        if tree.first[element] >= tree.last[root]:
            break
        if tree.tag[element] not in _BOXES or tree.last[element] <= done or _is_body(tree, element):
            continue
        size = page.size(element)
        if size and page.links(element) > size * _MOSTLY_LINKS and size < largest:
            done = tree.last[element]
            keep[tree.first[element] : done] = [False] * (done - tree.first[element])


def _drop_phrases(tree: Tree, keep: list[bool]) -> None:
    """Drop calls to subscribe, credits of pictures and the like."""
    for run, text in enumerate(tree.text):
        if keep[run] and is_phrase(text) and tree.tag[tree.owner[run]] not in _NO_PHRASES:
            keep[run] = False


def _without_loose_headings(tree: Tree, keep: list[bool]) -> list[int]:
    """The runs that stay, without headings whose text is out."""
    kept: list[int] = []
    following, level = len(keep), ""  # the run that stays behind this one, and its tag if that is a heading
    for run in range(len(keep) - 1, -1, -1):
        tag = tree.tag[tree.owner[run]]
        if not keep[run]:
            continue
        if tag in HEADINGS and (following == len(keep) or (following > run + 1 and "" < level <= tag)):
            continue
        following, level = run, tag if tag in HEADINGS else ""
        kept.append(run)
    return kept[::-1]
