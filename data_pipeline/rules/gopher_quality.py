"""Gopher's quality rule (Rae et al. 2021, A.1.1) in four dialects: equal thresholds, different
measurements.

Measures word counts, word lengths, symbols, bullets, ellipses, letters and stop words, and drops
texts that do not resemble prose. The first failed test, in the order of the dialect, is the reason.

| | datatrove | paper | dolma (gopher_v2) | dclm |
|---|---|---|---|---|
| words are | spaCy's English | between white space | between white space | between white space |
| words counted | not punctuation alone | all | all | those that begin with a letter or digit |
| word length | mean of those counted | mean | median | mean of all |
| symbols | `#`, then `...` and `…` ¹ | the same | words with `#` or `…` | `#` `...` `. . .` `…` ² |
| lines | `splitlines` | between newlines ³ | between runs of newlines | stripped, not blank |
| bullets | `•` `-` ⁴ | 14 marks ⁴ | `*` `-` at the very start | `●` `•` `*` `-` |
| ellipses at ends | `...` `…` before white space | the same | `…` at the end | `...` `. . .` `…` |
| stop words | distinct, as written | distinct, as written | all, as written | all, in any case |

¹ Each per word. ² Together. ³ Not blank. ⁴ After white space.

The paper does not define words, marks and lines; its column is our plainest interpretation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from llmsys.config.quality_rules import GopherQualityConfig
from llmsys.data_pipeline.core.native import NativeCore, load_core
from llmsys.data_pipeline.rules.compiled_lines import count_line_marks
from llmsys.data_pipeline.rules.rule import (
    DocumentBatch,
    Floats,
    RuleVerdicts,
    ThresholdTest,
    apply_thresholds,
    compute_share,
)
from llmsys.data_pipeline.text.ragged_arrays import Integers
from llmsys.data_pipeline.text.vocabulary import ALPHABETIC, NOT_SYMBOL
from llmsys.data_pipeline.text.word_columns import WordColumns


@dataclass(frozen=True)
class LineMarkDialect:
    """The lines, bullets and ellipses of a dialect.

    Attributes:
        bullets: prefixes that count as bullets.
        ellipses: suffixes that count as ellipses.
        lines: `splitlines` are Python's lines, stripped where marks are searched. `not blank` are
            stripped lines between newlines. `runs of newlines` keeps lines unchanged and counts an
            empty one at either end of the text.
    """

    bullets: tuple[str, ...]
    ellipses: tuple[str, ...]
    lines: Literal["splitlines", "not blank", "runs of newlines"]


def measure_line_marks(batch: DocumentBatch, marks: LineMarkDialect) -> dict[str, Floats]:
    """Return the shares of lines with a bullet and with an ellipsis."""
    core = load_core()
    if marks == _DATATROVE and isinstance(core, NativeCore):
        counts, bullets, ellipses = count_line_marks(core, batch.texts)
    else:
        counts, bullets, ellipses = _count_line_marks(batch, marks)
    return {
        "bullet_line_share": compute_share(bullets, counts),
        "ellipsis_line_share": compute_share(ellipses, counts),
    }


def _count_line_marks(
    batch: DocumentBatch, marks: LineMarkDialect
) -> tuple[Integers, Integers, Integers]:
    """Return lines, lines with a bullet and lines with an ellipsis, per document."""
    lines_of = _LINES[marks.lines]
    documents = [lines_of(text) for text in batch.texts]
    strips = marks.lines == "splitlines"
    bullets = batch.to_counts(
        _count_bullet_lines(lines, marks.bullets, strips) for lines in documents
    )
    ellipses = batch.to_counts(
        _count_ellipsis_lines(lines, marks.ellipses, strips)
        if any(mark in text for mark in marks.ellipses)
        else 0
        for text, lines in zip(batch.texts, documents, strict=True)
    )
    return batch.to_counts(map(len, documents)), bullets, ellipses


def split_at_newline_runs(text: str) -> list[str]:
    """Split a text at runs of newlines; a newline at either end of the text adds an empty line
    at the end.
    """
    lines = list(filter(None, text.split("\n")))
    lines += [""] * (text.startswith("\n") + text.endswith("\n"))
    return lines or [""]


def split_nonblank_lines(text: str) -> list[str]:
    """Return the stripped lines between newlines without the empty ones."""
    return list(filter(None, map(str.strip, text.split("\n"))))


_LINES: dict[str, Callable[[str], list[str]]] = {
    "splitlines": str.splitlines,
    "not blank": split_nonblank_lines,
    "runs of newlines": split_at_newline_runs,
}


def _count_bullet_lines(lines: list[str], bullets: tuple[str, ...], strips: bool) -> int:
    firsts = [line[:1] for line in (map(str.lstrip, lines) if strips else lines)]
    return sum(map(firsts.count, bullets))


def _count_ellipsis_lines(lines: list[str], ellipses: tuple[str, ...], strips: bool) -> int:
    return sum(line.endswith(ellipses) for line in (map(str.rstrip, lines) if strips else lines))


Mask = npt.NDArray[np.bool_]

# fastText splits words at these only; other Unicode white space is part of a word.
_ASCII_SPACES = str.maketrans(dict.fromkeys("\n\r\t\v\f\0", " "))


def count_ascii_words(text: str) -> int:
    """Count the words of fastText's tokenizer that begin with a letter or a digit."""
    return sum(word[:1].isalnum() for word in text.translate(_ASCII_SPACES).split(" "))


