"""The attributes of a page, counted in its bytes before it is parsed.

Every attribute is a node of the parsed page, and is compared with those before it in its element. What looks like a tag
in a comment or a program counts as well.

How much work a page may ask of a parser, counted before it is parsed: bytes, nodes, nesting, attributes.

Reads bytes of HTML, gives the limit that a page is beyond, or nothing. HTML lets 30 kB ask for gigabytes: formatting
elements that are not closed are opened again in every paragraph after them (WHATWG HTML, 13.2.4.3), end tags look
through all open elements, and every attribute is compared with those before it. Promises: time linear in the bytes,
and counts that are upper bounds, so that what passes here ends soon.
"""

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

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


Nesting = Literal["linear", "square"]

_TAG = re.compile(rb"<(/?)([a-zA-Z][^\s/>]*)")
# Formatting elements open again by themselves; of `a` only one can be open.
_FORMATTING = frozenset(b"b big code em font i nobr s small strike strong tt u".split())
_WELL_FORMED = rb'(?:\s++[a-z:-]++(?:="[^"<>]*+")?)*+\s*+>[^<]*+'
# A formatting element around text and spans: its end tag ends it whatever it stands in.
_CLOSED_AT_ONCE = re.compile(
    rb"<(%b)%b(?:</?span%b)*+</\1>" % (b"|".join(sorted(_FORMATTING)), _WELL_FORMED, _WELL_FORMED), re.IGNORECASE
)
# Elements that hold nothing, and those that the next of their kind closes.
_FLAT = frozenset(
    b"area base br col embed hr img input link meta source track wbr param p li dt dd tr td th thead tbody tfoot "
    b"colgroup rp rt html head body".split()
)
# No end tag inside one of these closes what was opened outside (13.2.4.2, scopes).
_SCOPES = frozenset(b"table template applet marquee object svg math select button".split())
_BLOCKS_MOVED = 7  # an end tag moves its formatting element through at most so many blocks (13.2.6.4.7)
_FEW = 4_000_000  # pairs of tags; the worst page with fewer makes a quarter as many nodes
_SHORTEST_ATTRIBUTE = 2  # bytes, with what parts it from the one before
_OPTION_STEPS = 16  # what one open option of a choice costs beside another element
_STEPS_PER_NODE = 1_000  # open elements that a tag may have to look through


@dataclass(frozen=True, slots=True)
class LimitViolation:
    """A limit that a page is beyond: what was counted, how much of it there is, and how much there may be."""

    test: str
    value: float
    threshold: float


def find_limit_violation(
    html: bytes, *, nesting: Nesting, max_nodes: int, max_attributes: int
) -> LimitViolation | None:
    """The first limit that a page is beyond, or None.

    Args:
        html: the page; its length is the caller's to check.
        nesting: how the parser's time grows with the depth of elements. Where it is by the square, a page may take
            `_STEPS_PER_NODE` steps for each node that it may have.
        max_nodes: elements, texts and attributes that may come of the page.
        max_attributes: attributes that one element may have.
    """
    is_tag = np.frombuffer(html, np.uint8) == ord("<")
    tags = int(np.count_nonzero(is_tag))
    nodes = 2 * tags + 1  # an element and the text behind it
    if nodes + len(html) // _SHORTEST_ATTRIBUTE > max_nodes:
        nodes += count_attributes(html, max_nodes - nodes)
    if nodes > max_nodes:
        return LimitViolation("nodes", nodes, max_nodes)
    if tags * tags > _FEW and (tags > max_nodes // 32 or tags * _count_open_formatting(html, is_tag) > _FEW):
        depth, reopened, options = count_open_elements(html)
        nodes += tags * reopened
        if nodes > max_nodes:
            return LimitViolation("nodes", nodes, max_nodes)
        steps = tags * (depth if nesting == "square" else options)
        if steps > max_nodes * _STEPS_PER_NODE:
            return LimitViolation("steps", steps, max_nodes * _STEPS_PER_NODE)
    attributes = count_attributes_over_limit(html, max_attributes)
    return LimitViolation("attributes", attributes, max_attributes) if attributes else None


def _count_open_formatting(html: bytes, is_tag: npt.NDArray[np.bool_]) -> int:
    """How many formatting elements may stay open; others whose names begin with the same two letters count too."""
    data = np.frombuffer(html + b"  ", np.uint8)
    start = np.flatnonzero(is_tag) + 1
    starts = int(np.count_nonzero(_FORMATTING_STARTS[data[start], data[start + 1]]))
    return starts - len(_CLOSED_AT_ONCE.findall(html)) if starts * len(start) > _FEW else starts


def _build_formatting_starts() -> npt.NDArray[np.bool_]:
    """By the two bytes behind `<`: whether a formatting element may begin there."""
    starts = np.zeros((256, 256), np.bool_)
    for name in _FORMATTING:
        for first in name[:1] + name[:1].upper():
            starts[first, list(name[1:2] + name[1:2].upper() or b"\t\n\f\r />")] = True
    return starts


_FORMATTING_STARTS = _build_formatting_starts()


def count_open_elements(html: bytes) -> tuple[int, int, int]:
    """The most elements that are open at a time, formatting elements that open again, and the weight of options.

    Where the rules of HTML are involved, more is counted rather than less: an end tag closes its element only when
    it certainly does.
    """
    page = _OpenElements()
    options = most_options = 0
    for slash, name in _TAG.findall(html):
        name = name.lower()
        if name in _FORMATTING:
            (page.close_formatting if slash else page.open_formatting)(name)
        elif name == b"option":
            options += -1 if slash else 1
            most_options = max(most_options, options)
        elif name not in _FLAT:
            (page.close_element if slash else page.open_element)(name)
    weighed = most_options * _OPTION_STEPS
    return page.deepest + weighed, page.most_formatting, weighed


class _OpenElements:
    """The elements that are open while one reads on, and the formatting elements that would open again."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self.places: dict[bytes, list[int]] = {}  # where in `names` each name stands
        self.scopes: list[int] = [-1]  # where the elements stand that end tags do not leave
        self.formatting: dict[bytes, list[int]] = {}  # how many elements were open when each was opened
        self.num_formatting = self.deepest = self.most_formatting = 0

    def open_element(self, name: bytes) -> None:
        place = len(self.names)
        self.names.append(name)
        self.places.setdefault(name, []).append(place)
        if name in _SCOPES:
            self.scopes.append(place)
        self.deepest = max(self.deepest, place + 1 + self.num_formatting)

    def close_element(self, name: bytes) -> None:
        places = self.places.get(name)
        if not places or places[-1] < self.scopes[-1]:
            return
        place = places[-1]
        for closed in self.names[place:]:
            self.places[closed].pop()
        del self.names[place:]
        while self.scopes[-1] >= place:
            self.scopes.pop()

    def open_formatting(self, name: bytes) -> None:
        self.formatting.setdefault(name, []).append(len(self.names))
        self.num_formatting += 1
        self.most_formatting = max(self.most_formatting, self.num_formatting)
        self.deepest = max(self.deepest, len(self.names) + self.num_formatting)

    def close_formatting(self, name: bytes) -> None:
        heights = self.formatting.get(name)
        if not heights or not -_BLOCKS_MOVED <= len(self.names) - heights[-1] <= _BLOCKS_MOVED:
            return
        if heights[-1] > self.scopes[-1]:
            heights.pop()
            self.num_formatting -= 1
