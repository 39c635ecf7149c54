"""The attributes of a page, counted in its bytes before it is parsed.

Every attribute is a node of the parsed page, and is compared with those before it in its element. What looks like a tag
in a comment or a program counts as well.
"""

import re

_START_TAG = re.compile(rb"<[a-zA-Z][^\s/>]*")
_NO_ATTRIBUTES = 8_192  # bytes that hold a tag without many attributes
_ATTRIBUTE = re.compile(rb"[\s/]*+=?[^\s/>=]++(?:\s*+=\s*+(?:\"[^\"]*+\"|'[^']*+'|[^\s>]*+))?|[\s/]*+=")


def count_attributes_over_limit(html: bytes, limit: int) -> int:
    """The attributes of the first element found to have more than `limit`, counted to one beyond it; or 0.

    Tags are looked for where `_NO_ATTRIBUTES` bytes hold no other; what is shorter has few attributes.
    """
    start = 0
    while len(html) - start > _NO_ATTRIBUTES:
        close = html.rfind(b">", start, start + _NO_ATTRIBUTES)
        if close >= 0 and html.find(b"<", start, close) >= 0:
            start = close + 1
            continue
        end = html.find(b">", start + _NO_ATTRIBUTES)
        end = len(html) if end < 0 else end
        for tag in (html.rfind(b"<", 0, start), _find_next_tag(html, start, end)):
            name = _START_TAG.match(html, tag) if tag >= 0 else None
            if name and _count_tag_attributes(html, name.end(), limit)[0] > limit:
                return limit + 1
        start = end + 1
    return 0


def _find_next_tag(html: bytes, start: int, end: int) -> int:
    """Where the first tag with a name starts, or -1."""
    place = html.find(b"<", start, end)
    while place >= 0 and not html[place + 1 : place + 2].isalpha():
        place = html.find(b"<", place + 1, end)
    return place


def count_attributes(html: bytes, limit: int) -> int:
    """The attributes of all elements, counted to one beyond the limit; those in comments and programs count too."""
    count = 0
    tag = _START_TAG.search(html)
    while tag and count <= limit:
        more, end = _count_tag_attributes(html, tag.end(), limit - count)
        count += more
        tag = _START_TAG.search(html, end)
    return count


def _count_tag_attributes(html: bytes, end: int, limit: int) -> tuple[int, int]:
    """The attributes behind the name of a tag, counted to one beyond the limit, and where they end."""
    count = 0
    while count <= limit and (found := _ATTRIBUTE.match(html, end)):
        count, end = count + 1, found.end()
    return count, end
