"""Verdicts of rules: which documents of a batch are kept, and for each dropped one the first test it failed.

Invariants:
- Limits are tested in order; the first one that a document breaks is the reason for its drop.
- All comparisons are strict: a value equal to its threshold is kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data_pipeline.rules.document_batch import DocumentBatch


@dataclass(frozen=True, slots=True)
class RuleOutcome:
    """The verdicts of one rule on the documents that reached it (its input), as Arrow columns.

    Attributes:
        rule: name of the rule in its configuration: its `kind` unless it was given another.
        keep: boolean per input document.
        test: string per input document, the first failed test; null if kept. `format_reason` formats it.
        value: float64 per input document, the value measured by that test; null if kept or nothing is measured.
        threshold: float64 per input document, the limit of the value; null like `value`.
        match: string per input document, the match of the test, such as listed words; null if its name is complete.
        texts: large_string per kept document, perhaps rewritten.
        statistics: float32 per kept document, by name of the statistic.
        changes: number of lines (or other pieces) removed from kept documents, by test.
    """

    rule: str
    keep: pa.BooleanArray
    test: pa.StringArray
    value: pa.DoubleArray
    threshold: pa.DoubleArray
    match: pa.StringArray
    texts: pa.LargeStringArray
    statistics: dict[str, pa.FloatArray]
    changes: dict[str, int]


def format_reason(rule: str, test: str, value: float | None, threshold: float | None, match: str | None = None) -> str:
    """Format the reason for a drop in one line, such as `gopher_quality: mean word length 11.2 > 10`.

    Args:
        rule: name of the rule.
        test: name of the failed test: the measured quantity, or a description such as `curly bracket` if it has no
            value.
        value: the measured value; None if nothing is measured.
        threshold: its limit; a value above it was dropped for being too large, one below for being too small.
        match: the match of the test, shown in brackets.

    Returns:
        One line of text.
    """
    found = f" ({match})" if match else ""
    if value is None or threshold is None:
        return f"{rule}: {test}{found}"
    return f"{rule}: {test} {format_measured_value(value)} {'>' if value > threshold else '<'} {threshold:.10g}{found}"


def format_measured_value(value: float) -> str:
    """Format a number for reasons.

    Args:
        value: the number.

    Returns:
        Four significant digits, and all digits before the decimal point.
    """
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ThresholdTest:
    """A test that drops the documents whose statistic is above (or below) a threshold."""

    test: str
    statistic: str
    drop_side: Literal["above", "below"]
    threshold: float


@dataclass(frozen=True)
class RuleVerdicts:
    """The verdicts of one rule on a batch. D documents.

    Attributes:
        tests: names of the tests.
        failed_D: index of the first failed test, -1 for a kept document.
        values_D: the value measured by that test, NaN if it measures nothing.
        thresholds_D: the limit of the value, NaN like the value.
        statistics: columns of D values.
        texts: the rewritten texts; None if the rule rewrites none.
        changes: columns of D counts of the pieces removed from each text.
        matches: match of the failed test by index of the document, if it adds to the name of the test.
        words: number of words of the rewritten texts, None if unknown.
    """

    tests: tuple[str, ...]
    failed_D: npt.NDArray[np.int8]
    values_D: Floats
    thresholds_D: Floats
    statistics: Mapping[str, Floats]
    texts: Sequence[str] | None = None
    changes: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    matches: Mapping[int, str] = field(default_factory=dict)
    words: npt.NDArray[np.int64] | None = None


class Rule(Protocol):
    """A rule measures and judges a batch of documents."""

    @property
    def kind(self) -> str:
        """Name of the rule in configurations, reasons and statistics."""

    @property
    def limits(self) -> Sequence[ThresholdTest]:
        """The tests that compare a statistic with a threshold."""

    def apply(self, batch: DocumentBatch) -> RuleVerdicts:
        """Return the verdict on each document of the batch."""


def apply_thresholds(
    limits: Sequence[ThresholdTest], statistics: Mapping[str, Floats], num_documents: int
) -> RuleVerdicts:
    """Return the verdicts of limits, tested in the given order."""
    failed = np.full(num_documents, -1, np.int8)
    values, thresholds = np.full(num_documents, np.nan), np.full(num_documents, np.nan)
    for number, limit in enumerate(limits):
        measured = statistics[limit.statistic]
        breaks = measured > limit.threshold if limit.drop_side == "above" else measured < limit.threshold
        breaks &= failed < 0  # an earlier limit decides
        failed[breaks] = number
        values[breaks] = measured[breaks]
        thresholds[breaks] = limit.threshold
    return RuleVerdicts(tuple(limit.test for limit in limits), failed, values, thresholds, statistics)


def prepend_test(verdicts: RuleVerdicts, test: str, fails_D: npt.NDArray[np.bool_]) -> RuleVerdicts:
    """Return the verdicts with one more test, without value and threshold, before all others."""
    return replace(
        verdicts,
        tests=(*verdicts.tests, test),
        failed_D=np.where(fails_D, len(verdicts.tests), verdicts.failed_D).astype(np.int8),
        values_D=np.where(fails_D, np.nan, verdicts.values_D),
        thresholds_D=np.where(fails_D, np.nan, verdicts.thresholds_D),
    )
