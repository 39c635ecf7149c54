"""What the class, id and role of an element say about it, before its text is looked at.

Reads the attributes of an element as they are written in the page, gives flags. The words are those that
authors and page builders use all over the web; no site is named. A word counts only when it stands alone between
hyphens, underscores, spaces or changes of case: `ad` is in `top-ad` and `topAd`, not in `header`.

Which runs of text stand in an element that is not content by its tag or name.

Reads a `HtmlTree`, the characters of its runs and those in paragraphs, gives a mark per run. Promises: an element that
holds a large share of the page, or most of its paragraphs, is never out for its name, and when names would leave next
to nothing, they are not believed.
"""

import re
from functools import lru_cache
from itertools import accumulate

from data_pipeline.extract.html_tree import HtmlTree

# What can be said about an element; several can hold at once. Plain integers: this is asked of every element.
NOTHING = 0
SIDE = 1  # not the content of this page, most likely
MAIN = 2  # may hold content, whatever else is said
BODY = 4  # holds the content and little else
HIDDEN = 8  # not shown to readers
TEASER = 16  # says in one sentence what the content is about
GUTTER = 32  # line numbers of code, and marks that lead to a heading

_SIDE = [
    "ad", "ads", "adv", "advert", "advertisement", "advertising", "adsense", "banner", "breadcrumb", "breadcrumbs",
    "byline", "author", "authors", "bio", "comment", "comments", "community", "cookie", "cookies", "consent", "gdpr",
    "credit", "credits", "disqus", "disclaimer", "footer", "foot", "infinite", "login", "masthead", "menu", "meta",
    "metadata", "modal", "nav", "navbar", "navfooter", "navheader", "navigation", "newsletter", "outbrain", "pager",
    "pagination", "paywall", "popup", "popular", "privacy", "promo", "promoted", "promotion", "recirc", "recommend",
    "recommended", "recommendation", "recommendations", "related", "replies", "respond", "rss", "share", "sharing",
    "shares", "sharedaddy", "shoutbox", "sidebar", "signup", "social", "sponsor", "sponsored", "sponsors", "subscribe",
    "subscription", "survey", "taboola", "tag", "tags", "taxonomy", "timestamp", "toc", "toolbar", "tooltip",
    "trending", "widget", "teaser", "teasers", "utility", "skip", "also", "dateline", "pubdate", "date", "caption",
    "latest", "recent",
]  # fmt: skip
_MAIN = [
    "article", "body", "content", "entry", "main", "page", "post", "story", "text", "blog", "column", "hentry",
    "document", "section", "wrapper", "container",
]  # fmt: skip
_TEASER = ["dek", "standfirst", "blurb", "summary", "abstract", "description", "subhead", "subheading", "subtitle"]
_GUTTER = ["lineno", "linenos", "linenumber", "linenumbers", "gutter", "headerlink", "anchorjs"]
_FLAGS = (
    dict.fromkeys(_SIDE, SIDE)
    | dict.fromkeys(_MAIN, MAIN)
    | dict.fromkeys(_TEASER, TEASER)
    | dict.fromkeys(_GUTTER, GUTTER)
)
_BODY = re.compile(
    r"\b(?:article|entry|post|story|news|page) ?(?:body|content|text|copy)\b|\bbody ?(?:text|copy|content)\b|"
    r"\bmarkdown body\b|\bmw parser output\b|\brst content\b|\bmain ?content\b"
)
_BODY_ENDS = ("body", "content", "text", "copy", "output")  # one of them is in what `_BODY` finds
_NAMES = re.compile(r'\s(?:id|class|role|itemprop)="([^"]*)"')
_WORD = re.compile(r"[A-Za-z]+")
_CASED = re.compile(r"[A-Z]?[a-z]{3,}")  # shorter parts of mixed case are mostly names made by programs
_HIDDEN = re.compile(r'\shidden=|display:\s*none|visibility:\s*hidden|aria-hidden="true"')


@lru_cache(maxsize=1 << 14)
def classify_attributes(attributes: str) -> int:
    """Read the attributes of an element, ` class="a b" id="c"`."""
    said = NOTHING
    if ("hidden" in attributes or "none" in attributes) and _HIDDEN.search(attributes):
        said = HIDDEN
    names = " ".join(_NAMES.findall(attributes))
    return said | _classify_names(names) if names else said


@lru_cache(maxsize=1 << 14)
def _classify_names(names: str) -> int:
    """What the words of names say."""
    words = _split_words(names.replace("elementor-widget", ""))  # a page builder that calls all that it builds so
    said = NOTHING
    for word in words:
        if word in _FLAGS:
            said |= _FLAGS[word]
    joined = " ".join(words)
    is_body = any(map(joined.__contains__, _BODY_ENDS)) and _BODY.search(joined)
    return said | BODY if is_body else said


def _split_words(names: str) -> list[str]:
    """The words of names in lower case: `post-body` and `postBody` have two."""
    if names.islower():
        return _WORD.findall(names)
    words: list[str] = []
    for word in _WORD.findall(names):
        if word.islower() or word.isupper():
            words.append(word.lower())
        else:
            words += (part.lower() for part in _CASED.findall(word))
    return words


PARAGRAPH = 80  # characters from which a run reads like a paragraph
_SAYS_SIDE = HIDDEN | GUTTER | SIDE
_SIDE_TAGS = frozenset(["footer", "menu", "figcaption", "aside", "form"])
_NEVER = frozenset(["#", "body", "html", "article", "main"])
_LARGEST_SIDE = 0.4  # of the characters of the page; what is larger is content, whatever it is called
_MAX_PARAGRAPHS = 0.5  # of the characters in paragraphs; what holds more is content, hidden until a program shows it
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
    most = max(paragraphs_before[-1] * _MAX_PARAGRAPHS, _LEAST_PARAGRAPHS)
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
