"""Gopher's repetition rule (Rae et al. 2021, table A1) in four dialects: equal thresholds,
different measurements.

Measures the shares of repeated paragraphs, lines and word n-grams, and drops texts that repeat too
much. Lengths are code points.

| | datatrove | paper | dolma (gopher_v2) | dclm |
|---|---|---|---|---|
| repeated lines | second and later | second and later | every occurrence | every occurrence |
| lines | between runs of newlines | stripped, not blank | as datatrove | stripped, not blank |
| paragraphs | between blank lines | stripped, not blank | no test | stripped, not blank |
| their characters / | the whole text | the whole text | all words | all lines (paragraphs) |
| words are | spaCy's English | between white space | between white space | Unicode's segments |
| top n-gram (¹: one occurrence will do) | first, spaces count ¹ | as left | first ¹ | longest |
| repeated n-grams | no overlaps | words in later ones | every occurrence | words in any |
| n-gram characters / | the whole text | the whole text | all words (all n-grams) | all words |

The paper leaves most of this open; its column is our plainest interpretation.

Measure repetition for the dialects paper, dolma and dclm of Gopher's rule; `gopher_repetition`
compares them.
"""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llmsys.config.quality_rules import GopherRepetitionConfig
from llmsys.data_pipeline.rules.datatrove_repetition import (
    measure_repeated_lines,
    measure_repeated_ngrams,
    measure_top_ngrams,
)
from llmsys.data_pipeline.rules.gopher_quality import split_at_newline_runs, split_nonblank_lines
from llmsys.data_pipeline.rules.repeated_ngrams import iter_repeated_ngrams, select_top_ngrams
from llmsys.data_pipeline.rules.rule import (
    DocumentBatch,
    Floats,
    RuleVerdicts,
    ThresholdTest,
    apply_thresholds,
    compute_share,
    prepend_test,
)
from llmsys.data_pipeline.text.ragged_arrays import Integers, compute_offsets
from llmsys.data_pipeline.text.word_columns import WordColumns

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
    lines = _RepeatedParts(
        [split_at_newline_runs(text) for text in batch.texts], first_is_free=False
    )
    words = batch.whitespace_words
    characters = np.maximum(words.sum_per_document(words.word_lengths), 1)
    statistics = lines.measure_shares("line", characters)
    for n, groups in iter_repeated_ngrams(words, _LONGEST):
        if n in _TOP:
            top = select_top_ngrams(words, groups, once=True)
            statistics[f"top_{n}gram_share"] = compute_share(
                top.characters * top.counts, characters
            )
        else:
            sizes = _compute_ngram_lengths(words, groups.positions, n)
            repeated = _sum_per_document(words, groups.positions, sizes)
            statistics[f"duplicate_{n}gram_share"] = compute_share(
                repeated, _count_ngram_characters(words, n)
            )
    return statistics


def measure_dclm_repetition(batch: DocumentBatch) -> dict[str, Floats]:
    """Return DCLM's statistics: every occurrence counts; of equally frequent n-grams the longest is
    the top one.

    A text of a single line or paragraph has no repeated one.
    """
    lines = _RepeatedParts(
        [split_nonblank_lines(text) for text in batch.texts], first_is_free=False
    )
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
            statistics[f"top_{n}gram_share"] = compute_share(
                top.characters * top.counts, characters
            )
        else:
            covered = _count_covered_characters(words, groups.positions, n)
            statistics[f"duplicate_{n}gram_share"] = compute_share(covered, characters)
    return statistics


