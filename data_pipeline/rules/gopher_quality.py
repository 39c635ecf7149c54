"""Gopher's quality rule (Rae et al. 2021, A.1.1), as datatrove reads it.

Reads texts and their words, measures word counts, word lengths, symbols, bullets, ellipses, letters and stop words, and
drops what does not look like prose. `Words` in the first two tests leave out those made of punctuation alone;
everywhere else all words count.
"""

import numpy as np

from data_pipeline.rules.batch import TextBatch, share
from data_pipeline.rules.verdict import Floats, Limit, Verdicts, first_broken
from data_pipeline.rules.vocabulary import ALPHABETIC, NOT_SYMBOL
from data_pipeline.rules.words import Integers, WordColumns
from llmsys.config.text import GopherQualityConfig

_BULLETS = ("•", "-")
_ELLIPSES = ("...", "…")


class GopherQuality:
    """Drops documents whose words and lines are unlike prose."""

    kind = "gopher_quality"

    def __init__(self, config: GopherQualityConfig) -> None:
        self._stop_words = tuple(dict.fromkeys(config.stop_words))
        self._limits = [
            Limit("words", "words", "below", config.min_words),
            Limit("words", "words", "above", config.max_words),
            Limit("mean word length", "mean_word_length", "below", config.min_mean_word_length),
            Limit("mean word length", "mean_word_length", "above", config.max_mean_word_length),
            Limit("hash signs per word", "hash_ratio", "above", config.max_hash_ratio),
            Limit("ellipses per word", "ellipsis_ratio", "above", config.max_ellipsis_ratio),
            Limit(
                "share of lines that start with a bullet", "bullet_line_share", "above", config.max_bullet_line_share
            ),
            Limit(
                "share of lines that end with an ellipsis",
                "ellipsis_line_share",
                "above",
                config.max_ellipsis_line_share,
            ),
            Limit("share of words with a letter", "alphabetic_word_share", "below", config.min_alphabetic_word_share),
            Limit("stop words", "stop_words", "below", config.min_stop_words),
        ]

    def judge(self, batch: TextBatch) -> Verdicts:
        """Verdicts in the order of the paper."""
        return first_broken(self._limits, _measure(batch, self._stop_words), len(batch))


def _measure(batch: TextBatch, stop_words: tuple[str, ...]) -> dict[str, Floats]:
    words = batch.words
    no_symbols_W = (words.word_flags & NOT_SYMBOL) != 0
    counted = _per_document(words, no_symbols_W)
    letters = np.bincount(words.document_of_word, weights=words.word_lengths * no_symbols_W, minlength=len(batch))
    ellipses = batch.count(sum(map(text.count, _ELLIPSES)) for text in batch.texts)
    lines, bullets, ellipsis_lines = _lines(batch)
    return {
        "words": counted.astype(np.float64),
        "mean_word_length": share(letters, counted),
        "hash_ratio": share(batch.count(text.count("#") for text in batch.texts), words.counts),
        "ellipsis_ratio": share(ellipses, words.counts),
        "bullet_line_share": share(bullets, lines),
        "ellipsis_line_share": share(ellipsis_lines, lines),
        "alphabetic_word_share": share(_per_document(words, (words.word_flags & ALPHABETIC) != 0), words.counts),
        "stop_words": _distinct(words, stop_words).astype(np.float64),
    }


def _per_document(words: WordColumns, chosen_W: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Integers:
    """How many words are chosen per document."""
    return np.bincount(words.document_of_word[chosen_W], minlength=len(words.counts))


def _lines(batch: TextBatch) -> tuple[Integers, Integers, Integers]:
    """Lines per document, those that start with a bullet, and those that end with an ellipsis."""
    split = [text.splitlines() for text in batch.texts]
    bullets = batch.count(_starting(lines) for lines in split)
    ellipses = batch.count(
        sum(line.rstrip().endswith(_ELLIPSES) for line in lines) if any(mark in text for mark in _ELLIPSES) else 0
        for text, lines in zip(batch.texts, split, strict=True)
    )
    return batch.count(map(len, split)), bullets, ellipses


def _starting(lines: list[str]) -> int:
    """How many lines start with a bullet."""
    firsts = [line[:1] for line in map(str.lstrip, lines)]
    return sum(map(firsts.count, _BULLETS))


def _distinct(words: WordColumns, wanted: tuple[str, ...]) -> Integers:
    """How many of the wanted words occur in each document."""
    numbers = np.zeros(len(words.vocabulary), np.int64)
    for number, word in enumerate(wanted, start=1):
        if word in words.vocabulary.index:
            numbers[words.vocabulary.index[word]] = number
    found_W = numbers[words.ids_W]
    hits = np.flatnonzero(found_W)
    pairs = np.unique(words.document_of_word[hits] * (len(wanted) + 1) + found_W[hits])
    return np.bincount(pairs // (len(wanted) + 1), minlength=len(words.counts))
