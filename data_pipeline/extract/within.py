"""What belongs to the main content beside its root, and what inside the root does not.

Reads a `Page` and the root of its content, changes marks of the runs to keep. Added are elements beside the root that
hold content too, and an introduction between the headline and the root. Dropped are boxes that are mostly links,
phrases about the page, and headings whose text went.
"""

from data_pipeline.extract.hint import TEASER, classify_attributes
from data_pipeline.extract.page import ElementStats
from data_pipeline.extract.phrase import is_phrase
from data_pipeline.extract.side import PARAGRAPH
from data_pipeline.extract.tree import HEADINGS, HtmlTree
from data_pipeline.extract.weigh import count_punctuation

_BOXES = frozenset(["div", "section", "ul", "ol", "table", "p", "dl"])
_NO_PHRASES = HEADINGS | {"pre", "td", "th"}
_LEAD = 60  # characters from which a run between headline and root is an introduction
_LEAST_SIBLING = 10.0  # weight of an element beside the root that is content too, and
_SIBLING_WEIGHT = 0.2  # its share of the root's weight
_MOSTLY_LINKS = 0.5
_LARGEST_BOX = 0.3  # of the root; a larger box is content even if it is mostly links


def find_content_siblings(page: ElementStats, weights: list[float], root: int) -> list[int]:
    """Elements beside the root that hold content too: by their weight, or as a paragraph of their own."""
    tree = page.tree
    parent = tree.parent[root]
    least = max(_LEAST_SIBLING, weights[root] * _SIBLING_WEIGHT)
    found: list[int] = []
    if root == 0:
        return found
    for element in range(parent + 1, len(tree.tag)):
        if tree.parent[element] != parent or element == root:
            continue
        size = page.count_characters(element)
        paragraph = tree.tag[element] == "p" and size > PARAGRAPH and page.count_link_characters(element) * 4 < size
        if weights[element] >= least or paragraph:
            found.append(element)
    return found


def add_lead(page: ElementStats, root: int, keep: list[bool]) -> None:
    """Keep what reads like an introduction between the headline and the root, unless it is called a summary."""
    tree = page.tree
    if root == 0 or page.is_body(root):
        return
    start = tree.first[root]
    headline = next((run for run in range(start - 1, -1, -1) if tree.tag[tree.owner[run]] == "h1"), start)
    for run in range(headline + 1, start):
        length, owner = page.lengths[run], tree.owner[run]
        said = classify_attributes(tree.attributes[owner]) | classify_attributes(tree.attributes[tree.parent[owner]])
        reads_like_one = length >= _LEAD and tree.linked[run] * 4 <= length and count_punctuation(tree.text[run])
        if reads_like_one and not page.out[run] and not said & TEASER:
            keep[run] = True


def drop_link_boxes(page: ElementStats, root: int, keep: list[bool]) -> None:
    """Drop lists, tables and boxes inside the root that are mostly links."""
    tree = page.tree
    largest = page.count_characters(root) * _LARGEST_BOX
    done = 0
    for element in range(root + 1, len(tree.tag)):
        if tree.first[element] >= tree.last[root]:
            break
        if tree.tag[element] not in _BOXES or tree.last[element] <= done or page.is_body(element):
            continue
        size = page.count_characters(element)
        if size and page.count_link_characters(element) > size * _MOSTLY_LINKS and size < largest:
            done = tree.last[element]
            keep[tree.first[element] : done] = [False] * (done - tree.first[element])


def drop_phrases(tree: HtmlTree, keep: list[bool]) -> None:
    """Drop calls to subscribe, credits of pictures and the like."""
    for run, text in enumerate(tree.text):
        if keep[run] and is_phrase(text) and tree.tag[tree.owner[run]] not in _NO_PHRASES:
            keep[run] = False


def select_kept_runs(tree: HtmlTree, keep: list[bool]) -> list[int]:
    """The runs that stay, without headings whose text is out."""
    kept: list[int] = []
    following, level = len(keep), ""  # the run that stays behind this one, and its tag if that is a heading
    for run in range(len(keep) - 1, -1, -1):
        if not keep[run]:
            continue
        tag = tree.tag[tree.owner[run]]
        if tag in HEADINGS and (following == len(keep) or (following > run + 1 and "" < level <= tag)):
            continue
        following, level = run, tag if tag in HEADINGS else ""
        kept.append(run)
    return kept[::-1]
