"""Extract the main content of a page.

Runs in boilerplate elements (`extract.boilerplate`) are ignored. Runs that read like paragraphs
locate the root of the content (`extract.content_score`). Siblings of the root with content and an
introduction after the headline are added. Boxes of links, phrases about the page (calls to
subscribe or share, copyright notices, picture credits) and headings without text are dropped.
`extract.text_layout` renders the rest.

A page whose paragraphs are a small share of it, such as a listing, is no article: all of its main
part that is no boilerplate is content.
"""

import re

from llmsys.data_pipeline.extract.boilerplate import PARAGRAPH, TEASER, classify_attributes
from llmsys.data_pipeline.extract.content_score import (
    ElementStats,
    count_punctuation,
    find_root,
    parse_page,
    score_elements,
)
from llmsys.data_pipeline.extract.html_tree import HEADINGS, HtmlTree
from llmsys.data_pipeline.extract.markdown_layout import render_markdown
from llmsys.data_pipeline.extract.text_layout import render_text

LONGEST = 160  # characters; longer runs are not tested for phrases
# Patterns of the text after the first word, by first word; `.` allows anything.
_FOLLOWED = {
    "read": r"(?:more|also|next)\b", "see": r"(?:more|also)\b",
    "watch": r"(?:more|next|now|also)\b",
    "listen": r"now\b", "discover": r"more\b", "find": r"out more\b", "learn": r"more\b",
    "click": r"here\b",
    "also": r"(?:read|on|see|watch|check)\b", "more": r"(?:from|on|stories|news)\b", "related": ".",
    "related:": ".",
    "recommended": ".", "subscribe": ".", "sign": r"up\b", "signup": ".",
    "follow": r"(?:us|me|him|her|@)",
    "share": r"(?:this|on|with|your)\b", "advertisement": ".", "sponsored": ".",
    "like": r"this (?:story|article|post)\b", "love": r"this (?:story|article|post)\b",
    "enjoyed": r"this (?:story|article|post)\b",
    "get": r"(?:the|our) (?:latest|newsletter|best|app)\b",
    "have": r"a (?:news )?tip\b", "got": r"a (?:news )?tip\b",
    "image": r"(?:credit|by|courtesy|source|via|©|:)",
    "photo": r"(?:credit|by|courtesy|source|via|©|:)", "image:": ".", "photo:": ".", "photos:": ".",
    "picture:": ".",
    "©": ".", "(c)": ".", "copyright": ".", "all": r"rights reserved", "tags:": ".", "tag:": ".",
    "filed": r"under\b",
    "posted": r"(?:in|by|on)\b", "leave": r"a (?:comment|reply)\b",
    "last": r"(?:updated|modified)\b",
    "download": r"(?:the|our) app\b", "join": r"(?:us|our)\b", "source:": ".",
    "lesen": r"sie auch\b",
    "mehr": r"zum thema\b", "weitere": r"(?:infos|informationen|artikel|themen)\b",
    "auch": r"interessant\b",
    "das": r"könnte sie\b", "teilen": ".", "foto:": ".", "fotos:": ".", "bild:": ".",
    "bilder:": ".", "quelle:": ".",
    "anzeige": ".", "lea": r"también\b", "lee": r"también\b", "ver": r"también\b",
    "suscríbete": ".",
    "leia": r"(?:também|mais)\b", "lire": r"aussi\b", "voir": r"aussi\b", "czytaj": r"też\b",
    "zobacz": r"też\b",
    "leggi": r"anche\b",
}  # fmt: skip
_PATTERNS = {
    word: re.compile(rest, re.IGNORECASE) for word, rest in _FOLLOWED.items() if rest != "."
}
_GLUED = ("©", "相关阅读", "相关文章", "责任编辑", "責任編輯", "関連記事")
_AROUND = " \t\n-–—•*>»|[\"“'#+👉"


def is_phrase(text: str) -> bool:
    """Return whether a short run is about the page and not about its subject."""
    if len(text) > LONGEST:
        return False
    text = text.lstrip(_AROUND)
    word, _, rest = text.partition(" ")
    word = word.lower()
    if word not in _FOLLOWED:
        # No space follows these, as in Chinese and Japanese.
        return text.startswith(_GLUED)
    pattern = _PATTERNS.get(word)
    return pattern is None or pattern.match(rest) is not None


_BOXES = frozenset(["div", "section", "ul", "ol", "table", "p", "dl"])
_LINK_LISTS = frozenset(["ul", "ol", "table", "dl"])  # of the boxes; a large one is kept whole
_NO_PHRASES = HEADINGS | {"pre", "td", "th"}
_LEAD = 60  # minimum characters of an introduction between headline and root
_LEAST_SIBLING = 10.0  # minimum weight of a sibling of the root with content, and
_SIBLING_WEIGHT = 0.2  # its minimum share of the root's weight
_MOSTLY_LINKS = 0.5
_LEAST_MAIN = 0.2  # share of the page's characters in its main part
_LEAST_ARTICLE = 0.3  # share of the main part in the paragraphs of an article
_LARGEST_BOX = 0.3  # share of the root; a larger box is content even if it is mostly links


def find_content_siblings(page: ElementStats, weights: list[float], root: int) -> list[int]:
    """Find the siblings of the root that hold content too.

    Args:
        page: A parsed page.
        weights: Weight of each element.
        root: The element of the main content.

    Returns:
        Elements that are heavy enough, or paragraphs next to it.
    """
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
        paragraph = (
            tree.tag[element] == "p"
            and size > PARAGRAPH
            and page.count_link_characters(element) * 4 < size
        )
        if weights[element] >= least or paragraph:
            found.append(element)
    return found


