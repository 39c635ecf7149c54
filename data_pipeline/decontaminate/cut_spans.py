"""A text and the spans that match evaluation items in, the text without them out.

GPT-3's way (Brown et al. 2020, appendix C): each match goes with a margin on both sides, short pieces go too, and a
text that falls into many pieces goes as a whole. Pieces are joined by an empty line; margins end at white space.
"""

from collections.abc import Iterable
from typing import NamedTuple

from llmsys.config.decontamination import NgramDecontaminationConfig

Span = tuple[int, int]


class CutResult(NamedTuple):
    """What is left of a text, or why nothing is (`failure`), with the number of pieces."""

    text: str
    pieces: int
    failure: str = ""


def cut_spans(text: str, spans: Iterable[Span], config: NgramDecontaminationConfig) -> CutResult:
    """Cut the spans out of a text."""
    pieces: list[str] = []
    position = 0
    for begin, end in [*merge_spans(text, spans, config.margin_characters), (len(text), len(text))]:
        piece = text[position:begin].strip()
        if len(piece) >= max(config.min_piece_characters, 1):
            pieces.append(piece)
        position = end
    if not pieces:
        return CutResult("", 0, "nothing left")
    if len(pieces) > config.max_pieces:
        return CutResult("", len(pieces), "pieces")
    return CutResult("\n\n".join(pieces), len(pieces))


def merge_spans(text: str, spans: Iterable[Span], margin: int) -> list[Span]:
    """Return the spans with their margins, those that touch as one, in order; each ends between words."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        begin, end = _find_word_start(text, max(0, begin - margin)), _find_word_end(text, min(len(text), end + margin))
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


_LONGEST_WORD = 100  # characters; a margin that ends in a longer run without spaces ends right there


def _find_word_start(text: str, position: int) -> int:
    for start in range(position, max(0, position - _LONGEST_WORD), -1):
        if text[start - 1].isspace():
            return start
    return position


def _find_word_end(text: str, position: int) -> int:
    for end in range(position, min(len(text), position + _LONGEST_WORD)):
        if text[end].isspace():
            return end
    return position
