"""Interface of rules: they get a `DocumentBatch` and return `RuleVerdicts`.

A batch has columns that several rules share, computed on first use. A verdict tells which documents
are kept, and for each dropped one the first test it failed.

Invariants:
- Limits are tested in order; the first one that a document breaks is the reason for its drop.
- All comparisons are strict: a value equal to its threshold is kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from llmsys.data_pipeline.rules.document_row import DocumentColumns, DocumentRow
from llmsys.data_pipeline.text.ragged_arrays import Integers, join_without_whitespace
from llmsys.data_pipeline.text.word_columns import WordColumns, WordSplitter
from llmsys.data_pipeline.text.word_tokenizers import UnicodeTokenizer, WhitespaceTokenizer


class WordSplitters:
    """Word splitters of a process. Keep one per process: each splitter has its own cache.

    Args:
        language: splits the words of `DocumentBatch.words`; datatrove's English by default.
    """

    def __init__(self, language: WordSplitter | None = None) -> None:
        self.language = language or WordSplitter()

    @cached_property
    def whitespace(self) -> WordSplitter:
        """Splitter at white space."""
        return WordSplitter(WhitespaceTokenizer())

    @cached_property
    def unicode(self) -> WordSplitter:
        """Splitter into the segments of UAX 29."""
        return WordSplitter(UnicodeTokenizer())


class DocumentBatch:
    """Texts and their shared columns. D documents.

    Args:
        texts: the documents.
        splitters: split their words.
        word_counts: (D,) words of each document, if known.
        columns: their other columns, if known.
    """

    def __init__(
        self,
        texts: Sequence[str],
        splitters: WordSplitters,
        word_counts: Integers | None = None,
        columns: DocumentColumns | None = None,
    ) -> None:
        self.columns = columns
        self.texts = texts
        self.splitters = splitters
        if word_counts is not None:
            self.word_counts = word_counts

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def rows(self) -> list[DocumentRow]:
        """The documents with all of their columns; with texts alone if the others are unknown."""
        if self.columns is None:
            return [DocumentRow(text) for text in self.texts]
        return self.columns.build_rows(self.texts)

    @cached_property
    def character_counts(self) -> Integers:
        """Characters (code points) per document, (D,)."""
        return self.to_counts(map(len, self.texts))

    @cached_property
    def words(self) -> WordColumns:
        """The words of all documents, as their language splits them."""
        return self.splitters.language.split_words(self.texts)

    @cached_property
    def word_counts(self) -> Integers:
        """Words per document, as its language splits them, (D,)."""
        return self.words.counts

    @cached_property
    def whitespace_words(self) -> WordColumns:
        """The chunks between white space."""
        return self.splitters.whitespace.split_words(self.texts)

    @cached_property
    def unicode_words(self) -> WordColumns:
        """Unicode's word segments that start with a letter or a digit."""
        return self.splitters.unicode.split_words(self.texts)

    @cached_property
    def bytes_without_space(self) -> bytes:
        """All texts concatenated in UTF-8, without the characters that Python considers white
        space.
        """
        return join_without_whitespace(self.texts)

    def set_columns(self, columns: DocumentColumns) -> None:
        """Replace the other columns of the documents, after a rule added some."""
        self.columns = columns
        self.__dict__.pop("rows", None)

    def count_occurrences(self, *parts: str) -> Integers:
        """Count the occurrences of all `parts` together, per document."""
        return self.to_counts(sum(map(text.count, parts)) for text in self.texts)

    def to_counts(self, numbers: Any) -> Integers:
        """Convert an iterable of D numbers to int64."""
        return np.fromiter(numbers, np.int64, len(self.texts))

    def select_documents(self, keep: npt.NDArray[np.bool_]) -> "DocumentBatch":
        """Return the kept documents with the columns computed so far."""
        if keep.all():
            return self
        # Not by the property, which would split the words.
        counted = self.__dict__.get("word_counts")
        counted = counted if counted is None else counted[keep]
        batch = DocumentBatch(list(compress(self.texts, keep.tolist())), self.splitters, counted)
        for name in _WORDS:  # cached_property stores computed columns in __dict__
            if name in self.__dict__:
                batch.__dict__[name] = self.__dict__[name].select_documents(keep)
        return batch


