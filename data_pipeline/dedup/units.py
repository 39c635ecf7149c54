"""Paragraphs, lines or sentences of texts: where they end, and what runs of them are compared by.

Reads texts, gives `TextSegments`: a text is cut at `ends`, each piece with the white space before it, and `keys[i]` is what
the run of pieces that begins with piece i is compared by, None where it is never a duplicate.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from data_pipeline.dedup.sentences import SentenceSplitter
from data_pipeline.dedup.simplify import simplify_texts
from llmsys.config.deduplicate import LineDedupConfig, ParagraphDedupConfig, SentenceDedupConfig

SpansConfig = ParagraphDedupConfig | LineDedupConfig | SentenceDedupConfig

_BLANK_LINES = re.compile(r"\n\s*\n")
_NEWLINE = re.compile(r"\n")


class TextSegments(NamedTuple):
    """The pieces of one text; there may be fewer keys than pieces."""

    ends: list[int]
    keys: list[str | None]


@lru_cache(maxsize=1)
def get_sentence_splitter() -> SentenceSplitter:
    """One splitter per process: it remembers how chunks are split."""
    return SentenceSplitter()


def split_segments(texts: Sequence[str], config: SpansConfig) -> list[TextSegments]:
    """Cut texts as the config says."""
    if isinstance(config, SentenceDedupConfig):
        return _split_sentences(texts, config)
    separator = _BLANK_LINES if isinstance(config, ParagraphDedupConfig) else _NEWLINE
    return [_split_by_separator(text, separator, config) for text in texts]


def get_run_length(config: SpansConfig) -> int:
    """How many pieces a key stands for."""
    return config.sentences if isinstance(config, SentenceDedupConfig) else 1


def cut_at_ends(text: str, ends: Sequence[int]) -> list[str]:
    """Cut a text; what lies behind the last end is in no piece."""
    return [text[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def remove_segment_runs(text: str, units: TextSegments, first: Sequence[int], length: int) -> str:
    """Return the text without the runs of pieces that begin at `first`."""
    gone = {place for begin in first for place in range(begin, begin + length)}
    kept = [piece for place, piece in enumerate(cut_at_ends(text, units.ends)) if place not in gone]
    return "".join(kept).lstrip()


def _split_by_separator(text: str, separator: re.Pattern[str], config: ParagraphDedupConfig | LineDedupConfig) -> TextSegments:
    ends = [*(match.start() for match in separator.finditer(text)), len(text)]
    pieces = [piece.strip() for piece in cut_at_ends(text, ends)]
    if isinstance(config, LineDedupConfig):
        pieces = [piece.lower() for piece in pieces]
    return TextSegments(ends, [piece if len(piece) >= max(1, config.min_characters) else None for piece in pieces])


def _split_sentences(texts: Sequence[str], config: SentenceDedupConfig) -> list[TextSegments]:
    """Runs of sentences, simplified and joined; white space behind the last sentence is none."""
    ends_of = [found.ends for found in get_sentence_splitter().find_boundaries(texts)]
    sentences_of = [
        [stripped for piece in cut_at_ends(text, ends) if (stripped := piece.strip())]
        for text, ends in zip(texts, ends_of, strict=True)
    ]
    simple = iter(simplify_texts([sentence for sentences in sentences_of for sentence in sentences]))
    found = []
    for ends, sentences in zip(ends_of, sentences_of, strict=True):
        parts = list(islice(simple, len(sentences)))
        runs = [" ".join(run) for run in zip(*(parts[start:] for start in range(config.sentences)), strict=False)]
        found.append(TextSegments(ends, [run if run.strip() else None for run in runs]))
    return found
