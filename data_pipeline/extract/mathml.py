"""Convert Presentation MathML into LaTeX.

An annotation in LaTeX, which KaTeX, LaTeXML, MediaWiki and pandoc write, is taken as it is.
Without one the elements are converted: fractions, roots, scripts, accents, tables, fences.

Invariants:
- Time and memory are linear in the page: elements below `_DEEPEST` levels are read as text.
"""

import re
from collections.abc import Callable, Iterator
from typing import Final

from selectolax.lexbor import LexborNode

from llmsys.data_pipeline.extract.latex_symbols import (
    COMMANDS,
    FUNCTIONS,
    LARGE_OPERATORS,
    OVER_ACCENTS,
    SPACED,
    UNDER_ACCENTS,
    VARIANTS,
)
from llmsys.data_pipeline.extract.tex import normalize_tex

_DEEPEST: Final = 100  # formulas of people have fewer than 30 levels
_TEX_ENCODINGS = frozenset([
    "application/x-tex", "application/x-latex", "text/x-tex", "text/x-latex", "text/tex",
    "text/latex", "tex", "latex",
])  # fmt: skip
_ENDS_IN_COMMAND = re.compile(r"\\[a-zA-Z]+\Z")
_ATOM = re.compile(r"[^\\{}^_\s]|\\[a-zA-Z]+|\\[^a-zA-Z]")
_LOOKS_LIKE_TEX = re.compile(r"[\\^_{}]")
# Elements whose content is not shown, or is another form of what is shown.
_UNREAD = frozenset(["annotation", "annotation-xml", "mphantom", "script", "style"])


def convert_mathml(math: LexborNode) -> str:
    """Convert a `math` element into LaTeX.

    Args:
        math: The element.

    Returns:
        LaTeX in one line without delimiters; "" for an empty formula.
    """
    alternative = normalize_tex(math.attributes.get("alttext") or "").tex
    has_annotation = any(_is_tex_annotation(node) for node in math.css("annotation"))
    if alternative and not has_annotation and _LOOKS_LIKE_TEX.search(alternative):
        return alternative
    return " ".join(_convert_row(math, 0).split()) or alternative


def _is_tex_annotation(node: LexborNode) -> bool:
    encoding = (node.attributes.get("encoding") or "").strip().lower()
    return node.tag == "annotation" and encoding in _TEX_ENCODINGS


def _iter_elements(node: LexborNode) -> Iterator[LexborNode]:
    """Yield the elements among the children that are shown."""
    for child in node.iter():
        if child.tag not in _UNREAD:
            yield child


def _convert(node: LexborNode, depth: int) -> str:
    """Return the LaTeX of an element."""
    if depth > _DEEPEST:
        return _escape_text(" ".join(_get_text(node).split()))
    tag = node.tag or ""
    if tag in _LEAVES:
        return _LEAVES[tag](node)
    convert = _CONVERTERS.get(tag, _convert_row)
    return convert(node, depth + 1)


def _get_text(node: LexborNode) -> str:
    return node.text(deep=True) or ""


def _escape_text(text: str) -> str:
    """Return characters as LaTeX writes them in a formula."""
    return _join_pieces([COMMANDS.get(character, character) for character in text])


def _join_pieces(pieces: list[str]) -> str:
    """Join pieces of LaTeX, with a space where a letter follows the name of a command."""
    joined: list[str] = []
    last = ""
    for piece in pieces:
        if not piece:
            continue
        if piece[0].isalpha() and _ENDS_IN_COMMAND.search(last[-40:]):
            joined.append(" ")
        joined.append(piece)
        last = piece
    return "".join(joined)


def _convert_row(node: LexborNode, depth: int) -> str:
    """Return the LaTeX of elements in a row, and of text between them, with space around
    operators.
    """
    pieces: list[str] = []
    has_operand = False  # an operator without one before it is a sign
    for child in node.iter(include_text=True):
        if child.is_text_node:
            text = _escape_text(" ".join((child.text_content or "").split()))
            pieces.append(text)
            has_operand = has_operand or bool(text)
            continue
        if child.tag in _UNREAD:
            continue
        operator = _get_text(child).strip() if child.tag == "mo" else ""
        written = _convert(child, depth)
        if operator in SPACED and has_operand:
            written = f" {written} "
            has_operand = False
        elif operator in (",", ";"):
            written += " "
            has_operand = False
        elif written.strip():
            has_operand = not operator or operator not in ("(", "[", "{", "|")
        pieces.append(written)
    return _join_pieces(pieces)


