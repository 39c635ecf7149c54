"""Measure repetition for the dialects paper, dolma and dclm of Gopher's rule; `gopher_repetition` compares them."""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from data_pipeline.rules.document_batch import DocumentBatch, compute_share
from data_pipeline.rules.gopher_lines import split_at_newline_runs, split_nonblank_lines
from data_pipeline.rules.repeated_ngrams import iter_repeated_ngrams, select_top_ngrams
from data_pipeline.rules.verdict import Floats
from data_pipeline.text.ragged_arrays import compute_offsets
from data_pipeline.text.word_columns import Integers, WordColumns

_TOP = (2, 3, 4)
_LONGEST = 10
_PARAGRAPH_BREAK = re.compile(r"\n{2,}")
_PAIR_OF_NEWLINES = "\n\n"


def measure_paper_repetition(batch: DocumentBatch) -> dict[str, Floats]:
    """Return the paper's statistics: later copies count, and the whole text is the denominator."""
    lines = _RepeatedParts([split_nonblank_lines(text) for text in batch.texts], first_is_free=True)
    paragraphs = _RepeatedParts(
        [_strip_parts(_PARAGRAPH_BREAK.split(text)) for text in batch.texts], first_is_free=True
    )
    statistics = lines.measure_shares("line", batch.character_counts) | paragraphs.measure_shares(
        "paragraph", batch.character_counts
    )
    words = batch.whitespace_words
    for n, groups in iter_repeated_ngrams(words, _LONGEST):
        if n in _TOP:
            top = select_top_ngrams(words, groups)
            statistics[f"top_{n}gram_share"] = compute_share(
                (top.characters + n - 1) * top.counts, batch.character_counts
            )
        else:
            covered = _count_covered_characters(words, groups.positions[groups.is_later], n)
            statistics[f"duplicate_{n}gram_share"] = compute_share(covered, batch.character_counts)
    return statistics


def measure_dolma_repetition(batch: DocumentBatch) -> dict[str, Floats]:
    """Return dolma's statistics: every occurrence counts, white space does not."""
    lines = _RepeatedParts([split_at_newline_runs(text) for text in batch.texts], first_is_free=False)
    words = batch.whitespace_words
    characters = np.maximum(words.sum_per_document(words.word_lengths), 1)
    statistics = lines.measure_shares("line", characters)
    for n, groups in iter_repeated_ngrams(words, _LONGEST):
        if n in _TOP:
            top = select_top_ngrams(words, groups, once=True)
            statistics[f"top_{n}gram_share"] = compute_share(top.characters * top.counts, characters)
        else:
            sizes = _compute_ngram_lengths(words, groups.positions, n)
            repeated = _sum_per_document(words, groups.positions, sizes)
            statistics[f"duplicate_{n}gram_share"] = compute_share(repeated, _count_ngram_characters(words, n))
    return statistics


def measure_dclm_repetition(batch: DocumentBatch) -> dict[str, Floats]:
    """Return DCLM's statistics: every occurrence counts; of equally frequent n-grams the longest is the top one.

    A text of a single line or paragraph has no repeated one.
    """
    lines = _RepeatedParts([split_nonblank_lines(text) for text in batch.texts], first_is_free=False)
    paragraphs = _RepeatedParts(
        [_strip_parts(text.split(_PAIR_OF_NEWLINES)) for text in batch.texts], first_is_free=False
    )
    statistics = lines.measure_shares("line", lines.characters) | paragraphs.measure_shares(
        "paragraph", paragraphs.characters
    )
    words = batch.unicode_words
    characters = words.sum_per_document(words.word_lengths)
    for n, groups in iter_repeated_ngrams(words, _LONGEST):
        if n in _TOP:
            top = select_top_ngrams(words, groups, longest=True)
            statistics[f"top_{n}gram_share"] = compute_share(top.characters * top.counts, characters)
        else:
            covered = _count_covered_characters(words, groups.positions, n)
            statistics[f"duplicate_{n}gram_share"] = compute_share(covered, characters)
    return statistics


class _RepeatedParts:
    """Counts of lines or paragraphs per document: all, repeated ones, and the characters of both."""

    def __init__(self, documents: Sequence[list[str]], *, first_is_free: bool) -> None:
        measured = [_count_repeats(parts, first_is_free) for parts in documents]
        columns = np.array(measured, np.int64).reshape(len(documents), 4)
        self.parts, self.repeated, self.characters, self.repeated_characters = columns.T

    def measure_shares(self, part: str, characters: Integers) -> dict[str, Floats]:
        """Return the share of repeated parts, and of their characters in `characters`, the dialect's denominator."""
        return {
            f"duplicate_{part}_share": compute_share(self.repeated, self.parts),
            f"duplicate_{part}_character_share": compute_share(self.repeated_characters, characters),
        }


def _count_repeats(parts: list[str], first_is_free: bool) -> tuple[int, int, int, int]:
    characters = sum(map(len, parts))
    if len(set(parts)) == len(parts):
        return len(parts), 0, characters, 0
    counts = [(part, count - first_is_free) for part, count in Counter(parts).items() if count > 1]
    return (
        len(parts),
        sum(count for _, count in counts),
        characters,
        sum(len(part) * count for part, count in counts),
    )


def _strip_parts(parts: list[str]) -> list[str]:
    """Return the stripped parts without the empty ones."""
    return list(filter(None, map(str.strip, parts)))


def _compute_ngram_lengths(words: WordColumns, positions: Integers, n: int) -> Integers:
    """Return the characters of the n words from each position, without white space."""
    characters = compute_offsets(words.word_lengths)
    return characters[positions + n] - characters[positions]


def _sum_per_document(words: WordColumns, positions: Integers, sizes: Integers) -> Integers:
    documents = words.document_of_word[positions]
    return np.bincount(documents, weights=sizes, minlength=len(words.counts)).astype(np.int64)


def _count_ngram_characters(words: WordColumns, n: int) -> Integers:
    """Return the characters of all n-grams of each document, at least 1; a word counts in each n-gram it is in."""
    positions = np.arange(max(len(words.ids_W) - n + 1, 0))
    positions = positions[positions + n <= words.offsets[1:][words.document_of_word[positions]]]
    return np.maximum(_sum_per_document(words, positions, _compute_ngram_lengths(words, positions, n)), 1)


def _count_covered_characters(words: WordColumns, positions: Integers, n: int) -> Integers:
    """Return the characters of the words that lie in at least one of the n-grams."""
    edges = np.bincount(positions, minlength=len(words.ids_W) + n + 1)  # +1 where an n-gram begins, -1 where it ends
    edges[n:] -= edges[:-n].copy()
    covered_W = np.cumsum(edges)[: len(words.ids_W)] > 0
    return words.sum_per_document(words.word_lengths * covered_W)
