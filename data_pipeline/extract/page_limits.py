"""Bound the work that a page can cause in a parser, before it is parsed: bytes, nodes, nesting,
attributes.

30 kB of HTML can take gigabytes: unclosed formatting elements are reopened in every following
paragraph (WHATWG HTML, 13.2.4.3), end tags search all open elements, and every attribute is a node
and is compared with those before it in its element.

Invariants:
- Time is linear in the bytes.
- Counts are upper bounds: tag-like text in comments and scripts counts too.
"""

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

_START_TAG = re.compile(rb"<[a-zA-Z][^\s/>]*")
_NO_ATTRIBUTES = 8_192  # a shorter tag has few attributes
_ATTRIBUTE = re.compile(
    rb"[\s/]*+=?[^\s/>=]++(?:\s*+=\s*+(?:\"[^\"]*+\"|'[^']*+'|[^\s>]*+))?|[\s/]*+="
)


def count_attributes_over_limit(html: bytes, limit: int) -> int:
    """Return `limit` + 1 if an element has more than `limit` attributes, else 0.

    Tags are searched only where `_NO_ATTRIBUTES` bytes hold no other one; shorter tags have few
    attributes.
    """
    start = 0
    while len(html) - start > _NO_ATTRIBUTES:
        close = html.rfind(b">", start, start + _NO_ATTRIBUTES)
        if close >= 0 and html.find(b"<", start, close) >= 0:
            start = close + 1
            continue
        end = html.find(b">", start + _NO_ATTRIBUTES)
        end = len(html) if end < 0 else end
        # A long tag began before these bytes, or begins in them.
        for tag in (html.rfind(b"<", 0, start), _find_next_tag(html, start, end)):
            name = _START_TAG.match(html, tag) if tag >= 0 else None
            if name and _count_tag_attributes(html, name.end(), limit)[0] > limit:
                return limit + 1
        start = end + 1
    return 0


def _find_next_tag(html: bytes, start: int, end: int) -> int:
    """Return the position of the first tag with a name, or -1."""
    position = html.find(b"<", start, end)
    while position >= 0 and not html[position + 1 : position + 2].isalpha():
        position = html.find(b"<", position + 1, end)
    return position


def count_attributes(html: bytes, limit: int) -> int:
    """Count the attributes of all elements, up to `limit` + 1; those in comments and scripts
    count too.
    """
    count = 0
    tag = _START_TAG.search(html)
    while tag and count <= limit:
        more, end = _count_tag_attributes(html, tag.end(), limit - count)
        count += more
        tag = _START_TAG.search(html, end)
    return count


def _count_tag_attributes(html: bytes, end: int, limit: int) -> tuple[int, int]:
    """Return the number of attributes after the name of a tag, up to `limit` + 1, and their end."""
    count = 0
    while count <= limit and (found := _ATTRIBUTE.match(html, end)):
        count, end = count + 1, found.end()
    return count, end


Nesting = Literal["linear", "square"]

_TAG = re.compile(rb"<(/?)([a-zA-Z][^\s/>]*)")
# Formatting elements that are reopened; `a` is left out, because only one can be open.
_FORMATTING = frozenset(b"b big code em font i nobr s small strike strong tt u".split())
_WELL_FORMED = rb'(?:\s++[a-z:-]++(?:="[^"<>]*+")?)*+\s*+>[^<]*+'
# A formatting element around text and spans only: its end tag always closes it.
_CLOSED_AT_ONCE = re.compile(
    rb"<(%b)%b(?:</?span%b)*+</\1>" % (b"|".join(sorted(_FORMATTING)), _WELL_FORMED, _WELL_FORMED),
    re.IGNORECASE,
)
# Void elements, and those that the next one of their kind closes.
_FLAT = frozenset(
    (
        b"area base br col embed hr img input link meta source track wbr param p li dt dd tr td th "
        b"thead tbody tfoot colgroup rp rt html head body"
    ).split()
)
# No end tag inside one of these closes what was opened outside (13.2.4.2, scopes).
_SCOPES = frozenset(b"table template applet marquee object svg math select button".split())
# an end tag moves its formatting element through at most so many blocks (13.2.6.4.7)
_BLOCKS_MOVED = 7
_FEW = 4_000_000  # pairs of tags; the worst page with fewer has a quarter as many nodes
_SHORTEST_ATTRIBUTE = 2  # bytes, with the separator before it
_OPTION_STEPS = 16  # cost of an open <option> relative to another element
_STEPS_PER_NODE = 1_000  # open elements that a tag may have to look through