def _convert_identifier(node: LexborNode) -> str:
    text = _get_text(node).strip()
    variant = VARIANTS.get(node.attributes.get("mathvariant") or "")
    if text in FUNCTIONS:
        return f"\\{text}"
    escaped = _escape_text(text)
    if variant and (variant != "mathrm" or text.isalpha()) and not escaped.startswith("\\"):
        return f"\\{variant}{{{escaped}}}"
    is_name = len(text) > 1 and text.isascii() and text.isalpha()
    return f"\\mathrm{{{escaped}}}" if is_name else escaped


def _convert_number(node: LexborNode) -> str:
    return _escape_text("".join(_get_text(node).split()))


def _convert_operator(node: LexborNode) -> str:
    text = _get_text(node).strip()
    if text in FUNCTIONS:
        return f"\\{text}"
    is_name = len(text) > 1 and text.isascii() and text.isalpha()
    return f"\\operatorname{{{text}}}" if is_name else _escape_text(text)


def _convert_text(node: LexborNode) -> str:
    text = _get_text(node)
    folded = " ".join(text.split())
    if not folded:
        return " "
    before = " " if text[0].isspace() else ""
    after = " " if text[-1].isspace() else ""
    return f"\\text{{{before}{_escape_words(folded)}{after}}}"


def _escape_words(text: str) -> str:
    """Return a text as LaTeX writes it outside of formulas."""
    return re.sub(r"[{}%#&$_]", lambda found: f"\\{found[0]}", text.replace("\\", ""))


def _convert_space(node: LexborNode) -> str:
    return " " if node.attributes.get("width") else ""


def _convert_nothing(node: LexborNode) -> str:
    return ""


def _convert_arguments(node: LexborNode, depth: int, count: int) -> list[str]:
    """Return the LaTeX of the first elements; "" for missing ones."""
    written = [_convert(child, depth).strip() for child in _iter_elements(node)][:count]
    return written + [""] * (count - len(written))


def _group(tex: str) -> str:
    """Return LaTeX as one argument."""
    return tex if _ATOM.fullmatch(tex) and tex != "'" else f"{{{tex}}}"


def _attach(base: str, lower: str, upper: str) -> str:
    """Return a base with its scripts; primes need no mark."""
    if not base or not (_ATOM.fullmatch(base) or base.endswith(("}", ")", "]"))):
        base = f"{{{base}}}"
    if lower:
        base += f"_{_group(lower)}"
    if upper and not upper.strip("'"):
        return base + upper
    return f"{base}^{_group(upper)}" if upper else base


def _convert_superscript(node: LexborNode, depth: int) -> str:
    base, upper = _convert_arguments(node, depth, 2)
    return _attach(base, "", upper)


def _convert_subscript(node: LexborNode, depth: int) -> str:
    base, lower = _convert_arguments(node, depth, 2)
    return _attach(base, lower, "")


def _convert_scripts(node: LexborNode, depth: int) -> str:
    base, lower, upper = _convert_arguments(node, depth, 3)
    return _attach(base, lower, upper)


def _convert_fraction(node: LexborNode, depth: int) -> str:
    upper, lower = _convert_arguments(node, depth, 2)
    thickness = (node.attributes.get("linethickness") or "").strip()
    if re.fullmatch(r"0+(\.0+)?(px|pt|em|ex|%)?", thickness):
        return f"{{{upper} \\atop {lower}}}"
    if node.attributes.get("bevelled") == "true":
        return f"{_group(upper)}/{_group(lower)}"
    return f"\\frac{{{upper}}}{{{lower}}}"


def _convert_square_root(node: LexborNode, depth: int) -> str:
    return f"\\sqrt{{{_convert_row(node, depth).strip()}}}"


def _convert_root(node: LexborNode, depth: int) -> str:
    base, index = _convert_arguments(node, depth, 2)
    return f"\\sqrt[{index}]{{{base}}}"


def _has_limits(base: LexborNode) -> bool:
    """Return whether what is above or below the base is a limit, as of a sum."""
    text = _get_text(base).strip("\u2061 \n\t")
    return text in LARGE_OPERATORS or text.replace(" ", "") in FUNCTIONS


