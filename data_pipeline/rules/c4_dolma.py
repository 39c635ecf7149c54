"""C4's rule as dolma's tagger c4_v2 and its published mixing implement it.

Drops pages that contain `{`, `lorem ipsum` or `javascript` anywhere, and removes lines from the others. The remaining
lines are unchanged: each keeps its white space and its newline.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from data_pipeline.rules.document_batch import DocumentBatch
from data_pipeline.rules.verdict import RuleVerdicts, ThresholdTest, apply_thresholds, prepend_test
from llmsys.config.line_rules import C4DolmaConfig

_PAGE_TESTS = {"curly bracket": "{", "lorem ipsum": "lorem ipsum", "javascript": "javascript"}
_NO_MARK, _FEW_WORDS = "line taken out: no end mark", "line taken out: too few words"


class C4DolmaRule:
    """A rule that drops pages and removes lines."""

    kind = "c4_dolma"
    limits: tuple[ThresholdTest, ...] = ()

    def __init__(self, config: C4DolmaConfig) -> None:
        self._config = config
        self._tests = {
            test: phrase
            for test, phrase in _PAGE_TESTS.items()
            if config.curly_brackets == "drop_page" or phrase != "{"
        }

    def apply(self, batch: DocumentBatch) -> RuleVerdicts:
        """Return the verdicts and the rewritten texts."""
        pages = [self._clean_page(text, batch.splitters.language.split_chunks) for text in batch.texts]
        counts = np.array([page[1:] for page in pages], np.int64).reshape(len(pages), 4)
        lines, no_mark, few_words, kept = counts.T
        statistics = {
            "kept_lines": kept.astype(np.float64),
            "lines_taken_out": (lines - kept).astype(np.float64),
        }
        verdicts = apply_thresholds(self.limits, statistics, len(batch))
        lower = [text.lower() for text in batch.texts]
        verdicts = prepend_test(verdicts, "no line left", kept == 0)
        for test, phrase in reversed(self._tests.items()):
            verdicts = prepend_test(verdicts, test, np.array([phrase in text for text in lower], np.bool_))
        changes = {_NO_MARK: no_mark, _FEW_WORDS: few_words}
        return replace(verdicts, texts=[page[0] for page in pages], changes=changes)

    def _clean_page(self, text: str, split: Callable[[str], list[str]]) -> tuple[str, int, int, int, int]:
        """Return the remaining text and the counts of lines: all, without an end mark, with too few words, kept."""
        config = self._config
        lines = text.split("\n")
        kept: list[int] = []
        no_mark = few_words = 0
        for number, line in enumerate(lines):
            stripped = line.strip()
            if config.end_marks and not stripped.endswith(config.end_marks):
                no_mark += 1
            elif len(split(stripped)) < config.min_words_per_line:
                few_words += 1
            else:
                kept.append(number)
        left = "".join(lines[number] + "\n" * (number < len(lines) - 1) for number in kept)
        return left, len(lines), no_mark, few_words, len(kept)
