"""What a rule says about a batch of documents: which stay, and for each of the others the first test it failed.

Reads nothing; the type here is the border between the rules and whoever writes documents, drops and funnels.

From statistics to verdicts: the first limit that a document breaks names the reason for its drop.

Reads one column per statistic and an ordered list of limits, gives per document the number of the first test it fails
with value and threshold. All comparisons are strict: a value equal to its threshold stays.
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
    """The verdicts of one rule over the documents that reached it (its input).

    Attributes:
        rule: name of the rule in its configuration, which is its `kind` unless it was given another.
        keep: boolean per input document.
        test: string per input document, the first test it failed; null where kept. `format_reason()` makes a sentence
        of it. value: float64 per input document, what was measured by that test; null where kept or where nothing is
        measured. threshold: float64 per input document, what the value was compared with; null like `value`.
        match: string per input document, what the test found, such as listed words; null where its name says all.
        texts: large_string per kept document, perhaps rewritten.
        statistics: float32 per kept document, everything the rule measured, by name of the statistic.
        changes: how many lines (or other pieces) were taken out of kept documents, by the test that took them.
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
    """One line that explains a drop, such as `gopher_quality: mean word length 11.2 > 10`; what matched is in brackets.

    A test that has a value is named by what it measures; whether the value lies below or above its threshold shows the
    direction of the test. A test without a value is a sentence of its own, such as `c4: curly bracket`.
    """
    found = f" ({match})" if match else ""
    if value is None or threshold is None:
        return f"{rule}: {test}{found}"
    return f"{rule}: {test} {format_measured_value(value)} {'>' if value > threshold else '<'} {threshold:.10g}{found}"


def format_measured_value(value: float) -> str:
    """A number as reasons show it: four digits, and all of those before the point."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ThresholdTest:
    """One test: documents whose statistic lies above (or below) the threshold are dropped."""

    test: str
    statistic: str
    drop_side: Literal["above", "below"]
    threshold: float


@dataclass(frozen=True)
class RuleVerdicts:
    """What one rule says about a batch. D documents.

    Attributes:
        tests: names of the tests.
        failed_D: number of the first failed test, -1 where the document stays.
        values_D: what that test measured, NaN where it measures nothing.
        thresholds_D: what the value was compared with, NaN like the value.
        statistics: columns of D values.
        texts: the texts as the rule rewrote them, None when it rewrites none.
        changes: columns of D counts of what the rule took out of each text.
        matches: what a failed test found, by number of the document, where that is more than its name says.
        words: how many words the rewritten texts have, None where nobody counted them.
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
    """A rule measures a batch of documents and judges each of them."""

    @property
    def kind(self) -> str:
        """Name of the rule in configurations, reasons and statistics."""

    @property
    def limits(self) -> Sequence[ThresholdTest]:
        """The tests that compare a statistic with a threshold."""

    def apply(self, batch: DocumentBatch) -> RuleVerdicts:
        """The verdict on each document of the batch."""


def apply_thresholds(
    limits: Sequence[ThresholdTest], statistics: Mapping[str, Floats], num_documents: int
) -> RuleVerdicts:
    """Verdicts by limits alone, tested in the order given."""
    failed = np.full(num_documents, -1, np.int8)
    values, thresholds = np.full(num_documents, np.nan), np.full(num_documents, np.nan)
    for number, limit in enumerate(limits):
        measured = statistics[limit.statistic]
        breaks = measured > limit.threshold if limit.drop_side == "above" else measured < limit.threshold
        breaks &= failed < 0
        failed[breaks] = number
        values[breaks] = measured[breaks]
        thresholds[breaks] = limit.threshold
    return RuleVerdicts(tuple(limit.test for limit in limits), failed, values, thresholds, statistics)


def prepend_test(verdicts: RuleVerdicts, test: str, fails_D: npt.NDArray[np.bool_]) -> RuleVerdicts:
    """The same verdicts with one more test, without value and threshold, that comes before all others."""
    return replace(
        verdicts,
        tests=(*verdicts.tests, test),
        failed_D=np.where(fails_D, len(verdicts.tests), verdicts.failed_D).astype(np.int8),
        values_D=np.where(fails_D, np.nan, verdicts.values_D),
        thresholds_D=np.where(fails_D, np.nan, verdicts.thresholds_D),
    )
