"""Cut the spans that match evaluation items out of a text, as GPT-3 did (Brown et al. 2020, appendix C).

Each match is removed with a margin on both sides, short remaining pieces are removed too, and a text that falls into
too many pieces is dropped. Pieces are joined by a blank line; margins end at white space.
"""

from collections.abc import Iterable
from typing import NamedTuple

from llmsys.config.decontamination import NgramDecontaminationConfig

Span = tuple[int, int]


class CutResult(NamedTuple):
    """The remaining text, or the reason why there is none (`failure`), with the number of pieces."""

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
    """Return the spans with their margins, sorted; touching ones are merged, and each ends between words."""
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
