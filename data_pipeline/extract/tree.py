"""An HTML page as two short lists: its block elements, and the runs of text between their tags.

Reads HTML as UTF-8 bytes, gives a `Tree`. lexbor parses it (HTML's own algorithm, so that unclosed tags and broken
entities are what a browser makes of them), drops what holds no text to read, and writes the rest out again; that form
is regular, so that one pass over it is enough and no call per node is needed. Time and memory are linear in it.
"""

import re
from dataclasses import dataclass, field

from selectolax.lexbor import LexborHTMLParser

# Elements whose text is not read by readers of the page: programs, pictures, forms and navigation.
_UNREAD = [
    "script",
    "style",
    "noscript",
    "template",
    "head",
    "nav",
    "svg",
    "canvas",
    "iframe",
    "object",
    "embed",
    "applet",
    "audio",
    "video",
    "map",
    "select",
    "datalist",
    "button",
    "textarea",
    "dialog",
    "noembed",
    "noframes",
    "rp",
    "annotation",
    "annotation-xml",
    "img",
    "picture",
    "input",
]
_UNREAD_SELECTOR = ",".join(_UNREAD)
# (text, "/" or "", name, attributes) again and again; a comment has no name. Inside attributes lexbor writes `&gt;`.
_TAGS = re.compile(r"<(?:!--.*?--|(/?)([^\s>]*)([^>]*))>", re.DOTALL)
_BLOCKS = frozenset(
    [
        "address",
        "article",
        "aside",
        "blockquote",
        "body",
        "caption",
        "center",
        "dd",
        "details",
        "dir",
        "div",
        "dl",
        "dt",
        "fieldset",
        "figcaption",
        "figure",
        "footer",
        "form",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "header",
        "hgroup",
        "html",
        "legend",
        "li",
        "main",
        "menu",
        "ol",
        "p",
        "pre",
        "section",
        "summary",
        "table",
        "tbody",
        "td",
        "tfoot",
        "th",
        "thead",
        "tr",
        "ul",
    ]
)
HEADINGS = frozenset(["h1", "h2", "h3", "h4", "h5", "h6"])
_LINE_BREAK = "\0"  # no parsed page holds one


@dataclass(slots=True)
class Tree:
    """Block elements in document order, element 0 above them all, and runs of text in document order.

    Attributes:
        tag, attributes, parent: of each element; attributes as they were written, ` class="a" id="b"`.
        first, last: the runs inside each element are first[e] to last[e] - 1.
        text: each run, white space folded, a newline where the page breaks a line; as it was inside `pre`.
        linked: characters of each run that are inside links.
        owner: the element that each run stands in.
    """

    tag: list[str] = field(default_factory=lambda: ["#"])
    attributes: list[str] = field(default_factory=lambda: [""])
    parent: list[int] = field(default_factory=lambda: [0])
    first: list[int] = field(default_factory=lambda: [0])
    last: list[int] = field(default_factory=lambda: [0])
    text: list[str] = field(default_factory=list)
    linked: list[int] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)


def read_tree(html: bytes) -> Tree:
    """Parse a page; the limits of `extract.limit` are the caller's to check."""
    return _read(_readable(html))


def _readable(html: bytes) -> str:
    """What is inside `body`, written out regularly."""
    page = LexborHTMLParser(html)
    for element in reversed(page.css(_UNREAD_SELECTOR)):  # what is inside another goes first
        element.decompose(recursive=False)
    body = page.body or page.root
    written = (body.html if body is not None else None) or ""
    return written.replace("&nbsp;", " ")


def _read(written: str) -> Tree:
    """One pass over tags and texts. It is long because it is the innermost loop: a call costs more than its work."""
    tree = Tree()
    tag, parent, last = tree.tag, tree.parent, tree.last
    run: list[str] = []  # pieces of the run that is being read
    linked = current = preformatted = 0
    in_link = False
    pieces = iter(_TAGS.split(written))
    piece = next(pieces)
    if piece:
        run.append(piece)
    for slash, name, attributes, piece in zip(pieces, pieces, pieces, pieces, strict=True):
        if name in _BLOCKS:
            if run:
                _end_run(tree, run, linked, current, preformatted > 0)
                linked = 0
            if not slash:
                tag.append(name)
                parent.append(current)
                tree.attributes.append(attributes)
                tree.first.append(len(tree.text))
                last.append(-1)
                current = len(tag) - 1
                preformatted += name == "pre"
            elif tag[current] == name:
                preformatted -= name == "pre"
                last[current] = len(tree.text)
                current = parent[current]
        elif name == "a":
            in_link = not slash and "href=" in attributes  # `<a id="…"/>` is never closed
        elif name == "br":
            run.append(_LINE_BREAK)
        elif name == "hr" and run:
            _end_run(tree, run, linked, current, preformatted > 0)
            linked = 0
        if piece and (run or preformatted or not piece.isspace()):
            run.append(piece)
            if in_link:
                linked += len(piece)
    if run:
        _end_run(tree, run, linked, current, preformatted > 0)
    tree.last = [len(tree.text) if end < 0 else end for end in last]
    tree.last[0] = len(tree.text)
    return tree


def _end_run(tree: Tree, run: list[str], linked: int, owner: int, preformatted: bool) -> None:
    """Add what was read as a run of text, unless it is white space."""
    text = "".join(run)
    run.clear()
    if preformatted:
        text = text.replace(_LINE_BREAK, "\n").strip("\n")
        if not text or text.isspace():
            return
    elif _LINE_BREAK in text:
        text = "\n".join(" ".join(line.split()) for line in text.split(_LINE_BREAK)).strip("\n")
    else:
        text = " ".join(text.split())
    if text:
        tree.text.append(text)
        tree.linked.append(min(linked, len(text)))
        tree.owner.append(owner)