def add_lead(page: ElementStats, root: int, keep: list[bool]) -> None:
    """Keep runs that read like an introduction between headline and root.

    An introduction is often outside of the article's element. Runs that are named as a summary
    or teaser are left out.

    Args:
        page: A parsed page.
        root: The element of the main content.
        keep: Whether each run is kept; changed in place.
    """
    tree = page.tree
    if root == 0 or page.is_body(root):
        return
    start = tree.first[root]
    headline = next(
        (run for run in range(start - 1, -1, -1) if tree.tag[tree.owner[run]] == "h1"), start
    )
    for run in range(headline + 1, start):
        length = page.lengths[run]
        owner = tree.owner[run]
        flags = classify_attributes(tree.attributes[owner]) | classify_attributes(
            tree.attributes[tree.parent[owner]]
        )
        is_lead = (
            length >= _LEAD and tree.linked[run] * 4 <= length and count_punctuation(tree.text[run])
        )
        if is_lead and not page.out[run] and not flags & TEASER:
            keep[run] = True


def drop_link_boxes(page: ElementStats, root: int, keep: list[bool]) -> None:
    """Drop lists, tables and boxes inside the root that are mostly links.

    A list with a large share of the root is what the page is for, such as a table of contents:
    its parts stay too.

    Args:
        page: A parsed page.
        root: The element of the main content.
        keep: Whether each run is kept; changed in place.
    """
    tree = page.tree
    largest = page.count_characters(root) * _LARGEST_BOX
    done = 0
    for element in range(root + 1, len(tree.tag)):
        if tree.first[element] >= tree.last[root]:
            break
        if tree.tag[element] not in _BOXES or tree.last[element] <= done or page.is_body(element):
            continue
        size = page.count_characters(element)
        if not size or page.count_link_characters(element) <= size * _MOSTLY_LINKS:
            continue
        if size < largest:
            done = tree.last[element]
            keep[tree.first[element] : done] = [False] * (done - tree.first[element])
        elif tree.tag[element] in _LINK_LISTS:
            done = tree.last[element]


def drop_phrases(tree: HtmlTree, keep: list[bool]) -> None:
    """Drop calls to subscribe, picture credits and the like.

    Args:
        tree: The page.
        keep: Whether each run is kept; changed in place.
    """
    for run, text in enumerate(tree.text):
        if keep[run] and is_phrase(text) and tree.tag[tree.owner[run]] not in _NO_PHRASES:
            keep[run] = False


def select_kept_runs(tree: HtmlTree, keep: list[bool]) -> list[int]:
    """Return the kept runs without headings whose text was dropped."""
    kept: list[int] = []
    # the next kept run, and its tag if that is a heading
    following = len(keep)
    level = ""
    # Backwards: whether a heading has text is known only from what follows it.
    for run in range(len(keep) - 1, -1, -1):
        if not keep[run]:
            continue
        tag = tree.tag[tree.owner[run]]
        if tag in HEADINGS and (
            following == len(keep) or (following > run + 1 and "" < level <= tag)
        ):
            continue
        following = run
        level = tag if tag in HEADINGS else ""
        kept.append(run)
    return kept[::-1]


def extract_article(html: bytes) -> str:
    """Extract the text of a page's main content.

    Args:
        html: The page; the caller has checked its limits.

    Returns:
        The text; "" without any.
    """
    page = parse_page(html)
    return render_text(page.tree, find_main_content(page))


def extract_article_forms(html: bytes) -> tuple[str, str]:
    """Extract the text of a page's main content, and the same as Markdown.

    Args:
        html: The page; the caller has checked its limits.

    Returns:
        Both; "" without any text.
    """
    page = parse_page(html)
    kept = find_main_content(page)
    return render_text(page.tree, kept), render_markdown(page.tree, kept)


def find_main_content(page: ElementStats) -> list[int]:
    """Return the runs of the main content, in page order."""
    tree = page.tree
    if not tree.text:
        return []
    weights = score_elements(page)
    root = find_root(page, weights)
    keep = [False] * len(tree.text)
    for element in (root, *find_content_siblings(page, weights, root)):
        for run in range(tree.first[element], tree.last[element]):
            keep[run] = not page.out[run]
    add_lead(page, root, keep)
    drop_link_boxes(page, root, keep)
    drop_phrases(tree, keep)
    kept = select_kept_runs(tree, keep)
    part = find_main_part(page)
    in_paragraphs = sum([page.lengths[run] for run in kept if page.lengths[run] >= PARAGRAPH])
    if in_paragraphs >= _LEAST_ARTICLE * page.count_characters(part):
        return kept
    # No article, but a listing, a product or a table: it has no root, and links are its content.
    return [run for run in range(tree.first[part], tree.last[part]) if not page.out[run]]


def find_main_part(page: ElementStats) -> int:
    """Find the main part of a page: what its author marks so.

    Args:
        page: A parsed page.

    Returns:
        The first element that is marked as the main part and holds a good share of the text; 0, the
        page, without one.
    """
    tree = page.tree
    least = page.count_characters(0) * _LEAST_MAIN
    for element, (tag, attributes) in enumerate(zip(tree.tag, tree.attributes, strict=True)):
        is_marked = tag == "main" or ' role="main"' in attributes
        if is_marked and page.count_characters(element) > least:
            return element
    return 0
