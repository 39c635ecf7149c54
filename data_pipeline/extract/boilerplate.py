"""Mark the runs of text that are boilerplate by the tag, class, id or role of an element around
them.

The words are those that authors and page builders use all over the web; no site is named. A word
matches only between hyphens, underscores, spaces or changes of case: `ad` matches in `top-ad` and
`topAd`, not in `header`.

Invariants:
- An element with a large share of the page, or most of its paragraphs, is never boilerplate because
  of its name.
- If names would leave next to nothing, they are not trusted.
- A sidebar that stands among paragraphs is a box of the text, not a column of the page.
"""

import re
from functools import lru_cache
from itertools import accumulate

from llmsys.data_pipeline.extract.html_tree import HtmlTree

# Flags of an element; several can hold at once. Plain integers, not enum.Flag: they are computed
# for every element.
NOTHING = 0
SIDE = 1  # probably not content
MAIN = 2  # may hold content, whatever its other flags
BODY = 4  # holds the content and little else
HIDDEN = 8  # not shown to readers
TEASER = 16  # summarizes the content in a sentence
GUTTER = 32  # line numbers of code, and link marks of headings
BOX = 64  # a column of the page, or a box in its text
COMMENT = 128  # what readers say: content of a discussion, boilerplate elsewhere
REVIEW = 256  # what buyers say: boilerplate of a product, content elsewhere

_SIDE = [
    "ad", "ads", "adv", "advert", "advertisement", "advertising", "adsense", "banner", "breadcrumb",
    "breadcrumbs",
    "byline", "author", "authors", "bio", "community", "cookie", "cookies",
    "consent", "gdpr",
    "credit", "credits", "disqus", "disclaimer", "footer", "foot", "infinite", "login", "masthead",
    "menu", "meta",
    "metadata", "modal", "nav", "navbar", "navfooter", "navheader", "navigation", "newsletter",
    "outbrain", "pager",
    "pagination", "paywall", "popup", "popular", "privacy", "promo", "promoted", "promotion",
    "recirc", "recommend",
    "recommended", "recommendation", "recommendations", "related", "replies", "respond", "rss",
    "share", "sharing",
    "shares", "sharedaddy", "shoutbox", "sidebar", "signup", "social", "sponsor", "sponsored",
    "sponsors", "subscribe",
    "subscription", "survey", "taboola", "tag", "tags", "taxonomy", "timestamp", "toc", "toolbar",
    "tooltip",
    "trending", "widget", "teaser", "teasers", "utility", "skip", "also", "dateline", "pubdate",
    "date", "caption",
    "latest", "recent", "similar", "userinfo", "posthead",
    "postfoot", "postprofile", "signature", "signatures", "dialog", "onetrust",
]  # fmt: skip
_MAIN = [
    "article", "body", "content", "entry", "main", "page", "post", "story", "text", "blog",
    "column", "hentry",
    "document", "section", "wrapper", "container",
]  # fmt: skip
_TEASER = [
    "dek",
    "standfirst",
    "blurb",
    "summary",
    "abstract",
    "description",
    "subhead",
    "subheading",
    "subtitle",
]
_GUTTER = ["lineno", "linenos", "linenumber", "linenumbers", "gutter", "headerlink", "anchorjs"]
_FLAGS = (
    dict.fromkeys(_SIDE, SIDE)
    | dict.fromkeys(_MAIN, MAIN)
    | dict.fromkeys(_TEASER, TEASER)
    | dict.fromkeys(_GUTTER, GUTTER)
    | {"sidebar": SIDE | BOX}
    | dict.fromkeys(["comment", "comments"], COMMENT)
    | dict.fromkeys(["review", "reviews"], REVIEW)
)
_BODY = re.compile(
    r"\b(?:article|entry|post|story|news|page) ?(?:body|content|text|copy)\b|"
    r"\bbody ?(?:text|copy|content)\b|"
    r"\bmarkdown body\b|\bmw parser output\b|\brst content\b|\bmain ?content\b"
)
_BODY_ENDS = (
    "body",
    "content",
    "text",
    "copy",
    "output",
)  # every match of `_BODY` contains one of them: a fast first test
_NAMES = re.compile(r'\s(?:id|class|role|itemprop)="([^"]*)"')
_WORD = re.compile(r"[A-Za-z]+")
_CASED = re.compile(r"[A-Z]?[a-z]{3,}")  # shorter pieces of mixed case are mostly generated names
_HIDDEN = re.compile(r'\shidden=|display:\s*none|visibility:\s*hidden|aria-hidden="true"')


@lru_cache(maxsize=1 << 14)
def classify_attributes(attributes: str) -> int:
    """Classify an element by the words in its attributes.

    Args:
        attributes: As in the tag: ` class="a b" id="c"`.

    Returns:
        Flags of this module, such as TEASER, combined by or.
    """
    flags = NOTHING
    if ("hidden" in attributes or "none" in attributes) and _HIDDEN.search(attributes):
        flags = HIDDEN
    names = " ".join(_NAMES.findall(attributes))
    return flags | _classify_names(names) if names else flags


