"""FineWeb's own rule (Penedo et al. 2024): end marks, short lines, repeated lines, lists.

Lines are split at newlines; blank lines do not count. The constants are those of the code, which
differ from the paper in one place (see the configuration).
"""

from llmsys.config.quality_rules import FinewebQualityConfig
from llmsys.data_pipeline.rules.rule import (
    DocumentBatch,
    Floats,
    RuleVerdicts,
    ThresholdTest,
    apply_thresholds,
    compute_share,
    prepend_test,
)
from llmsys.data_pipeline.text.vocabulary import TERMINAL_MARKS


class FinewebQualityRule:
    """A rule that drops documents whose lines do not resemble paragraphs."""

    kind = "fineweb_quality"

    def __init__(self, config: FinewebQualityConfig) -> None:
        self._short = config.short_line_characters
        self.limits = [
            ThresholdTest(
                "share of lines with an end mark",
                "end_mark_line_share",
                "below",
                config.min_end_mark_line_share,
            ),
            ThresholdTest(
                "share of short lines", "short_line_share", "above", config.max_short_line_share
            ),
            ThresholdTest(
                "share of characters in duplicate lines",
                "duplicate_line_character_share",
                "above",
                config.max_duplicate_line_character_share,
            ),
            ThresholdTest(
                "newlines per word", "newlines_per_word", "above", config.max_newlines_per_word
            ),
        ]

    def apply(self, batch: DocumentBatch) -> RuleVerdicts:
        """Return the verdicts, tested in the order of the published code."""
        lines = [
            [line for line in text.split("\n") if line and not line.isspace()]
            for text in batch.texts
        ]
        statistics = self._compute_statistics(batch, lines)
        verdicts = apply_thresholds(self.limits, statistics, len(batch))
        return prepend_test(verdicts, "empty text", batch.to_counts(map(len, lines)) == 0)

    def _compute_statistics(
        self, batch: DocumentBatch, lines: list[list[str]]
    ) -> dict[str, Floats]:
        counts = batch.to_counts(map(len, lines))
        ends = batch.to_counts(
            sum(line[-1] in TERMINAL_MARKS for line in document) for document in lines
        )
        short = batch.to_counts(
            sum(len(line) <= self._short for line in document) for document in lines
        )
        repeated = batch.to_counts(
            sum(map(len, document)) - sum(map(len, set(document))) for document in lines
        )
        newlines = batch.to_counts(text.count("\n") for text in batch.texts)
        return {
            "end_mark_line_share": compute_share(ends, counts),
            "short_line_share": compute_share(short, counts),
            # FineWeb's denominator has no newlines.
            "duplicate_line_character_share": compute_share(
                repeated, batch.character_counts - newlines
            ),
            "newlines_per_word": compute_share(newlines, batch.word_counts),
        }
