"""Line-wise corrections (RefinedWeb, Penedo et al. 2023, G.2, with DCLM's reading of it): lines that are no prose go.

Reads texts, takes out lines in capitals, of digits, counters such as `3 likes` and lines of one word, cuts navigation
out of short lines, and drops pages that lose more than a small share of their words. Every line that is touched is
counted by its reason; the reasons are asked in this order.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from data_pipeline.rules.batch import TextBatch, share
from data_pipeline.rules.verdict import Limit, Verdicts, fail_first, first_broken
from llmsys.config.line_rules import LineCorrectionsConfig

_UPPER, _DIGITS, _COUNTER, _SHORT, _NAVIGATION = (
    f"line taken out: {reason}" for reason in ("upper case", "numeric", "counter", "too few words", "navigation")
)
_CUT = "line without its navigation"
_NOTHING = re.compile(r"(?!)")
_Cut = Callable[[str], list[str]]  # gives the words of a line


class LineCorrections:
    """Takes lines out, mends others, and drops pages that lose too much."""

    kind = "line_corrections"

    def __init__(self, config: LineCorrectionsConfig) -> None:
        self._config = config
        self._counter = _counter(config.counter_words)
        self._phrases = tuple(
            map(str.lower, config.navigation_anywhere + config.navigation_end + config.navigation_start)
        )
        self._navigation = [
            _phrases(config.navigation_anywhere, r"\s?{}"),
            _phrases(config.navigation_end, r"\s?{}$"),
            _phrases(config.navigation_start, r"^{}\s?"),
        ]
        self.limits = [Limit("share of words taken out", "removed_word_share", "above", config.max_removed_word_share)]

    def judge(self, batch: TextBatch) -> Verdicts:
        """Verdicts and the rewritten texts."""
        cut = batch.splitters.language.cut
        corrected = [self._correct(text, cut) for text in batch.texts]
        texts = [text for text, _ in corrected]
        changes = {
            reason: batch.count(counts[reason] for _, counts in corrected)
            for reason in (_UPPER, _DIGITS, _COUNTER, _SHORT, _NAVIGATION, _CUT)
        }
        before = batch.count(len(cut(text)) for text in batch.texts)
        after = batch.count(len(cut(text)) for text in texts)
        statistics = {
            "removed_word_share": share(before - after, before),
            "lines_taken_out": batch.count(counts.total() - counts[_CUT] for _, counts in corrected).astype(np.float64),
            "lines_cut": changes[_CUT].astype(np.float64),
        }
        verdicts = first_broken(self.limits, statistics, len(batch))
        return replace(fail_first(verdicts, "no line left", after == 0), texts=texts, changes=changes)

    def _correct(self, text: str, cut: _Cut) -> tuple[str, Counter[str]]:
        """The text that stays, and the lines touched by reason."""
        counts: Counter[str] = Counter()
        kept: list[str] = []
        for line in text.split("\n"):
            reason = self._reason(line, cut) if line else ""
            if not reason and self._may_navigate(line, cut):
                left = self._without_navigation(line)
                reason = _NAVIGATION if not left.strip() else ""
                counts[_CUT] += left != line and not reason
                line = left
            if reason:
                counts[reason] += 1
            else:
                kept.append(line)
        return "\n".join(kept).strip(), counts

    def _reason(self, line: str, cut: _Cut) -> str:
        """Why the form of a line takes it out, empty when it stays."""
        config = self._config
        if sum(map(str.isupper, line)) / len(line) > config.max_upper_case_share:
            return _UPPER
        if line.strip().isdigit() and config.numeric_lines == "take_out":
            return _DIGITS
        if self._counter.match(line.lower()):
            return _COUNTER
        return _SHORT if len(cut(line)) < config.min_words_per_line else ""

    def _may_navigate(self, line: str, cut: _Cut) -> bool:
        lower = line.lower()
        found = any(phrase in lower for phrase in self._phrases)
        return found and len(cut(line)) <= self._config.max_navigation_words

    def _without_navigation(self, line: str) -> str:
        for pattern in self._navigation:
            line = pattern.sub("", line)
        return line


def _counter(words: tuple[str, ...]) -> re.Pattern[str]:
    """A number, perhaps in thousands, millions or billions, and what is counted."""
    if not words:
        return _NOTHING
    return re.compile(rf"\W*\d[,.\d]*[kmb]?\s+(?:{'|'.join(map(re.escape, map(str.lower, words)))})\W*$")


def _phrases(phrases: tuple[str, ...], place: str) -> re.Pattern[str]:
    """Any of the phrases at a place, in any case."""
    if not phrases:
        return _NOTHING
    return re.compile(place.format(f"(?:{'|'.join(map(re.escape, phrases))})"), re.IGNORECASE)
