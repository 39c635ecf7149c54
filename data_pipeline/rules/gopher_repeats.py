"""What the dialects paper, dolma and dclm of Gopher's repetition rule measure; see `gopher_repetition` for how they
differ.
"""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from data_pipeline.rules.batch import TextBatch, share
from data_pipeline.rules.gopher_lines import not_blank, runs_of_newlines
from data_pipeline.rules.ngram import repeated_ngrams, top_ngrams
from data_pipeline.rules.ragged import offsets_of
from data_pipeline.rules.verdict import Floats
from data_pipeline.rules.word_columns import Integers, WordColumns

_TOP = (2, 3, 4)
_LONGEST = 10
_PARAGRAPH_BREAK = re.compile(r"\n{2,}")
_PAIR_OF_NEWLINES = "\n\n"


def measure_paper(batch: TextBatch) -> dict[str, Floats]:
    """Repeated parts are copies of what came before them; the whole text is the denominator."""
    lines = _Repeats([not_blank(text) for text in batch.texts], first_is_free=True)
    paragraphs = _Repeats([_stripped(_PARAGRAPH_BREAK.split(text)) for text in batch.texts], first_is_free=True)
    statistics = lines.shares("line", batch.characters) | paragraphs.shares("paragraph", batch.characters)
    words = batch.whitespace_words
    for n, groups in repeated_ngrams(words, _LONGEST):
        if n in _TOP:
            top = top_ngrams(words, groups)
            statistics[f"top_{n}gram_share"] = share((top.characters + n - 1) * top.counts, batch.characters)
        else:
            covered = _covered_characters(words, groups.positions[groups.is_later], n)
            statistics[f"duplicate_{n}gram_share"] = share(covered, batch.characters)
    return statistics


def measure_dolma(batch: TextBatch) -> dict[str, Floats]:
    """Every occurrence counts, white space does not."""
    lines = _Repeats([runs_of_newlines(text) for text in batch.texts], first_is_free=False)
    words = batch.whitespace_words
    characters = np.maximum(words.total(words.word_lengths), 1)
    statistics = lines.shares("line", characters)
    for n, groups in repeated_ngrams(words, _LONGEST):
        if n in _TOP:
            top = top_ngrams(words, groups, once=True)
            statistics[f"top_{n}gram_share"] = share(top.characters * top.counts, characters)
        else:
            sizes = _sizes(words, groups.positions, n)
            repeated = _per_document(words, groups.positions, sizes)
            statistics[f"duplicate_{n}gram_share"] = share(repeated, _ngram_characters(words, n))
    return statistics


def measure_dclm(batch: TextBatch) -> dict[str, Floats]:
    """Every occurrence counts; a text of one line or paragraph repeats none; the longest top n-gram counts."""
    lines = _Repeats([not_blank(text) for text in batch.texts], first_is_free=False)
    paragraphs = _Repeats([_stripped(text.split(_PAIR_OF_NEWLINES)) for text in batch.texts], first_is_free=False)
    statistics = lines.shares("line", lines.characters) | paragraphs.shares("paragraph", paragraphs.characters)
    words = batch.unicode_words
    characters = words.total(words.word_lengths)
    for n, groups in repeated_ngrams(words, _LONGEST):
        if n in _TOP:
            top = top_ngrams(words, groups, longest=True)
            statistics[f"top_{n}gram_share"] = share(top.characters * top.counts, characters)
        else:
            covered = _covered_characters(words, groups.positions, n)
            statistics[f"duplicate_{n}gram_share"] = share(covered, characters)
    return statistics


class _Repeats:
    """Lines or paragraphs of documents: how many, how many of them repeat, and the characters of both."""

    def __init__(self, documents: Sequence[list[str]], *, first_is_free: bool) -> None:
        measured = [_repeats(parts, first_is_free) for parts in documents]
        columns = np.array(measured, np.int64).reshape(len(documents), 4)
        self.parts, self.repeated, self.characters, self.repeated_characters = columns.T

    def shares(self, part: str, characters: Integers) -> dict[str, Floats]:
        """What of the parts repeats, and what of `characters`, which is the dialect's denominator."""
        return {
            f"duplicate_{part}_share": share(self.repeated, self.parts),
            f"duplicate_{part}_character_share": share(self.repeated_characters, characters),
        }


def _repeats(parts: list[str], first_is_free: bool) -> tuple[int, int, int, int]:
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


def _stripped(parts: list[str]) -> list[str]:
    """Stripped parts of which something is left."""
    return list(filter(None, map(str.strip, parts)))


def _sizes(words: WordColumns, positions: Integers, n: int) -> Integers:
    """Characters of the n words from each position on, without white space."""
    characters = offsets_of(words.word_lengths)
    return characters[positions + n] - characters[positions]


def _per_document(words: WordColumns, positions: Integers, sizes: Integers) -> Integers:
    documents = words.document_of_word[positions]
    return np.bincount(documents, weights=sizes, minlength=len(words.counts)).astype(np.int64)


def _ngram_characters(words: WordColumns, n: int) -> Integers:
    """Characters of all n-grams of each document, a word counting in each n-gram it is in; 1 at least."""
    positions = np.arange(max(len(words.ids_W) - n + 1, 0))
    positions = positions[positions + n <= words.offsets[1:][words.document_of_word[positions]]]
    return np.maximum(_per_document(words, positions, _sizes(words, positions, n)), 1)


def _covered_characters(words: WordColumns, positions: Integers, n: int) -> Integers:
    """Characters of the words that lie in one of the n-grams at least."""
    borders = np.bincount(positions, minlength=len(words.ids_W) + n + 1)
    borders[n:] -= borders[:-n].copy()
    covered_W = np.cumsum(borders)[: len(words.ids_W)] > 0
    return words.total(words.word_lengths * covered_W)