@dataclass(frozen=True, slots=True)
class LimitViolation:
    """A limit that a page exceeds: the counted quantity, its value, and the limit."""

    test: str
    value: float
    threshold: float


def find_limit_violation(
    html: bytes, *, nesting: Nesting, max_nodes: int, max_attributes: int
) -> LimitViolation | None:
    """Return the first limit that a page exceeds, or None.

    Args:
        html: the page; the caller has checked its length.
        nesting: growth of the parser's time with the depth of elements. With `square`, a page may
            take `_STEPS_PER_NODE` steps for each of its allowed nodes.
        max_nodes: limit of elements, texts and attributes of the page.
        max_attributes: limit of attributes of one element.
    """
    is_tag = np.frombuffer(html, np.uint8) == ord("<")
    tags = int(np.count_nonzero(is_tag))
    nodes = 2 * tags + 1  # an element and the text after it
    if nodes + len(html) // _SHORTEST_ATTRIBUTE > max_nodes:
        nodes += count_attributes(html, max_nodes - nodes)
    if nodes > max_nodes:
        return LimitViolation("nodes", nodes, max_nodes)
    if tags * tags > _FEW and (
        tags > max_nodes // 32 or tags * _count_open_formatting(html, is_tag) > _FEW
    ):
        depth, reopened, options = count_open_elements(html)
        nodes += tags * reopened
        if nodes > max_nodes:
            return LimitViolation("nodes", nodes, max_nodes)
        # Every tag may look through all open elements.
        steps = tags * (depth if nesting == "square" else options)
        if steps > max_nodes * _STEPS_PER_NODE:
            return LimitViolation("steps", steps, max_nodes * _STEPS_PER_NODE)
    attributes = count_attributes_over_limit(html, max_attributes)
    return LimitViolation("attributes", attributes, max_attributes) if attributes else None


def _count_open_formatting(html: bytes, is_tag: npt.NDArray[np.bool_]) -> int:
    """Return an upper bound of the formatting elements that stay open, by the first two letters
    of their names.
    """
    data = np.frombuffer(html + b"  ", np.uint8)
    start = np.flatnonzero(is_tag) + 1
    starts = int(np.count_nonzero(_FORMATTING_STARTS[data[start], data[start + 1]]))
    return starts - len(_CLOSED_AT_ONCE.findall(html)) if starts * len(start) > _FEW else starts


def _build_formatting_starts() -> npt.NDArray[np.bool_]:
    """Return, by the two bytes after `<`, whether a formatting element may begin there."""
    starts = np.zeros((256, 256), np.bool_)
    for name in _FORMATTING:
        for first in name[:1] + name[:1].upper():
            starts[first, list(name[1:2] + name[1:2].upper() or b"\t\n\f\r />")] = True
    return starts


_FORMATTING_STARTS = _build_formatting_starts()


def count_open_elements(html: bytes) -> tuple[int, int, int]:
    """Return the maximum of open elements, of reopened formatting elements, and the weight of open
    options.

    An end tag closes its element only where HTML's rules certainly close it, so that the counts are
    upper bounds.
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
    """The open elements at a position of the page, and the formatting elements that would be
    reopened.
    """

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self.positions: dict[bytes, list[int]] = {}  # indices in `names` of each name
        self.scopes: list[int] = [-1]  # indices of the elements that end tags do not leave
        # how many elements were open when each was opened
        self.formatting: dict[bytes, list[int]] = {}
        self.num_formatting = self.deepest = self.most_formatting = 0

    def open_element(self, name: bytes) -> None:
        index = len(self.names)
        self.names.append(name)
        self.positions.setdefault(name, []).append(index)
        if name in _SCOPES:
            self.scopes.append(index)
        self.deepest = max(self.deepest, index + 1 + self.num_formatting)

    def close_element(self, name: bytes) -> None:
        positions = self.positions.get(name)
        if not positions or positions[-1] < self.scopes[-1]:
            return
        index = positions[-1]
        # An end tag closes all elements inside of its own.
        for closed in self.names[index:]:
            self.positions[closed].pop()
        del self.names[index:]
        while self.scopes[-1] >= index:
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
