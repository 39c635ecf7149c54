"""Remove lines that are not prose (RefinedWeb's line-wise corrections, Penedo et al. 2023, G.2, in
DCLM's version).

Removes lines in capitals, of digits, counters such as `3 likes` and lines of one word. Cuts
navigation out of short lines. Drops pages that lose more than a small share of their words. Every
changed line is counted by its reason; the reasons are tested in this order.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from llmsys.config.line_rules import LineCorrectionsConfig
from llmsys.data_pipeline.rules.rule import (
    DocumentBatch,
    RuleVerdicts,
    ThresholdTest,
    apply_thresholds,
    compute_share,
    prepend_test,
)

_UPPER, _DIGITS, _COUNTER, _SHORT, _NAVIGATION = (
    f"line taken out: {reason}"
    for reason in ("upper case", "numeric", "counter", "too few words", "navigation")
)
_CUT = "line without its navigation"
_NOTHING = re.compile(r"(?!)")
_SplitWords = Callable[[str], list[str]]


class LineCorrectionsRule:
    """A rule that removes lines, cuts navigation out of others, and drops pages that lose too
    much.
    """

    kind = "line_corrections"

    def __init__(self, config: LineCorrectionsConfig) -> None:
        self._config = config
        self._counter = _build_counter_pattern(config.counter_words)
        self._phrases = tuple(
            map(
                str.lower,
                config.navigation_anywhere + config.navigation_end + config.navigation_start,
            )
        )
        self._navigation = [
            _build_phrase_pattern(config.navigation_anywhere, r"\s?{}"),
            _build_phrase_pattern(config.navigation_end, r"\s?{}$"),
            _build_phrase_pattern(config.navigation_start, r"^{}\s?"),
        ]
        self.limits = [
            ThresholdTest(
                "share of words taken out",
                "removed_word_share",
                "above",
                config.max_removed_word_share,
            )
        ]

    def apply(self, batch: DocumentBatch) -> RuleVerdicts:
        """Return the verdicts and the rewritten texts."""
        cut = batch.splitters.language.split_chunks
        corrected = [self._correct_text(text, cut) for text in batch.texts]
        texts = [text for text, _ in corrected]
        changes = {
            reason: batch.to_counts(counts[reason] for _, counts in corrected)
            for reason in (_UPPER, _DIGITS, _COUNTER, _SHORT, _NAVIGATION, _CUT)
        }
        before = batch.to_counts(len(cut(text)) for text in batch.texts)
        after = batch.to_counts(len(cut(text)) for text in texts)
        statistics = {
            "removed_word_share": compute_share(before - after, before),
            "lines_taken_out": batch.to_counts(
                counts.total() - counts[_CUT] for _, counts in corrected
            ).astype(np.float64),
            "lines_cut": changes[_CUT].astype(np.float64),
        }
        verdicts = apply_thresholds(self.limits, statistics, len(batch))
        return replace(
            prepend_test(verdicts, "no line left", after == 0), texts=texts, changes=changes
        )

    def _correct_text(self, text: str, cut: _SplitWords) -> tuple[str, Counter[str]]:
        """Return the remaining text, and the number of changed lines by reason."""
        counts: Counter[str] = Counter()
        kept: list[str] = []
        for line in text.split("\n"):
            reason = self._find_removal_reason(line, cut) if line else ""
            if not reason and self._can_hold_navigation(line, cut):
                left = self._remove_navigation(line)
                reason = _NAVIGATION if not left.strip() else ""
                counts[_CUT] += left != line and not reason
                line = left
            if reason:
                counts[reason] += 1
            else:
                kept.append(line)
        return "\n".join(kept).strip(), counts

    def _find_removal_reason(self, line: str, cut: _SplitWords) -> str:
        """Return the reason why the form of a line removes it, "" if it stays."""
        config = self._config
        if sum(map(str.isupper, line)) / len(line) > config.max_upper_case_share:
            return _UPPER
        if line.strip().isdigit() and config.numeric_lines == "take_out":
            return _DIGITS
        if self._counter.match(line.lower()):
            return _COUNTER
        return _SHORT if len(cut(line)) < config.min_words_per_line else ""

    def _can_hold_navigation(self, line: str, cut: _SplitWords) -> bool:
        lower = line.lower()
        found = any(phrase in lower for phrase in self._phrases)
        return found and len(cut(line)) <= self._config.max_navigation_words

    def _remove_navigation(self, line: str) -> str:
        for pattern in self._navigation:
            line = pattern.sub("", line)
        return line


def _build_counter_pattern(words: tuple[str, ...]) -> re.Pattern[str]:
    """Build a pattern of a number, with an optional k, m or b, and a counted word."""
    if not words:
        return _NOTHING
    return re.compile(
        rf"\W*\d[,.\d]*[kmb]?\s+(?:{'|'.join(map(re.escape, map(str.lower, words)))})\W*$"
    )


def _build_phrase_pattern(phrases: tuple[str, ...], template: str) -> re.Pattern[str]:
    """Build a case-insensitive pattern of any of the phrases; `template` sets its position in
    the line.
    """
    if not phrases:
        return _NOTHING
    return re.compile(template.format(f"(?:{'|'.join(map(re.escape, phrases))})"), re.IGNORECASE)
