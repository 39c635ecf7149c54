"""FineWeb's own rule (Penedo et al. 2024): end marks, short lines, repeated lines, lists.

Reads texts and their words; lines are split at newlines, blank ones do not count. The constants are those of the code,
which differ from the paper's in one place (see the configuration).
"""

from data_pipeline.rules.batch import TextBatch, share
from data_pipeline.rules.characters import TERMINAL_MARKS
from data_pipeline.rules.verdict import Floats, Limit, Verdicts, fail_first, first_broken
from llmsys.config.text import FinewebQualityConfig


class FinewebQuality:
    """Drops documents whose lines are unlike paragraphs."""

    kind = "fineweb_quality"

    def __init__(self, config: FinewebQualityConfig) -> None:
        self._short = config.short_line_characters
        self.limits = [
            Limit("share of lines with an end mark", "end_mark_line_share", "below", config.min_end_mark_line_share),
            Limit("share of short lines", "short_line_share", "above", config.max_short_line_share),
            Limit(
                "share of characters in duplicate lines",
                "duplicate_line_character_share",
                "above",
                config.max_duplicate_line_character_share,
            ),
            Limit("newlines per word", "newlines_per_word", "above", config.max_newlines_per_word),
        ]

    def judge(self, batch: TextBatch) -> Verdicts:
        """Verdicts in the order of the code."""
        lines = [[line for line in text.split("\n") if line and not line.isspace()] for text in batch.texts]
        statistics = self._measure(batch, lines)
        verdicts = first_broken(self.limits, statistics, len(batch))
        return fail_first(verdicts, "empty text", batch.count(map(len, lines)) == 0)

    def _measure(self, batch: TextBatch, lines: list[list[str]]) -> dict[str, Floats]:
        counts = batch.count(map(len, lines))
        ends = batch.count(sum(line[-1] in TERMINAL_MARKS for line in document) for document in lines)
        short = batch.count(sum(len(line) <= self._short for line in document) for document in lines)
        repeated = batch.count(sum(map(len, document)) - sum(map(len, set(document))) for document in lines)
        newlines = batch.count(text.count("\n") for text in batch.texts)
        return {
            "end_mark_line_share": share(ends, counts),
            "short_line_share": share(short, counts),
            "duplicate_line_character_share": share(repeated, batch.characters - newlines),
            "newlines_per_word": share(newlines, batch.word_counts),
        }
