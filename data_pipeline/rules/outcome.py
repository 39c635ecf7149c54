"""What a rule says about a batch of documents: which stay, and for each of the others the first test it failed.

Reads nothing; the type here is the border between the rules and whoever writes documents, drops and funnels.
"""

from dataclasses import dataclass

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class RuleOutcome:
    """The verdicts of one rule over the documents that reached it (its input).

    Attributes:
        rule: name of the rule in its configuration, which is its `kind` unless it was given another.
        keep: boolean per input document.
        test: string per input document, the first test it failed; null where kept. `format_reason()` makes a sentence of it.
        value: float64 per input document, what was measured by that test; null where kept or where nothing is measured.
        threshold: float64 per input document, what the value was compared with; null like `value`.
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
