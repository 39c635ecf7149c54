"""Rules of the user's own code: the class to extend, its place in a chain of rules, and a test kit.

    class NoRecipes(PythonRule):
        max_recipe_share: float = 0.02

        def measure(self, text: str) -> dict[str, float]:
            words = text.lower().split() return {"recipe_share": sum(word in RECIPE_WORDS for word
            in words) / max(1, len(words))}

        def list_limits(self) -> list[ThresholdTest]:
            return [ThresholdTest("share of recipe words", "recipe_share", "above",
            self.max_recipe_share)]

Statistics and thresholds are those of any rule: they are stored, swept, explained and reported by
name.

Invariants:
- A document is judged by its text and the options alone; `check_python_rule` tests it.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from llmsys.config.custom_rules import PythonRuleConfig
from llmsys.config.loading.python_object import describe_error, load_python_object
from llmsys.config.section import Section
from llmsys.data_pipeline.rules.document_row import DocumentRow
from llmsys.data_pipeline.rules.rule import (
    DocumentBatch,
    Floats,
    RuleVerdicts,
    ThresholdTest,
    apply_thresholds,
)
from llmsys.errors import ConfigError, DataError

SHOWN_CHARACTERS = 60


class PythonRule(Section):
    """Base class of a rule: fields are options, `measure` gives statistics, `list_limits` the
    thresholds.
    """

    @abstractmethod
    def measure(self, text: str) -> Mapping[str, float]:
        """Return the statistics of a document, by the names that the limits use."""

    @abstractmethod
    def list_limits(self) -> Sequence[ThresholdTest]:
        """Return the tests in order; each names a statistic, the side that is dropped, and the
        threshold.
        """

    def measure_all(self, texts: Sequence[str]) -> Mapping[str, Sequence[float]]:
        """Return the statistics of several documents, as columns. Override it where arrays are
        faster.
        """
        rows = [self.measure(text) for text in texts]
        if wrong := [row for row in rows if set(row) != set(rows[0])]:
            raise ValueError(
                f"documents have the statistics {sorted(rows[0])} and {sorted(wrong[0])}"
            )
        return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}

    def measure_documents(self, documents: Sequence[DocumentRow]) -> Mapping[str, Sequence[float]]:
        """Return the statistics of several documents with all of their columns; `DocumentRule` has
        a method for one.
        """
        return self.measure_all([document.text for document in documents])


def load_python_rule(config: PythonRuleConfig) -> PythonRule:
    """Run the user's code and build the rule.

    Args:
        config: the section.

    Returns:
        The user's object.

    Raises:
        ConfigError: the class is missing or wrong, an option is wrong, or there is no limit.
    """
    rule = load_python_object(config, PythonRule, f"the rule {config.title}")  # type: ignore[type-abstract]
    try:
        limits = list(rule.list_limits())
    except Exception as error:
        raise ConfigError(
            f"{config.path}: list_limits failed: {describe_error(error, config.files[0])}. "
            "Correct it."
        ) from error
    if not limits or not all(isinstance(limit, ThresholdTest) for limit in limits):
        raise ConfigError(
            f"{config.path}: list_limits returned {limits!r}, which drops nothing. Return at "
            "least one ThresholdTest."
        )
    return rule


class LoadedPythonRule:
    """A user's rule in a chain."""

    kind = "python"

    def __init__(self, config: PythonRuleConfig) -> None:
        """Load the user's class."""
        self._path = config.path
        self._file = config.files[0]
        self._rule = load_python_rule(config)
        self.limits = list(self._rule.list_limits())

    def apply(self, batch: DocumentBatch) -> RuleVerdicts:
        """Return the verdicts by the user's statistics."""
        return apply_thresholds(self.limits, self._measure_batch(batch), len(batch))

    def _measure_batch(self, batch: DocumentBatch) -> dict[str, Floats]:
        texts = batch.texts
        names = list(dict.fromkeys(limit.statistic for limit in self.limits))
        if not texts:
            return {name: np.empty(0) for name in names}
        try:
            # Rows are built only for rules that read them.
            reads_rows = type(self._rule).measure_documents is not PythonRule.measure_documents
            found = (
                self._rule.measure_documents(batch.rows)
                if reads_rows
                else self._rule.measure_all(texts)
            )
            columns = {name: np.asarray(values, np.float64) for name, values in found.items()}
        except Exception as error:
            raise DataError(
                f"{self._path} failed on {len(texts)} documents, the first of which begins "
                f"{texts[0][:SHOWN_CHARACTERS]!r}: {describe_error(error, Path(self._file))}. "
                "Correct the code; check_python_rule runs it on texts of your own."
            ) from error
        if set(columns) != set(names) or any(
            column.shape != (len(texts),) for column in columns.values()
        ):
            raise DataError(
                f"{self._path} measured {', '.join(sorted(columns)) or 'nothing'}, but its limits "
                f"use {', '.join(names)}. Return one number of each for every document, and no "
                "others."
            )
        return columns


def check_python_rule(rule: PythonRule, *, kept: Sequence[str], dropped: Sequence[str]) -> None:
    """Test a rule on texts: the verdicts, and that no document depends on its neighbours.

    Args:
        rule: the rule, with its options.
        kept: texts that must stay.
        dropped: texts that must go.

    Raises:
        AssertionError: a verdict is another one; names the text and the statistics.
    """
    limits = list(rule.list_limits())
    texts = [*kept, *dropped]
    together = {
        name: np.asarray(values, np.float64) for name, values in rule.measure_all(texts).items()
    }
    failed = apply_thresholds(limits, together, len(texts)).failed_D
    for number, text in enumerate(texts):
        alone = {
            name: np.asarray(values, np.float64)
            for name, values in rule.measure_all([text]).items()
        }
        row = {name: float(column[number]) for name, column in together.items()}
        shown = text[:SHOWN_CHARACTERS]
        if row != {name: float(column[0]) for name, column in alone.items()}:
            raise AssertionError(f"{shown!r} measures {row} among other texts and {alone} alone")
        if (failed[number] < 0) != (number < len(kept)):
            verdict = (
                "kept" if failed[number] < 0 else f"dropped by {limits[failed[number]].test!r}"
            )
            raise AssertionError(f"{shown!r} is {verdict}: it measures {row}")