_WORDS = ("words", "whitespace_words", "unicode_words")


def compute_share(part: npt.NDArray[Any], whole: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Divide counts per document.

    Args:
        part: (D,) counts.
        whole: (D,) counts.

    Returns:
        part / whole, float64 (D,); 0 where the whole is 0.
    """
    quotient = np.zeros(len(part), np.float64)
    np.divide(part, whole, out=quotient, where=whole > 0)
    return quotient


@dataclass(frozen=True, slots=True)
class RuleOutcome:
    """The verdicts of one rule on the documents that reached it (its input), as Arrow columns.

    Attributes:
        rule: name of the rule in its configuration: its `kind` unless it was given another.
        keep: boolean per input document.
        test: string per input document, the first failed test; null if kept. `format_reason`
            formats it.
        value: float64 per input document, the value measured by that test; null if kept or nothing
            is measured.
        threshold: float64 per input document, the limit of the value; null like `value`.
        match: string per input document, the match of the test, such as listed words; null if its
            name is complete.
        texts: large_string per kept document, perhaps rewritten.
        statistics: float32 per kept document, by name of the statistic.
        columns: further columns per kept document, of any type, by name.
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
    columns: dict[str, pa.Array] = field(default_factory=dict)


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
        matches: match of the failed test by index of the document, if it adds to the name of the
            test.
        words: number of words of the rewritten texts, None if unknown.
        columns: further columns of D values, of any type.
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
    columns: Mapping[str, pa.Array] = field(default_factory=dict)


class Rule(Protocol):
    """A rule measures and judges a batch of documents."""

    @property
    def kind(self) -> str:
        """Name of the rule in configurations, reasons and statistics."""

    @property
    def limits(self) -> Sequence[ThresholdTest]:
        """The tests that compare a statistic with a threshold."""

    def apply(self, batch: DocumentBatch) -> RuleVerdicts:
        """Judge a batch of documents.

        Args:
            batch: D documents that passed the rules before. Columns that several rules need, such
                as words, are computed once per batch.

        Returns:
            One verdict per document, in the same order. Dropped documents are among the D of
            `texts`, too.
        """


def apply_thresholds(
    limits: Sequence[ThresholdTest], statistics: Mapping[str, Floats], num_documents: int
) -> RuleVerdicts:
    """Compare statistics with their limits.

    Args:
        limits: Tests in order; the first that a document fails is the reason for its drop.
        statistics: (D,) values by name.
        num_documents: D.

    Returns:
        The verdicts.
    """
    failed = np.full(num_documents, -1, np.int8)
    values = np.full(num_documents, np.nan)
    thresholds = np.full(num_documents, np.nan)
    for number, limit in enumerate(limits):
        measured = statistics[limit.statistic]
        breaks = (
            measured > limit.threshold if limit.drop_side == "above" else measured < limit.threshold
        )
        breaks &= failed < 0  # an earlier limit decides
        failed[breaks] = number
        values[breaks] = measured[breaks]
        thresholds[breaks] = limit.threshold
    return RuleVerdicts(
        tuple(limit.test for limit in limits), failed, values, thresholds, statistics
    )


def prepend_test(verdicts: RuleVerdicts, test: str, fails_D: npt.NDArray[np.bool_]) -> RuleVerdicts:
    """Add a test without value and threshold before all others.

    Args:
        verdicts: Verdicts so far.
        test: Name of the test.
        fails_D: True for documents that fail it.

    Returns:
        The verdicts; a document that fails it has it as its reason.
    """
    return replace(
        verdicts,
        tests=(*verdicts.tests, test),
        failed_D=np.where(fails_D, len(verdicts.tests), verdicts.failed_D).astype(np.int8),
        values_D=np.where(fails_D, np.nan, verdicts.values_D),
        thresholds_D=np.where(fails_D, np.nan, verdicts.thresholds_D),
    )
