"""Short runs of text that speak about the page and not about its subject, known by how they begin.

Reads the text of a run, says whether it is such a phrase: a call to subscribe, share or read something else, a notice
of copyright, the credit of a picture. Phrases are those of whole families of sites, in some languages of the web.

What belongs to the main content beside its root, and what inside the root does not.

Reads a `Page` and the root of its content, changes marks of the runs to keep. Added are elements beside the root that
hold content too, and an introduction between the headline and the root. Dropped are boxes that are mostly links,
phrases about the page, and headings whose text went.

The main content of a page: where it stands, and what within it is something else.

Reads HTML as UTF-8, gives text. Runs in elements that by tag or name are not content are out (`extract.side`); what
reads like paragraphs shows where the content stands (`extract.weigh`); boxes of links, phrases about the page and loose
headings in it go (`extract.within`); the rest is laid out as text (`extract.layout`).
"""

import re

from data_pipeline.extract.boilerplate import PARAGRAPH, TEASER, classify_attributes
from data_pipeline.extract.content_score import count_punctuation, find_root, score_elements
from data_pipeline.extract.element_stats import ElementStats, parse_page
from data_pipeline.extract.html_tree import HEADINGS, HtmlTree
from data_pipeline.extract.text_layout import render_text

LONGEST = 160  # characters; what is longer is looked at by no phrase
# What may follow the first word, by first word. `.` allows anything.
_FOLLOWED = {
    "read": r"(?:more|also|next)\b", "see": r"(?:more|also)\b", "watch": r"(?:more|next|now|also)\b",
    "listen": r"now\b", "discover": r"more\b", "find": r"out more\b", "learn": r"more\b", "click": r"here\b",
    "also": r"(?:read|on|see|watch|check)\b", "more": r"(?:from|on|stories|news)\b", "related": ".", "related:": ".",
    "recommended": ".", "subscribe": ".", "sign": r"up\b", "signup": ".", "follow": r"(?:us|me|him|her|@)",
    "share": r"(?:this|on|with|your)\b", "advertisement": ".", "sponsored": ".",
    "like": r"this (?:story|article|post)\b", "love": r"this (?:story|article|post)\b",
    "enjoyed": r"this (?:story|article|post)\b", "get": r"(?:the|our) (?:latest|newsletter|best|app)\b",
    "have": r"a (?:news )?tip\b", "got": r"a (?:news )?tip\b", "image": r"(?:credit|by|courtesy|source|via|©|:)",
    "photo": r"(?:credit|by|courtesy|source|via|©|:)", "image:": ".", "photo:": ".", "photos:": ".", "picture:": ".",
    "©": ".", "(c)": ".", "copyright": ".", "all": r"rights reserved", "tags:": ".", "tag:": ".", "filed": r"under\b",
    "posted": r"(?:in|by|on)\b", "leave": r"a (?:comment|reply)\b", "last": r"(?:updated|modified)\b",
    "download": r"(?:the|our) app\b", "join": r"(?:us|our)\b", "source:": ".", "lesen": r"sie auch\b",
    "mehr": r"zum thema\b", "weitere": r"(?:infos|informationen|artikel|themen)\b", "auch": r"interessant\b",
    "das": r"könnte sie\b", "teilen": ".", "foto:": ".", "fotos:": ".", "bild:": ".", "bilder:": ".", "quelle:": ".",
    "anzeige": ".", "lea": r"también\b", "lee": r"también\b", "ver": r"también\b", "suscríbete": ".",
    "leia": r"(?:também|mais)\b", "lire": r"aussi\b", "voir": r"aussi\b", "czytaj": r"też\b", "zobacz": r"też\b",
    "leggi": r"anche\b",
}  # fmt: skip
_PATTERNS = {word: re.compile(rest, re.IGNORECASE) for word, rest in _FOLLOWED.items() if rest != "."}
_GLUED = ("©", "相关阅读", "相关文章", "责任编辑", "責任編輯", "関連記事")
_AROUND = " \t\n-–—•*>»|[\"“'#+👉"


def is_phrase(text: str) -> bool:
    """Whether a short run is about the page."""
    if len(text) > LONGEST:
        return False
    text = text.lstrip(_AROUND)
    word, _, rest = text.partition(" ")
    word = word.lower()
    if word not in _FOLLOWED:
        return text.startswith(_GLUED)
    pattern = _PATTERNS.get(word)
    return pattern is None or pattern.match(rest) is not None


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


def extract_article(html: bytes) -> str:
    """The text of a page's main content; empty when it has none. The caller has checked `extract.limit`."""
    page = parse_page(html)
    return render_text(page.tree, find_main_content(page))


def find_main_content(page: ElementStats) -> list[int]:
    """The runs of the main content, in the order of the page."""
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
    return select_kept_runs(tree, keep)
