"""Replace the formulas of a page by their LaTeX: `$…$` in a line, `$$…$$` on a line of its own.

Formulas are scripts of MathJax, MathML (also inside what KaTeX, MathJax and MediaWiki write), and
images whose `alt` or address holds LaTeX. What a program wrote for the eye next to the source of a
formula is removed. LaTeX that is plain text on the page stays as it is.

Invariants:
- Time and memory are linear in the page: each element is converted once.
- Every replacement starts at a `math` element, a script with a type of `SCRIPT_TYPE`, or an image
  for which `is_formula_image` holds. The compiled core leaves pages with one of them to Python.
"""

import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import unquote

from selectolax.lexbor import LexborHTMLParser, LexborNode

from llmsys.data_pipeline.extract.mathml import convert_mathml
from llmsys.data_pipeline.extract.tex import TexSource, normalize_tex

SCRIPT_TYPE: Final = "math/"
# An image is a formula if its class has one of these words, or one that begins so.
IMAGE_CLASSES: Final = ("tex", "latex", "latexcenter")
IMAGE_CLASS_BEGINNINGS: Final = ("mwe-math-fallback", "ql-img-")
# Or if its address has one of these parts.
IMAGE_SOURCES: Final = (
    "/math/render/", "codecogs.com/", "latex.php?", "cht=tx", "equation?tex=", "mathtex.cgi?",
    "mimetex.cgi?", "_images/math/",
)  # fmt: skip
# One of these is in every page with a formula: a fast first test.
_MARKS = (
    b"<math", b"<MATH", b"<Math", b"math/", b"latex", b"mwe-math", b"=tex", b'"tex', b"'tex",
    b' tex"', b" tex'", b" tex ", b"ql-img-", b"codecogs", b"cht=tx", b"equation?", b"tex.cgi?",
)  # fmt: skip

# Elements that MathJax 2 writes before the script of a formula.
_RENDERED = frozenset([
    "MathJax", "MathJax_Preview", "MathJax_Display", "MathJax_SVG", "MathJax_SVG_Display",
    "MathJax_CHTML", "MathJax_PHTML", "mjx-chtml", "MJXc-display",
])  # fmt: skip
_DISPLAYED = ("katex-display", "MathJax_Display", "MathJax_SVG_Display", "MJXc-display")
_WIKI_ELEMENT = "mwe-math-element"
_FARTHEST_WRAPPER = 5  # levels between MathML and the element that a program wrapped around it
_MOST_RENDERED = 3  # elements before a script: a preview, its rendering and their wrapper
_WHITE_SPACE_BEFORE = 4  # texts and comments between them
# Programs wrap formulas in these. Others are never replaced: the class of a page's body means
# nothing, and what is inside of `noscript` is not read.
_WRAPPERS = frozenset(["span", "div", "nobr", "mjx-container", "mjx-assistive-mml"])
_GENERIC_ALTS = frozenset(["equation", "formula", "math", "latex", "tex", "image", "img", "eq"])
_ADDRESS_FIELD = re.compile(r"[?&;](?:latex|tex|chl|formula)=([^&]*)")
# settings of images that stand before the formula in an address
_IMAGE_SETTING = re.compile(
    r"\s*\\(?:dpi\s*\{?\d+\}?|bg_\w+|fg_\w+|inline|large|Large|LARGE|huge|small|tiny)(?![a-z])"
)


def may_hold_formulas(html: bytes) -> bool:
    """Return whether a page may hold a formula, by its bytes.

    Args:
        html: The page.

    Returns:
        False: `replace_formulas` would find nothing. True: it is worth a look.
    """
    return any(mark in html for mark in _MARKS)


def replace_formulas(page: LexborHTMLParser, body: LexborNode) -> None:
    """Replace the formulas of a page by texts.

    Args:
        page: The parsed page; changed in place.
        body: Its body.
    """
    done: set[int] = set()
    for script in body.css(f'script[type^="{SCRIPT_TYPE}"]'):
        if script.mem_id not in done:
            _replace_script(page, script, done)
    for node in body.css("math, img"):
        if node.mem_id in done:
            continue
        if node.tag == "math":
            _replace_mathml(page, node, done)
        elif is_formula_image(node):
            source = _read_image(node)
            classes = node.attributes.get("class") or ""
            is_display = (
                source.is_display
                or "display" in classes
                or "latexcenter" in classes
                or _is_sphinx_display(node)
            )
            _replace(page, _find_wiki_element(node) or node, source.tex, is_display, done)


def is_formula_image(image: LexborNode) -> bool:
    """Return whether an image shows a formula, by its class or its address.

    Args:
        image: An `img` element.

    Returns:
        See `IMAGE_CLASSES` and `IMAGE_SOURCES`.
    """
    attributes = image.attributes
    words = (attributes.get("class") or "").split(" ")
    source = attributes.get("src") or ""
    return any(
        word in IMAGE_CLASSES or word.startswith(IMAGE_CLASS_BEGINNINGS) for word in words
    ) or any(part in source for part in IMAGE_SOURCES)


def _is_sphinx_display(image: LexborNode) -> bool:
    """Return whether an image is where Sphinx displays a formula: in a paragraph of its own."""
    around = image.parent.parent if image.parent is not None else None
    return around is not None and around.tag == "div" and around.attributes.get("class") == "math"