def compute_median_word_lengths(words: WordColumns) -> Floats:
    """Return the median word length per document, 0 without words."""
    order = np.lexsort((words.word_lengths, words.document_of_word))
    # One more, for a last document without words, whose offset is the end.
    lengths = np.append(words.word_lengths[order], 0)
    middle = words.offsets[:-1] + np.maximum(words.counts - 1, 0) // 2
    upper = words.offsets[:-1] + words.counts // 2
    found: Floats = (lengths[middle] + lengths[upper]) / 2
    return np.where(words.counts > 0, found, 0.0)


def mask_words_containing(words: WordColumns, parts: tuple[str, ...]) -> Mask:
    """Mask the words that contain one of the parts."""
    return _mask_words(words, lambda word: any(part in word for part in parts))


def mask_words_in(
    words: WordColumns, wanted: tuple[str, ...], *, ignore_case: bool = False
) -> Mask:
    """Mask the words that are among the wanted ones."""
    among = frozenset(wanted)
    return _mask_words(words, lambda word: (word.lower() if ignore_case else word) in among)


def count_distinct_words(words: WordColumns, wanted: tuple[str, ...]) -> Floats:
    """Count the distinct wanted words in each document."""
    numbers = np.zeros(len(words.vocabulary), np.int64)
    for number, word in enumerate(wanted, start=1):
        if (word_id := words.vocabulary.find_word(word)) is not None:
            numbers[word_id] = number
    found_W = numbers[words.ids_W]
    hits = np.flatnonzero(found_W)
    # One number for each document and wanted word.
    pairs = np.unique(
        words.document_of_word[hits].astype(np.int64) * (len(wanted) + 1) + found_W[hits]
    )
    return np.bincount(pairs // (len(wanted) + 1), minlength=len(words.counts)).astype(np.float64)


def _mask_words(words: WordColumns, choose: Callable[[str], bool]) -> Mask:
    """Mask the words that `choose` accepts; it is called once per distinct word."""
    used = np.bincount(words.ids_W, minlength=len(words.vocabulary)) > 0
    get_word = words.vocabulary.get_word
    chosen = np.zeros(len(used), np.bool_)
    chosen[[number for number in np.flatnonzero(used).tolist() if choose(get_word(number))]] = True
    return chosen[words.ids_W]


# Bullets of typesetting and of plain-text lists; the paper names none.
_PAPER_BULLETS = ("•", "‣", "⁃", "▪", "▫", "●", "○", "◦", "■", "□", "▶", "–", "*", "-")
_ELLIPSES = ("...", "…")
_SPACED_ELLIPSES = ("...", ". . .", "…")

_DATATROVE = LineMarkDialect(bullets=("•", "-"), ellipses=_ELLIPSES, lines="splitlines")
_PAPER = LineMarkDialect(bullets=_PAPER_BULLETS, ellipses=_ELLIPSES, lines="not blank")
_DOLMA = LineMarkDialect(bullets=("*", "-"), ellipses=("…",), lines="runs of newlines")
_DCLM = LineMarkDialect(bullets=("●", "•", "*", "-"), ellipses=_SPACED_ELLIPSES, lines="not blank")


class GopherQualityRule:
    """A rule that drops documents whose words and lines do not resemble prose."""

    kind = "gopher_quality"

    def __init__(self, config: GopherQualityConfig) -> None:
        self._dialect = config.dialect
        self._stop_words = tuple(dict.fromkeys(config.stop_words))
        self.limits = _build_limits(config)

    def apply(self, batch: DocumentBatch) -> RuleVerdicts:
        """Return the verdicts, tested in the order of the dialect."""
        return apply_thresholds(self.limits, self._compute_statistics(batch), len(batch))

    def _compute_statistics(self, batch: DocumentBatch) -> dict[str, Floats]:
        match self._dialect:
            case "datatrove":
                return _compute_datatrove_statistics(batch, self._stop_words)
            case "paper":
                return _compute_paper_statistics(batch, self._stop_words)
            case "dolma":
                return _compute_dolma_statistics(batch, self._stop_words)
            case "dclm":
                return _compute_dclm_statistics(batch, self._stop_words)


def _build_limits(config: GopherQualityConfig) -> list[ThresholdTest]:
    """Return the tests in the order of the dialect."""
    length = "median_word_length" if config.dialect == "dolma" else "mean_word_length"
    words = [
        ThresholdTest("words", "words", "below", config.min_words),
        ThresholdTest("words", "words", "above", config.max_words),
        ThresholdTest(length.replace("_", " "), length, "below", config.min_mean_word_length),
        ThresholdTest(length.replace("_", " "), length, "above", config.max_mean_word_length),
    ]
    symbols = [ThresholdTest("symbols per word", "symbol_ratio", "above", config.max_symbol_ratio)]
    if config.dialect in ("datatrove", "paper"):
        symbols = [
            ThresholdTest("hash signs per word", "hash_ratio", "above", config.max_hash_ratio),
            ThresholdTest(
                "ellipses per word", "ellipsis_ratio", "above", config.max_ellipsis_ratio
            ),
        ]
    bullets = config.max_bullet_line_share
    ellipses = config.max_ellipsis_line_share
    lines = [
        ThresholdTest(
            "share of lines that start with a bullet", "bullet_line_share", "above", bullets
        ),
        ThresholdTest(
            "share of lines that end with an ellipsis", "ellipsis_line_share", "above", ellipses
        ),
    ]
    letters = [
        ThresholdTest(
            "share of words with a letter",
            "alphabetic_word_share",
            "below",
            config.min_alphabetic_word_share,
        ),
        ThresholdTest("stop words", "stop_words", "below", config.min_stop_words),
    ]
    # The published mixing of dolma tests letters and stop words before lines.
    return [*words, *symbols, *(letters + lines if config.dialect == "dolma" else lines + letters)]


def _compute_datatrove_statistics(
    batch: DocumentBatch, stop_words: tuple[str, ...]
) -> dict[str, Floats]:
    words = batch.words
    counted_W = (words.word_flags & NOT_SYMBOL) != 0
    counts = words.count_per_document(counted_W)
    return {
        "words": counts.astype(np.float64),
        "mean_word_length": compute_share(
            words.sum_per_document(words.word_lengths * counted_W), counts
        ),
        "hash_ratio": compute_share(batch.count_occurrences("#"), words.counts),
        "ellipsis_ratio": compute_share(batch.count_occurrences(*_ELLIPSES), words.counts),
        **measure_line_marks(batch, _DATATROVE),
        "alphabetic_word_share": _compute_alphabetic_share(words),
        "stop_words": count_distinct_words(words, stop_words),
    }


def _compute_paper_statistics(
    batch: DocumentBatch, stop_words: tuple[str, ...]
) -> dict[str, Floats]:
    words = batch.whitespace_words
    return {
        "words": words.counts.astype(np.float64),
        "mean_word_length": compute_share(words.sum_per_document(words.word_lengths), words.counts),
        "hash_ratio": compute_share(batch.count_occurrences("#"), words.counts),
        "ellipsis_ratio": compute_share(batch.count_occurrences(*_ELLIPSES), words.counts),
        **measure_line_marks(batch, _PAPER),
        "alphabetic_word_share": _compute_alphabetic_share(words),
        "stop_words": count_distinct_words(words, stop_words),
    }


def _compute_dolma_statistics(
    batch: DocumentBatch, stop_words: tuple[str, ...]
) -> dict[str, Floats]:
    words = batch.whitespace_words
    return {
        "words": words.counts.astype(np.float64),
        "median_word_length": compute_median_word_lengths(words),
        "symbol_ratio": compute_share(
            words.count_per_document(mask_words_containing(words, ("#", "…"))), words.counts
        ),
        "alphabetic_word_share": _compute_alphabetic_share(words),
        "stop_words": words.count_per_document(mask_words_in(words, stop_words)).astype(np.float64),
        **measure_line_marks(batch, _DOLMA),
    }


def _compute_dclm_statistics(
    batch: DocumentBatch, stop_words: tuple[str, ...]
) -> dict[str, Floats]:
    words = batch.whitespace_words
    return {
        "words": batch.to_counts(map(count_ascii_words, batch.texts)).astype(np.float64),
        "mean_word_length": compute_share(words.sum_per_document(words.word_lengths), words.counts),
        "symbol_ratio": compute_share(
            batch.count_occurrences("#", *_SPACED_ELLIPSES), words.counts
        ),
        **measure_line_marks(batch, _DCLM),
        "alphabetic_word_share": _compute_alphabetic_share(words),
        "stop_words": words.count_per_document(
            mask_words_in(words, stop_words, ignore_case=True)
        ).astype(np.float64),
    }


def _compute_alphabetic_share(words: WordColumns) -> Floats:
    return compute_share(
        words.count_per_document((words.word_flags & ALPHABETIC) != 0), words.counts
    )
