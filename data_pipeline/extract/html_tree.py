"""Parse an HTML page into two flat lists: its block elements, and the runs of text between their
tags.

lexbor parses the page with HTML's own algorithm, so that unclosed tags and broken entities mean
what they mean in a browser. Elements without readable text are removed, and the rest is serialized
again. In this regular form every block has its end tag, and `<` and `>` occur in tags and comments
only, so one pass over tags and texts builds the tree, with no call per node. Formulas become LaTeX
before (`extract.formulas`), and superscripts in the pass (`extract.superscripts`).

Invariants:
- Time and memory are linear in the page.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from selectolax.lexbor import LexborHTMLParser

from llmsys.data_pipeline.extract.formulas import may_hold_formulas, replace_formulas
from llmsys.data_pipeline.extract.superscripts import write_superscript

# Scripts, pictures, forms and navigation. Each name costs time on every page, so that this lists
# only frequent elements and those whose text lexbor does not escape; the parser below skips the
# others that are not read.
_UNREAD_SELECTOR = "script,style,template,iframe,noembed,noframes,svg,nav,select,button,img,input"
# Text that lexbor does not escape, and comments that may hold such tags.
_RAW = re.compile("<!--.*?-->|<xmp[^>]*>(.*?)</xmp>|<plaintext[^>]*>(.*)</plaintext>", re.DOTALL)
# minimum characters that a page has for readers without scripts; fewer ask to allow scripts
_LEAST_UNSCRIPTED = 250
# Types of schema.org that a page names in microdata or JSON-LD. QAPage is no discussion: comments
# on answers are asides, and answers are seldom named as comments.
_DISCUSSION_TYPES = (b"DiscussionForumPosting",)
_PRODUCT_TYPES = (b'schema.org/Product"', b'"Product"')


def normalize_html(html: bytes, with_scripts: bool) -> tuple[str, int]:
    """Parse a page and serialize its body in a regular form, which one pass reads.

    Args:
        html: The page; the caller has checked the limits of `extract.page_limits`.
        with_scripts: Leave out what is for readers without scripts.

    Returns:
        The body as lexbor writes it, and the characters that were left out as for readers without
        scripts.
    """
    page = LexborHTMLParser(html)
    body = page.body or page.root
    if body is None:
        return "", 0
    if may_hold_formulas(html):
        replace_formulas(page, body)
    for element in reversed(body.css(_UNREAD_SELECTOR)):  # inner elements first
        element.decompose(recursive=False)
    unscripted = 0
    if with_scripts:
        for element in reversed(body.css("noscript")):
            unscripted += len("".join(element.text().split()))
            element.decompose(recursive=False)
    written = body.html or ""
    if "<xmp" in written or "<plaintext" in written:
        written = _RAW.sub(_escape_raw_text, written)
    return written, unscripted


def _escape_raw_text(raw: re.Match[str]) -> str:
    """Return raw text as a browser shows it; "" for a comment."""
    text = raw[1] or raw[2]
    return f"<pre>{text.replace('<', '&lt;').replace('>', '&gt;')}</pre>" if text else ""


# Splits into (text, name with "/" for an end tag, attributes) repeatedly; a comment has no name.
# lexbor escapes `>` in attributes.
_TAGS = re.compile(r"<(?:!--.*?--|([^\s>]*)([^>]*))>", re.DOTALL)
_BLOCKS = [
    "address", "article", "aside", "blockquote", "body", "caption", "center", "dd", "details",
    "dir", "div", "dl",
    "dt", "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6",
    "header", "hgroup",
    "html", "legend", "li", "main", "menu", "ol", "p", "pre", "section", "summary", "table",
    "tbody", "td", "tfoot",
    "th", "thead", "tr", "ul",
]  # fmt: skip
_UNREAD = [
    "annotation", "annotation-xml", "applet", "audio", "canvas", "datalist", "dialog", "head",
    "map", "object",
    "picture", "rp", "textarea", "video",
]  # fmt: skip
HEADINGS = frozenset(["h1", "h2", "h3", "h4", "h5", "h6"])
_LINE_BREAK = "\0"  # in no page: the extractor removes NULs
# the column of a cell follows from the cells before it
_KEPT_EMPTY = frozenset(["/td", "/th", "/tr"])

_OPENS_LIST: Final = 0  # ordered lists and list items, which have numbers
_OPENS: Final = 1
_CLOSES: Final = 2
_RULE: Final = 3  # effects up to this one end a run of text
_LINK: Final = 4
_LINK_ENDS: Final = 5
_BREAK: Final = 6
_SKIPPED: Final = 7
_SCRIPT: Final = 8
_SCRIPT_ENDS: Final = 9
_CODE: Final = 10
# Effects of tags; other tags, such as <b>, have none.
_EFFECTS = (
    dict.fromkeys(_BLOCKS, _OPENS)
    | {f"/{name}": _CLOSES for name in _BLOCKS}
    | {
        "a": _LINK,
        "/a": _LINK_ENDS,
        "br": _BREAK,
        "hr": _RULE,
        "ol": _OPENS_LIST,
        "li": _OPENS_LIST,
    }
    | {"sup": _SCRIPT, "sub": _SCRIPT, "/sup": _SCRIPT_ENDS, "/sub": _SCRIPT_ENDS}
    | {"code": _CODE}
    | dict.fromkeys(_UNREAD, _SKIPPED)
)


class ItemNumber(NamedTuple):
    """Number of a list item; with a list, the number of its items is added."""

    number: int
    counted_list: int = 0


@dataclass(slots=True)
class OrderedList:
    """Number of the next item of an ordered list.

    Attributes:
        next: Number of the next item.
        step: 1, or -1 in a reversed list.
        items: Number of items so far.
        is_counted: Whether numbers begin with the number of items, which is known at the end.
    """

    next: int
    step: int
    items: int
    is_counted: bool


# more digits are no number of a list that people read
_START = re.compile(r' start="[ \t\n\f\r]*([+-]?[0-9]{1,9})(?![0-9])')
_VALUE = re.compile(r' value="[ \t\n\f\r]*([+-]?[0-9]{1,9})(?![0-9])')


@dataclass(slots=True)
class HtmlTree:
    """Block elements with text and runs of text, both in document order; element 0 is above all
    others.

    Attributes:
        tag: name of each element.
        attributes: attributes of each element as serialized, ` class="a" id="b"`.
        parent: index of each element's parent.
        first: index of the first run inside each element.
        last: index after the last run inside each element.
        text: each run with white space folded and a newline per line break; unchanged inside `pre`.
        linked: characters of each run that are inside links.
        owner: innermost element of each run.
        lists: ordered lists by their element.
        numbers: numbers of the items of ordered lists by their element.
        code_attributes: attributes of the first `code` in each `pre`, which may name a language.
        is_discussion: whether the page says that it is a thread of a forum.
        is_product: whether it says that it has a product.
    """

    tag: list[str] = field(default_factory=lambda: ["#"])
    attributes: list[str] = field(default_factory=lambda: [""])
    parent: list[int] = field(default_factory=lambda: [0])
    first: list[int] = field(default_factory=lambda: [0])
    last: list[int] = field(default_factory=lambda: [0])
    text: list[str] = field(default_factory=list)
    linked: list[int] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    lists: dict[int, OrderedList] = field(default_factory=dict)
    numbers: dict[int, ItemNumber] = field(default_factory=dict)
    code_attributes: dict[int, str] = field(default_factory=dict)
    is_discussion: bool = False
    is_product: bool = False

    def get_item_number(self, item: int) -> int | None:
        """Return the number of a list item.

        Args:
            item: The element.

        Returns:
            Its number as browsers show it; None outside of ordered lists.
        """
        if self.tag[self.parent[item]] != "ol":
            return None
        number, counted_list = self.numbers[item]
        return number + (self.lists[counted_list].items if counted_list else 0)


def parse_tree(html: bytes) -> HtmlTree:
    """Parse a page into arrays of elements and runs of text.

    Args:
        html: The page; the caller has checked its limits.

    Returns:
        The tree. That of a page with more text for readers without scripts than else, such as a
        forum that scripts draw, has what those readers see.
    """
    written, unscripted = normalize_html(html, with_scripts=True)
    tree = _read_tree(written)
    if unscripted >= _LEAST_UNSCRIPTED and unscripted > sum(map(len, tree.text)):
        tree = _read_tree(normalize_html(html, with_scripts=False)[0])
    tree.is_discussion = any(name in html for name in _DISCUSSION_TYPES)
    tree.is_product = any(name in html for name in _PRODUCT_TYPES)
    return tree


def _read_tree(written: str) -> HtmlTree:
    """Read a body in the regular form of `normalize_html`."""
    # One long function, because it is the innermost loop: a call costs more than its work.
    tree = HtmlTree()
    tag = tree.tag
    all_attributes = tree.attributes
    parent = tree.parent
    texts = tree.text
    first, last = tree.first, tree.last
    run: list[str] = []  # pieces of the run that is being read
    # `links` counts those that were opened so far.
    linked = current = preformatted = links = 0
    in_link = False
    link_start = -1  # pieces before the open link, if it was opened in this run
    # of each open superscript or subscript: pieces before it, and links that were opened
    scripts: list[tuple[int, int]] = []
    get_effect = _EFFECTS.get
    pieces = iter(_TAGS.split(written))
    text = next(pieces)
    if text:
        run.append(text)
    for name, attributes, text in zip(pieces, pieces, pieces, strict=True):
        effect = get_effect(name)
        if effect is not None:
            if effect <= _RULE:
                if run:
                    _end_run(tree, run, linked, current, preformatted > 0)
                    linked = 0
                    link_start = -1
                    scripts.clear()
                if effect <= _OPENS:
                    parent.append(current)
                    current = len(tag)
                    tag.append(name)
                    all_attributes.append(attributes)
                    first.append(len(texts))
                    last.append(-1)
                    if effect == _OPENS_LIST:
                        _number_element(tree, current)
                    elif name == "pre":
                        preformatted += 1
                elif effect == _CLOSES and tag[current] == name[1:]:
                    if name == "/pre":
                        preformatted -= 1
                    last[current] = len(texts)
                    # The element held no text and no other element.
                    if (
                        first[current] == len(texts)
                        and current == len(tag) - 1
                        and name not in _KEPT_EMPTY
                    ):
                        del tag[-1], all_attributes[-1], first[-1], last[-1]
                        current = parent.pop()
                    else:
                        current = parent[current]
            elif effect == _LINK:
                in_link = "href=" in attributes  # `<a id="…"/>` is never closed
                if in_link:
                    links += 1
                    link_start = len(run)
            elif effect == _LINK_ENDS:
                in_link = False
            elif effect == _BREAK:
                run.append(_LINE_BREAK)
            elif effect == _SCRIPT:
                scripts.append((len(run), links))
            elif effect == _SCRIPT_ENDS:
                start, links_before = scripts.pop() if scripts else (0, links)
                # A link in it, or around it alone, leads to a note.
                is_note = links != links_before or (in_link and start == link_start)
                if not (is_note or preformatted) and write_superscript(run, start, name):
                    link_start = -1
                    scripts.clear()
            elif effect == _CODE:
                if preformatted:
                    tree.code_attributes.setdefault(current, attributes)
            else:
                text = _skip_element(name, pieces)
        # White space between blocks begins no run.
        if text and (run or preformatted or not text.isspace()):
            run.append(text)
            if in_link:
                linked += len(text.replace("&nbsp;", " "))
    if run:
        _end_run(tree, run, linked, current, preformatted > 0)
    last[0] = len(texts)
    return tree


def _number_element(tree: HtmlTree, element: int) -> None:
    """Begin an ordered list, or number an item in one. Items that turn out empty count."""
    attributes = tree.attributes[element]
    if tree.tag[element] == "ol":
        is_reversed = ' reversed="' in attributes
        found = _START.search(attributes)
        tree.lists[element] = OrderedList(
            next=int(found[1]) if found else 0 if is_reversed else 1,
            step=-1 if is_reversed else 1,
            items=0,
            is_counted=is_reversed and not found,
        )
        return
    parent = tree.parent[element]
    if tree.tag[parent] != "ol":
        return
    ordered = tree.lists[parent]
    ordered.items += 1
    if found := _VALUE.search(attributes):
        ordered.next = int(found[1])
        ordered.is_counted = False
    tree.numbers[element] = ItemNumber(ordered.next, parent if ordered.is_counted else 0)
    ordered.next += ordered.step


def _skip_element(name: str, pieces: Iterator[str]) -> str:
    """Advance to the end of an element that is not read, and return the text after it."""
    depth = 1
    for other, _, text in zip(pieces, pieces, pieces, strict=True):
        depth += (other == name) - (other == f"/{name}")
        if depth == 0:
            return text
    return ""


def _end_run(tree: HtmlTree, run: list[str], linked: int, owner: int, preformatted: bool) -> None:
    """Add the pieces as a run of text, unless they are white space."""
    text = run[0] if len(run) == 1 else "".join(run)
    run.clear()
    text = text.replace("&nbsp;", " ")
    if preformatted:
        text = text.replace(_LINE_BREAK, "\n").strip("\n")
        if text.isspace():
            return
    elif _LINE_BREAK in text:
        text = "\n".join([" ".join(line.split()) for line in text.split(_LINE_BREAK)]).strip("\n")
    else:
        text = " ".join(text.split())
    if text:
        tree.text.append(text)
        # Counted before white space was folded: it can be more than the run has left.
        tree.linked.append(min(linked, len(text)) if linked else 0)
        tree.owner.append(owner)