def _read_image(image: LexborNode) -> TexSource:
    """Return the LaTeX of `alt`, or of the address where `alt` says nothing."""
    source = normalize_tex(image.attributes.get("alt") or "")
    if source.tex and source.tex.lower() not in _GENERIC_ALTS:
        return source
    address = image.attributes.get("src") or ""
    field = _ADDRESS_FIELD.search(address)
    query = field[1] if field else address.partition("?")[2]
    tex = unquote(query).replace("&space;", " ")
    if field:
        tex = tex.replace("+", " ") if "%2B" in query or "%2b" in query else tex
    begin = 0
    while setting := _IMAGE_SETTING.match(tex, begin):
        begin = setting.end()
    return normalize_tex(tex[begin:])


def _replace_script(page: LexborHTMLParser, script: LexborNode, done: set[int]) -> None:
    """Replace a script of MathJax, and remove what MathJax wrote before it."""
    kind = (script.attributes.get("type") or "").lower()
    content = script.text(deep=True) or ""
    if "mml" in kind:
        inner = LexborHTMLParser(content)
        math = inner.css_first("math")
        tex = convert_mathml(math) if math else ""
    else:
        tex = normalize_tex(content).tex
    for node in _list_rendered(script) if tex else []:
        _mark_done(node, done)
        node.decompose(recursive=False)
    if "asciimath" in kind:
        # the delimiters of AsciiMath
        done.add(script.mem_id)
        script.replace_with(f"`{tex}`" if tex else "")
    else:
        _replace(page, script, tex, "mode=display" in kind.replace(" ", ""), done)


def _list_rendered(script: LexborNode) -> list[LexborNode]:
    """List the elements before a script that show the same formula."""
    found: list[LexborNode] = []
    others = 0
    node = script.prev
    while node is not None and len(found) < _MOST_RENDERED and others < _WHITE_SPACE_BEFORE:
        if node.is_element_node:
            if not _is_wrapper(node, _RENDERED):
                break
            found.append(node)
        elif node.is_text_node and (node.text_content or "").strip():
            break
        else:
            others += 1
        node = node.prev
    return found


def _replace_mathml(page: LexborHTMLParser, math: LexborNode, done: set[int]) -> None:
    attributes = math.attributes
    wrapper = _find_wrapper(math)
    is_display = (
        attributes.get("display") == "block"
        or attributes.get("mode") == "display"
        or _is_wrapper(wrapper, _DISPLAYED)
        or wrapper.attributes.get("display") == "true"
    )
    _replace(page, wrapper, convert_mathml(math), is_display, done)


def _find_wrapper(math: LexborNode) -> LexborNode:
    """Return the element around MathML that shows the same formula, or the MathML."""
    parent = math.parent
    if parent is None or parent.tag not in _WRAPPERS:
        return math
    if _is_wrapper(parent, ("katex-mathml",)):
        around = parent.parent
        if around is None or not _is_wrapper(around, ("katex",)):
            return parent
        outer = around.parent
        return outer if outer is not None and _is_wrapper(outer, ("katex-display",)) else around
    if parent.tag == "mjx-assistive-mml" or _is_wrapper(parent, ("MJX_Assistive_MathML",)):
        return _find_outermost(parent)
    return _find_wiki_element(math) or math


def _find_outermost(node: LexborNode) -> LexborNode:
    """Return the farthest of the elements that MathJax made around a node."""
    outermost = node
    around = node.parent
    for _ in range(_FARTHEST_WRAPPER):
        if around is None or around.tag not in _WRAPPERS:
            break
        if around.tag == "mjx-container" or _is_wrapper(around, _RENDERED):
            outermost = around
        around = around.parent
    return outermost


def _find_wiki_element(node: LexborNode) -> LexborNode | None:
    """Return MediaWiki's element around a formula, which has it as MathML and as an image."""
    around = node.parent
    for _ in range(_FARTHEST_WRAPPER):
        if around is None or around.tag not in _WRAPPERS:
            return None
        if _is_wrapper(around, (_WIKI_ELEMENT,)):
            return around
        around = around.parent
    return None


def _is_wrapper(node: LexborNode, names: Iterable[str]) -> bool:
    """Return whether a program wraps formulas in such an element with one of the classes."""
    words = (node.attributes.get("class") or "").split()
    return node.tag in _WRAPPERS and any(name in words for name in names)


def _mark_done(node: LexborNode, done: set[int]) -> None:
    """Record the formulas inside a node, so that none is converted twice."""
    done.add(node.mem_id)
    done.update(inner.mem_id for inner in node.css("math, img, script"))


def _replace(
    page: LexborHTMLParser, node: LexborNode, tex: str, is_display: bool, done: set[int]
) -> None:
    """Replace an element by a formula; a displayed one is between line breaks."""
    _mark_done(node, done)
    if not tex:
        node.decompose(recursive=False)
    elif is_display:
        node.insert_before(page.create_node("br"))
        node.insert_after(page.create_node("br"))
        node.replace_with(f"$${tex}$$")
    else:
        # `$a$$b$` would open a displayed formula.
        before = " " if _get_last_character(node.prev) == "$" else ""
        # Programs that indent pages leave the space before the next word inside of the element.
        following = node.next
        begins_word = following is not None and (following.text(deep=True) or "")[:1].isalnum()
        after = " " if begins_word and _get_last_character(node).isspace() else ""
        node.replace_with(f"{before}${tex}${after}")


def _get_last_character(node: LexborNode | None) -> str:
    text = "" if node is None else node.text_content if node.is_text_node else node.text(deep=True)
    return (text or "")[-1:]
