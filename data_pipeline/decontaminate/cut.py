"""A text and the spans that match evaluation items in, the text without them out.

GPT-3's way (Brown et al. 2020, appendix C): each match goes with a margin on both sides, short pieces go too, and a
text that falls into many pieces goes as a whole. Pieces are joined by an empty line; margins end at white space.
"""

from collections.abc import Iterable
from typing import NamedTuple

from llmsys.config.decontaminate import NgramDecontamination

Span = tuple[int, int]


class Cut(NamedTuple):
    """What is left of a text, or why nothing is (`failed`), with the number of pieces."""

    text: str
    pieces: int
    failed: str = ""


def cut_spans(text: str, spans: Iterable[Span], config: NgramDecontamination) -> Cut:
    """Cut the spans out of a text."""
    pieces: list[str] = []
    position = 0
    for begin, end in [*merged(text, spans, config.margin_characters), (len(text), len(text))]:
        piece = text[position:begin].strip()
        if len(piece) >= max(config.min_piece_characters, 1):
            pieces.append(piece)
        position = end
    if not pieces:
        return Cut("", 0, "nothing left")
    if len(pieces) > config.max_pieces:
        return Cut("", len(pieces), "pieces")
    return Cut("\n\n".join(pieces), len(pieces))


def merged(text: str, spans: Iterable[Span], margin: int) -> list[Span]:
    """Return the spans with their margins, those that touch as one, in order; each ends between words."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        begin, end = _word_start(text, max(0, begin - margin)), _word_end(text, min(len(text), end + margin))
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


_LONGEST_WORD = 100  # characters; a margin that ends in a longer run without spaces ends right there


def _word_start(text: str, position: int) -> int:
    for start in range(position, max(0, position - _LONGEST_WORD), -1):
        if text[start - 1].isspace():
            return start
    return position


def _word_end(text: str, position: int) -> int:
    for end in range(position, min(len(text), position + _LONGEST_WORD)):
        if text[end].isspace():
            return end
    return position