@lru_cache(maxsize=1 << 14)
def _classify_names(names: str) -> int:
    """Return the flags of the words in names."""
    # a page builder that gives every element this class
    words = _split_words(names.replace("elementor-widget", ""))
    flags = NOTHING
    for word in words:
        if word in _FLAGS:
            flags |= _FLAGS[word]
    joined = " ".join(words)
    is_body = any(map(joined.__contains__, _BODY_ENDS)) and _BODY.search(joined)
    return flags | BODY if is_body else flags


def _split_words(names: str) -> list[str]:
    """Return the words of names in lower case: `post-body` and `postBody` have two."""
    if names.islower():
        return _WORD.findall(names)
    words: list[str] = []
    for word in _WORD.findall(names):
        if word.islower() or word.isupper():
            words.append(word.lower())
        else:
            words += (part.lower() for part in _CASED.findall(word))
    return words


PARAGRAPH = 80  # minimum characters of a run that counts as a paragraph
_SIDE_FLAGS = HIDDEN | GUTTER | SIDE
_SIDE_TAGS = frozenset(["footer", "menu", "figcaption", "aside", "form"])
_NEVER = frozenset(["#", "body", "html", "article", "main"])
# share of the characters of the page; a larger element is content, whatever its name
_LARGEST_SIDE = 0.4
# share of the characters in paragraphs; more is content that a script reveals
_MAX_PARAGRAPHS = 0.5
# characters in paragraphs; below, a footer notice may have the larger share
_LEAST_PARAGRAPHS = 400
_LEAST_BOX_PARAGRAPHS = 0.5  # share of a box's characters in paragraphs; below, it is a column
_LARGEST_NAMED_MAIN = 0.15  # the same for elements that also have the flag MAIN
_ENOUGH = 250  # minimum of remaining characters; below, names are trusted less


def mark_boilerplate_runs(tree: HtmlTree, lengths: list[int], paragraphs: list[int]) -> list[bool]:
    """Mark the runs of text that are boilerplate.

    Names of classes are trusted less if little text would be left.

    Args:
        tree: The page.
        lengths: Characters of each run.
        paragraphs: Characters of each run that read like a paragraph.

    Returns:
        True for each run of boilerplate.
    """
    total = sum(lengths)
    side = _SIDE_FLAGS
    if not tree.is_discussion:
        side |= COMMENT
    if tree.is_product:
        side |= REVIEW
    for trust_names in (True, False):
        out = _mark_runs(tree, lengths, paragraphs, total, trust_names, side)
        if sum(length for length, gone in zip(lengths, out, strict=True) if not gone) >= min(
            _ENOUGH, total
        ):
            return out
    return [False] * len(lengths)


def _mark_runs(
    tree: HtmlTree,
    lengths: list[int],
    paragraphs: list[int],
    total: int,
    trust_names: bool,
    side: int,
) -> list[bool]:
    """Mark the runs in one pass over the elements; elements inside boilerplate are skipped."""
    out = [False] * len(lengths)
    before = [0, *accumulate(lengths)]
    paragraphs_before = [0, *accumulate(paragraphs)]
    most = max(paragraphs_before[-1] * _MAX_PARAGRAPHS, _LEAST_PARAGRAPHS)
    done = header_done = 0
    flows: set[int] | None = None
    columns = zip(tree.tag, tree.attributes, tree.first, tree.last, tree.parent, strict=True)
    for tag, attributes, start, end, parent in columns:
        if end <= start or end <= done:
            continue
        if tag == "header" and trust_names and end > header_done:
            header_done = end
            for run in range(start, end):
                if lengths[run] < PARAGRAPH or tree.linked[run] * 4 > lengths[run]:
                    out[run] = True
        flags = classify_attributes(attributes) if attributes else NOTHING
        if not (flags & side or tag in _SIDE_TAGS) or tag in _NEVER:
            continue
        in_paragraphs = paragraphs_before[end] - paragraphs_before[start]
        if (tag not in _SIDE_TAGS or tag == "form") and in_paragraphs > most:
            continue
        size = before[end] - before[start]
        is_box = flags & BOX and not flags & HIDDEN and tag not in _SIDE_TAGS
        if is_box and in_paragraphs >= size * _LEAST_BOX_PARAGRAPHS:
            flows = _find_flows(tree, paragraphs) if flows is None else flows
            if parent in flows:
                continue
        if size <= total * _LARGEST_SIDE and _is_boilerplate(
            tag, flags & side, flags, size > total * _LARGEST_NAMED_MAIN, trust_names
        ):
            out[start:end] = [True] * (end - start)
            done = end
    return out


def _find_flows(tree: HtmlTree, paragraphs: list[int]) -> set[int]:
    """Return the elements in which paragraphs stand: their owners, and the elements around."""
    owners = {owner for owner, length in zip(tree.owner, paragraphs, strict=True) if length}
    return owners | {tree.parent[owner] for owner in owners}


def _is_boilerplate(tag: str, side: int, flags: int, large: bool, trust_names: bool) -> bool:
    """Return whether an element is boilerplate by its tag or flags."""
    if flags & (HIDDEN | GUTTER):
        return True
    if not trust_names:
        return tag in ("footer", "menu")
    if tag in _SIDE_TAGS:
        return True
    return bool(side) and not flags & BODY and not (flags & MAIN and large)
