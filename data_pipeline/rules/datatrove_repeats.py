"""What datatrove's reading of Gopher's repetition rule measures.

Second and later occurrences count, the first is free; the denominator is the whole text.
"""

import re
from collections.abc import Sequence

import numpy as np

from data_pipeline.rules.batch import DocumentBatch, compute_share
from data_pipeline.rules.gopher_lines import split_at_newline_runs
from data_pipeline.rules.joined_ngram import count_duplicate_ngram_characters
from data_pipeline.rules.ngram import iter_repeated_ngrams, select_top_ngrams
from data_pipeline.rules.verdict import Floats
from data_pipeline.rules.word_columns import Integers

_PARAGRAPH_BREAK = re.compile(r"\n{2,}")
_TOP, _SHORTEST, _LONGEST = 4, 5, 10


def measure_repeated_lines(batch: DocumentBatch) -> dict[str, Floats]:
    """Shares of repeated paragraphs and lines, and of their characters."""
    paragraphs = _count_repeats([_split_paragraphs(text) for text in batch.texts])
    lines = _count_repeats([split_at_newline_runs(text) for text in batch.texts])
    return {
        "duplicate_paragraph_share": compute_share(paragraphs[1], paragraphs[0]),
        "duplicate_paragraph_character_share": compute_share(paragraphs[2], batch.character_counts),
        "duplicate_line_share": compute_share(lines[1], lines[0]),
        "duplicate_line_character_share": compute_share(lines[2], batch.character_counts),
    }


def measure_top_ngrams(batch: DocumentBatch) -> dict[str, Floats]:
    """Shares of the most frequent n-gram, in characters."""
    words = batch.words
    statistics: dict[str, Floats] = {}
    for n, groups in iter_repeated_ngrams(words, _TOP):
        top = select_top_ngrams(words, groups, once=True)
        statistics[f"top_{n}gram_share"] = compute_share((top.characters + n - 1) * top.counts, batch.character_counts)
    return statistics


def measure_repeated_ngrams(batch: DocumentBatch) -> dict[str, Floats]:
    """Shares of n-grams that occurred before, in characters."""
    found = count_duplicate_ngram_characters(batch, _SHORTEST, _LONGEST)
    return {f"duplicate_{n}gram_share": compute_share(characters, batch.character_counts) for n, characters in found.items()}


def _split_paragraphs(text: str) -> list[str]:
    """The stripped text split at runs of newlines, two at least."""
    stripped = text.strip()
    return _PARAGRAPH_BREAK.split(stripped) if "\n\n\n" in stripped else stripped.split("\n\n")


def _count_repeats(documents: Sequence[list[str]]) -> tuple[Integers, Integers, Integers]:
    """Per document: elements, elements that occurred before, and the characters of these."""
    elements = np.fromiter(map(len, documents), np.int64, len(documents))
    counts, characters = np.zeros_like(elements), np.zeros_like(elements)
    for number, parts in enumerate(documents):
        distinct = set(parts)
        if len(distinct) < len(parts):
            counts[number] = len(parts) - len(distinct)
            characters[number] = sum(map(len, parts)) - sum(map(len, distinct))
    return elements, counts, characters