class _RepeatedParts:
    """Counts of lines or paragraphs per document: all, repeated ones, and the characters of
    both.
    """

    def __init__(self, documents: Sequence[list[str]], *, first_is_free: bool) -> None:
        measured = [_count_repeats(parts, first_is_free) for parts in documents]
        columns = np.array(measured, np.int64).reshape(len(documents), 4)
        self.parts, self.repeated, self.characters, self.repeated_characters = columns.T

    def measure_shares(self, part: str, characters: Integers) -> dict[str, Floats]:
        """Return the share of repeated parts, and of their characters in `characters`, the
        dialect's denominator.
        """
        return {
            f"duplicate_{part}_share": compute_share(self.repeated, self.parts),
            f"duplicate_{part}_character_share": compute_share(
                self.repeated_characters, characters
            ),
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
    """Return the characters of all n-grams of each document, at least 1; a word counts in each
    n-gram it is in.
    """
    positions = np.arange(max(len(words.ids_W) - n + 1, 0))
    positions = positions[positions + n <= words.offsets[1:][words.document_of_word[positions]]]
    return np.maximum(
        _sum_per_document(words, positions, _compute_ngram_lengths(words, positions, n)), 1
    )


def _count_covered_characters(words: WordColumns, positions: Integers, n: int) -> Integers:
    """Return the characters of the words that lie in at least one of the n-grams."""
    # +1 where an n-gram begins, -1 where it ends
    edges = np.bincount(positions, minlength=len(words.ids_W) + n + 1)
    edges[n:] -= edges[:-n].copy()
    covered_W = np.cumsum(edges)[: len(words.ids_W)] > 0
    return words.sum_per_document(words.word_lengths * covered_W)


_PARTS = {
    "duplicate_paragraph_share": "share of duplicate paragraphs",
    "duplicate_paragraph_character_share": "share of characters in duplicate paragraphs",
    "duplicate_line_share": "share of duplicate lines",
    "duplicate_line_character_share": "share of characters in duplicate lines",
}
_NGRAMS = {
    **{
        f"top_{n}gram_share": f"share of characters in the most frequent {n}-gram"
        for n in range(2, 5)
    },
    **{
        f"duplicate_{n}gram_share": f"share of characters in duplicate {n}-grams"
        for n in range(5, 11)
    },
}
# Table A1 lists the shares before the characters, and lines before paragraphs.
_TABLE_A1 = (
    "duplicate_line_share",
    "duplicate_paragraph_share",
    "duplicate_line_character_share",
    "duplicate_paragraph_character_share",
)
# dolma does not test paragraphs.
_ORDER = {
    "datatrove": tuple(_PARTS),
    "paper": _TABLE_A1,
    "dclm": _TABLE_A1,
    "dolma": tuple(_PARTS)[2:],
}
_TOP_NGRAMS = len(_PARTS)  # index of the first of these among datatrove's tests
_ALL_NGRAMS = _TOP_NGRAMS + 3


class GopherRepetitionRule:
    """A rule that drops documents that repeat themselves."""

    kind = "gopher_repetition"

    def __init__(self, config: GopherRepetitionConfig) -> None:
        self._dialect = config.dialect
        names = (*_ORDER[config.dialect], *_NGRAMS)
        tests = _PARTS | _NGRAMS
        self.limits = [
            ThresholdTest(tests[name], name, "above", getattr(config, f"max_{name}"))
            for name in names
        ]

    def apply(self, batch: DocumentBatch) -> RuleVerdicts:
        """Return the verdicts, tested in the order lines and paragraphs, most frequent n-grams,
        repeated n-grams.
        """
        verdicts = apply_thresholds(self.limits, self._compute_statistics(batch), len(batch))
        return prepend_test(verdicts, "empty text", self._mask_empty_texts(batch))

    def _compute_statistics(self, batch: DocumentBatch) -> dict[str, Floats]:
        match self._dialect:
            case "datatrove":
                return self._compute_in_stages(batch)
            case "paper":
                return measure_paper_repetition(batch)
            case "dolma":
                return measure_dolma_repetition(batch)
            case "dclm":
                return measure_dclm_repetition(batch)

    def _compute_in_stages(self, batch: DocumentBatch) -> dict[str, Floats]:
        """Return datatrove's statistics; those of a stage are NaN for documents that failed an
        earlier stage.
        """
        _ = batch.words  # split all documents at once: the following rules need their words too
        statistics = measure_repeated_lines(batch)
        for first, last, measure in (
            (0, _TOP_NGRAMS, measure_top_ngrams),
            (_TOP_NGRAMS, _ALL_NGRAMS, measure_repeated_ngrams),
        ):
            passing = apply_thresholds(self.limits[first:last], statistics, len(batch)).failed_D < 0
            # NaN: failed before the stage before this one.
            passing &= ~np.isnan(statistics[self.limits[first].statistic])
            for name, column in measure(batch.select_documents(passing)).items():
                statistics[name] = np.full(len(batch), np.nan)
                statistics[name][passing] = column
        return statistics

    def _mask_empty_texts(self, batch: DocumentBatch) -> npt.NDArray[np.bool_]:
        """Mask the texts in which the dialect measures nothing; dolma lets them pass."""
        match self._dialect:
            case "datatrove":
                empty = [not text for text in batch.texts]
            case "paper" | "dclm":
                empty = [not text or text.isspace() for text in batch.texts]
            case "dolma":
                empty = [False] * len(batch)
        return np.array(empty, np.bool_)