def _convert_limits(node: LexborNode, depth: int) -> str:
    """Return the LaTeX of `munder`, `mover` and `munderover`."""
    elements = list(_iter_elements(node))[:3]
    written = [_convert(element, depth).strip() for element in elements]
    if len(written) < 2:
        return "".join(written)
    base = written[0]
    lower = written[1] if node.tag != "mover" else ""
    upper = written[-1] if node.tag == "mover" or len(written) > 2 else ""
    if _has_limits(elements[0]):
        return _attach(base, lower, upper)
    if lower:
        command = UNDER_ACCENTS.get(_get_text(elements[1]).strip())
        base = f"\\{command}{{{base}}}" if command else f"\\underset{{{lower}}}{{{base}}}"
    if upper:
        command = OVER_ACCENTS.get(_get_text(elements[-1]).strip())
        base = f"\\{command}{{{base}}}" if command else f"\\overset{{{upper}}}{{{base}}}"
    return base


def _convert_prescripts(node: LexborNode, depth: int) -> str:
    """Return the LaTeX of `mmultiscripts`: pairs of scripts, those before the base last."""
    elements = list(_iter_elements(node))
    if not elements:
        return ""
    written = _convert(elements[0], depth).strip()
    scripts: dict[bool, list[str]] = {False: [], True: []}
    is_before = False
    for element in elements[1:]:
        if element.tag == "mprescripts":
            is_before = True
        else:
            scripts[is_before].append(_convert(element, depth).strip())
    pieces: list[str] = []
    for pair in zip(scripts[True][::2], scripts[True][1::2], strict=False):
        pieces.append(_attach("{}", *pair))
    for number, pair in enumerate(zip(scripts[False][::2], scripts[False][1::2], strict=False)):
        pieces.append(_attach("{}" if number else written, *pair))
    return "".join(pieces if scripts[False] else [*pieces, written])


def _convert_fence(node: LexborNode, depth: int) -> str:
    opening = node.attributes.get("open", "(") or ""
    closing = node.attributes.get("close", ")") or ""
    separators = (node.attributes.get("separators", ",") or "").replace(" ", "")
    pieces = [_escape_text(opening)]
    for number, child in enumerate(_iter_elements(node)):
        if number and separators:
            pieces.append(_escape_text(separators[min(number, len(separators)) - 1]) + " ")
        pieces.append(_convert(child, depth))
    return _join_pieces([*pieces, _escape_text(closing)])


def _convert_table(node: LexborNode, depth: int) -> str:
    rows = [_convert(child, depth).strip() for child in _iter_elements(node)]
    written = " \\\\ ".join(rows)
    return f"\\begin{{matrix}} {written} \\end{{matrix}}"


def _convert_table_row(node: LexborNode, depth: int) -> str:
    cells = [_convert(child, depth).strip() for child in _iter_elements(node)]
    # the first cell of `mlabeledtr` is the number of the equation
    return " & ".join(cells[1:] if node.tag == "mlabeledtr" else cells)


def _convert_semantics(node: LexborNode, depth: int) -> str:
    """Return the annotation in LaTeX; without one, the LaTeX of the first element."""
    for child in node.iter():
        if _is_tex_annotation(child):
            return normalize_tex(_get_text(child)).tex
    return _convert_arguments(node, depth, 1)[0]


def _convert_first(node: LexborNode, depth: int) -> str:
    return _convert_arguments(node, depth, 1)[0]


_LEAVES: dict[str, Callable[[LexborNode], str]] = {
    "mi": _convert_identifier,
    "mn": _convert_number,
    "mo": _convert_operator,
    "mtext": _convert_text,
    "ms": _convert_text,
    "mspace": _convert_space,
    "none": _convert_nothing,
    "mprescripts": _convert_nothing,
}
_CONVERTERS: dict[str, Callable[[LexborNode, int], str]] = {
    "msup": _convert_superscript,
    "msub": _convert_subscript,
    "msubsup": _convert_scripts,
    "mfrac": _convert_fraction,
    "msqrt": _convert_square_root,
    "mroot": _convert_root,
    "munder": _convert_limits,
    "mover": _convert_limits,
    "munderover": _convert_limits,
    "mmultiscripts": _convert_prescripts,
    "mfenced": _convert_fence,
    "mtable": _convert_table,
    "mtr": _convert_table_row,
    "mlabeledtr": _convert_table_row,
    "semantics": _convert_semantics,
    "maction": _convert_first,
}
