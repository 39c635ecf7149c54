"""An HTML page in a regular form: what `extract.tree` can read in one pass.

Reads HTML as UTF-8 bytes, gives text. lexbor parses it (HTML's own algorithm, so that unclosed tags and broken entities
are what a browser makes of them), drops what holds no text to read, and writes the rest out again. Promises: every
block has its end tag, and `<` and `>` stand for nothing but tags and comments. Time and memory are linear.
"""

import re

from selectolax.lexbor import LexborHTMLParser

# Programs, pictures, forms and navigation. Each name costs time on every page, so that here are only those which pages
# have many of, and those whose text is written as it is; `extract.tree` passes over the others that are not read.
_UNREAD_SELECTOR = "script,style,noscript,template,iframe,noembed,noframes,svg,nav,select,button,img,input"
# Text that is written as it is, and comments that may hold such tags.
_RAW = re.compile("<!--.*?-->|<xmp[^>]*>(.*?)</xmp>|<plaintext[^>]*>(.*)</plaintext>", re.DOTALL)


def normalize_html(html: bytes) -> str:
    """Write out again what is inside the body of a page; the limits of `extract.limit` are the caller's to check."""
    page = LexborHTMLParser(html)
    body = page.body or page.root
    if body is None:
        return ""
    for element in reversed(body.css(_UNREAD_SELECTOR)):  # what is inside another first
        element.decompose(recursive=False)
    written = body.html or ""
    if "<xmp" in written or "<plaintext" in written:
        written = _RAW.sub(_escape_raw_text, written)
    return written


def _escape_raw_text(raw: re.Match[str]) -> str:
    """Raw text as a browser shows it; nothing for a comment."""
    text = raw[1] or raw[2]
    return f"<pre>{text.replace('<', '&lt;').replace('>', '&gt;')}</pre>" if text else ""
