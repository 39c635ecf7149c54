"""Gopher's repetition rule (Rae et al. 2021, table A1) in four dialects: equal thresholds, different measurements.

Measures the shares of repeated paragraphs, lines and word n-grams, and drops texts that repeat too much. Lengths are
code points.

| | datatrove | paper | dolma (gopher_v2) | dclm |
|---|---|---|---|---|
| repeated lines | second and later | second and later | every occurrence | every occurrence |
| lines | between runs of newlines | stripped, not blank | as datatrove | stripped, not blank |
| paragraphs | between blank lines | stripped, not blank | no test | stripped, not blank |
| their characters / | the whole text | the whole text | all words | all lines (paragraphs) |
| words are | spaCy's English | between white space | between white space | Unicode's segments |
| top n-gram | first, with spaces, even if it occurs once | first, with spaces | first, even if it occurs once | longest
of equals | | repeated n-grams | left to right, skipping repeats | words in later ones | every occurrence | words in any
| | n-gram characters / | the whole text | the whole text | all words (all n-grams) | all words |

The paper leaves most of this open; its column is our plainest interpretation.
"""

import numpy as np
import numpy.typing as npt

from data_pipeline.rules.datatrove_repetition import measure_repeated_lines, measure_repeated_ngrams, measure_top_ngrams
from data_pipeline.rules.document_batch import DocumentBatch
from data_pipeline.rules.verdict import Floats, RuleVerdicts, ThresholdTest, apply_thresholds, prepend_test
from llmsys.config.quality_rules import GopherRepetitionConfig

_PARTS = {
    "duplicate_paragraph_share": "share of duplicate paragraphs",
    "duplicate_paragraph_character_share": "share of characters in duplicate paragraphs",
    "duplicate_line_share": "share of duplicate lines",
    "duplicate_line_character_share": "share of characters in duplicate lines",
}
_NGRAMS = {
    **{f"top_{n}gram_share": f"share of characters in the most frequent {n}-gram" for n in range(2, 5)},
    **{f"duplicate_{n}gram_share": f"share of characters in duplicate {n}-grams" for n in range(5, 11)},
}
# Table A1 lists the shares before the characters, and lines before paragraphs.
_TABLE_A1 = (
    "duplicate_line_share",
    "duplicate_paragraph_share",
    "duplicate_line_character_share",
    "duplicate_paragraph_character_share",
)
_ORDER = {"datatrove": tuple(_PARTS), "paper": _TABLE_A1, "dclm": _TABLE_A1, "dolma": tuple(_PARTS)[2:]}
_TOP_NGRAMS = len(_PARTS)  # index of the first of these among datatrove's tests
_ALL_NGRAMS = _TOP_NGRAMS + 3


class GopherRepetitionRule:
    """A rule that drops documents that repeat themselves."""

    kind = "gopher_repetition"

    def __init__(self, config: GopherRepetitionConfig) -> None:
        self._dialect = config.dialect
        names = (*_ORDER[config.dialect], *_NGRAMS)
        tests = _PARTS | _NGRAMS
        self.limits = [ThresholdTest(tests[name], name, "above", getattr(config, f"max_{name}")) for name in names]

    def apply(self, batch: DocumentBatch) -> RuleVerdicts:
        """Return the verdicts, tested in the order lines and paragraphs, most frequent n-grams, repeated n-grams."""
        verdicts = apply_thresholds(self.limits, self._compute_statistics(batch), len(batch))
        return prepend_test(verdicts, "empty text", self._mask_empty_texts(batch))

    def _compute_statistics(self, batch: DocumentBatch) -> dict[str, Floats]:
        match self._dialect:
            case "datatrove":
                return self._compute_in_stages(batch)
            case "paper":
                from data_pipeline.rules.gopher_repetition_measures import measure_paper_repetition

                return measure_paper_repetition(batch)
            case "dolma":
                from data_pipeline.rules.gopher_repetition_measures import measure_dolma_repetition

                return measure_dolma_repetition(batch)
            case "dclm":
                from data_pipeline.rules.gopher_repetition_measures import measure_dclm_repetition

                return measure_dclm_repetition(batch)

    def _compute_in_stages(self, batch: DocumentBatch) -> dict[str, Floats]:
        """Return datatrove's statistics; those of a stage are NaN for documents that failed an earlier stage."""
        _ = batch.words  # split all documents at once: the following rules need their words too
        statistics = measure_repeated_lines(batch)
        for first, last, measure in (
            (0, _TOP_NGRAMS, measure_top_ngrams),
            (_TOP_NGRAMS, _ALL_NGRAMS, measure_repeated_ngrams),
        ):
            passing = apply_thresholds(self.limits[first:last], statistics, len(batch)).failed_D < 0
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
