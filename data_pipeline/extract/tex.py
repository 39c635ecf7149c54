"""Bring LaTeX that pages carry into one line without delimiters.

Invariants:
- Time is linear in the source.
"""

import re
from typing import NamedTuple

_COMMENT = re.compile(r"(?<!\\)%[^\n]*\n")
_DELIMITERS = (("$$", "$$", True), ("\\[", "\\]", True), ("\\(", "\\)", False), ("$", "$", False))
_STYLES = ("\\displaystyle", "\\textstyle", "\\scriptstyle")


class TexSource(NamedTuple):
    """LaTeX in one line, and whether its delimiters were those of a displayed formula."""

    tex: str
    is_display: bool


def normalize_tex(source: str) -> TexSource:
    """Remove comments, CDATA marks, line breaks, delimiters, and a group that sets the style of
    the whole formula.

    Args:
        source: LaTeX from a script, an annotation or an attribute.

    Returns:
        The formula; "" for white space.
    """
    tex = _remove_cdata(source.strip())
    if "\n" in tex:
        tex = _COMMENT.sub("\n", tex)
    tex = " ".join(tex.split())
    is_display = False
    for opening, closing, displays in _DELIMITERS:
        size = len(opening) + len(closing)
        if len(tex) > size and tex.startswith(opening) and tex.endswith(closing):
            inner = tex[len(opening) : -len(closing)]
            if opening not in inner:
                # `$latex …$` is WordPress's shortcode.
                tex = inner.removeprefix("latex ").strip()
                is_display = displays
                break
    for style in _STYLES:
        if tex.startswith("{" + style) and _is_one_group(tex):
            tex = tex[1:-1]
        if tex.startswith(style) and not tex[len(style) :][:1].isalpha():
            tex = tex[len(style) :].strip()
    return TexSource(tex, is_display)


def _remove_cdata(source: str) -> str:
    """Return the content of a CDATA section; kramdown writes its marks as comments of TeX."""
    inner = source.removeprefix("%").lstrip()
    if not inner.startswith("<![CDATA["):
        return source
    inner = inner.removeprefix("<![CDATA[")
    return inner.removesuffix("]]>").rstrip().removesuffix("%")


def _is_one_group(tex: str) -> bool:
    """Return whether the last character closes the brace that the first one opens."""
    depth = 0
    for found in re.finditer(r"\\.|[{}]", tex):
        if found[0] == "{":
            depth += 1
        elif found[0] == "}":
            depth -= 1
            if depth == 0:
                return found.end() == len(tex)
    return False
