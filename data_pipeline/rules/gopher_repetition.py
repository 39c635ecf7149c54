"""Gopher's repetition rule (Rae et al. 2021, table A1), as datatrove reads it.

Reads texts, measures what of each is repeated paragraphs, lines and n-grams of words, and drops what repeats too much.
Second and later occurrences count, the first is free. Lengths are code points, the denominator is the whole text.
"""

import re
from collections.abc import Sequence

import numpy as np

from data_pipeline.rules.batch import TextBatch, share
from data_pipeline.rules.ngram import duplicate_ngram_characters, top_ngram_characters
from data_pipeline.rules.verdict import Floats, Limit, Verdicts, fail_first, first_broken
from data_pipeline.rules.words import Integers
from llmsys.config.text import GopherRepetitionConfig

_PARAGRAPH_BREAK = re.compile(r"\n{2,}")
_TOP, _SHORTEST, _LONGEST = 4, 5, 10


class GopherRepetition:
    """Drops documents that repeat themselves."""

    kind = "gopher_repetition"

    def __init__(self, config: GopherRepetitionConfig) -> None:
        self._limits = _limits(config)

    def judge(self, batch: TextBatch) -> Verdicts:
        """Verdicts in the order paragraphs, lines, most frequent n-grams, repeated n-grams."""
        verdicts = first_broken(self._limits, _measure(batch), len(batch))
        return fail_first(verdicts, "empty text", batch.characters == 0)


def _measure(batch: TextBatch) -> dict[str, Floats]:
    paragraphs = _repeats([_PARAGRAPH_BREAK.split(text.strip()) for text in batch.texts])
    lines = _repeats([_lines(text) for text in batch.texts])
    statistics = {
        "duplicate_paragraph_share": share(paragraphs[1], paragraphs[0]),
        "duplicate_paragraph_character_share": share(paragraphs[2], batch.characters),
        "duplicate_line_share": share(lines[1], lines[0]),
        "duplicate_line_character_share": share(lines[2], batch.characters),
    }
    for n, characters in top_ngram_characters(batch.words, _TOP).items():
        statistics[f"top_{n}gram_share"] = share(characters, batch.characters)
    for n, characters in duplicate_ngram_characters(batch.words, _SHORTEST, _LONGEST).items():
        statistics[f"duplicate_{n}gram_share"] = share(characters, batch.characters)
    return statistics


def _lines(text: str) -> list[str]:
    """The text split at runs of newlines; a newline at an end of the text leaves an empty line there."""
    lines = list(filter(None, text.split("\n")))
    if text.startswith("\n"):
        lines.append("")
    if text.endswith("\n"):
        lines.append("")
    return lines or [""]


def _repeats(documents: Sequence[list[str]]) -> tuple[Integers, Integers, Integers]:
    """Per document: elements, elements that occurred before, and the characters of these."""
    elements = np.fromiter(map(len, documents), np.int64, len(documents))
    counts, characters = np.zeros_like(elements), np.zeros_like(elements)
    for number, parts in enumerate(documents):
        distinct = set(parts)
        if len(distinct) < len(parts):
            counts[number] = len(parts) - len(distinct)
            characters[number] = sum(map(len, parts)) - sum(map(len, distinct))
    return elements, counts, characters


def _limits(config: GopherRepetitionConfig) -> list[Limit]:
    """The tests in their order."""
    named = {
        "duplicate_paragraph_share": "share of duplicate paragraphs",
        "duplicate_paragraph_character_share": "share of characters in duplicate paragraphs",
        "duplicate_line_share": "share of duplicate lines",
        "duplicate_line_character_share": "share of characters in duplicate lines",
    }
    for n in range(2, _TOP + 1):
        named[f"top_{n}gram_share"] = f"share of characters in the most frequent {n}-gram"
    for n in range(_SHORTEST, _LONGEST + 1):
        named[f"duplicate_{n}gram_share"] = f"share of characters in duplicate {n}-grams"
    return [Limit(test, name, "above", getattr(config, f"max_{name}")) for name, test in named.items()]
