"""Rules, annotators and mappers of the user's own code that see every column of a document.

    class Recent(DocumentRule):                      # kind: python
        def measure_document(self, document):
            return {"year": float(document.date[:4] or 0)}

    class Topic(PythonAnnotator):                    # kind: annotator
        def list_columns(self):
            return {"topic": str}

        def annotate(self, document):
            return {"topic": document.fields.get("source", "web")}

    class Lowercase(PythonMapper):                   # kind: mapper
        def map_text(self, document):
            return document.text.lower()

Invariants:
- A document is judged, annotated or changed by its own columns and the options alone.
- An annotator drops nothing and changes no text; a mapper drops nothing.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from llmsys.config.custom_rules import AnnotatorConfig, MapperConfig
from llmsys.config.loading.python_object import describe_error, load_python_object
from llmsys.config.section import Section
from llmsys.data_pipeline.rules.document_row import DocumentRow
from llmsys.data_pipeline.rules.python_rule import SHOWN_CHARACTERS, PythonRule
from llmsys.data_pipeline.rules.rule import DocumentBatch, RuleVerdicts, ThresholdTest
from llmsys.errors import ConfigError, DataError

_TYPES = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.large_string()}


class DocumentRule(PythonRule):
    """Base class of a rule that measures more than the text: `measure_document` gives statistics,
    `list_limits` the thresholds.
    """

    @abstractmethod
    def measure_document(self, document: DocumentRow) -> Mapping[str, float]:
        """Return the statistics of a document, by the names that the limits use."""

    def measure(self, text: str) -> Mapping[str, float]:
        """Measure a document that has a text alone."""
        return self.measure_document(DocumentRow(text))

    def measure_documents(self, documents: Sequence[DocumentRow]) -> Mapping[str, Sequence[float]]:
        """Return the statistics of several documents, as columns."""
        rows = [self.measure_document(document) for document in documents]
        return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}


class PythonAnnotator(Section):
    """Base class of an annotator: fields are options, `annotate` gives the values of the columns
    that `list_columns` names.
    """

    @abstractmethod
    def list_columns(self) -> Mapping[str, type]:
        """Return the columns and their types: bool, int, float or str."""

    @abstractmethod
    def annotate(self, document: DocumentRow) -> Mapping[str, Any]:
        """Return the values of a document by column; None for no value."""

    def annotate_all(self, documents: Sequence[DocumentRow]) -> Sequence[Mapping[str, Any]]:
        """Return the values of several documents. Override it where batches are faster."""
        return [self.annotate(document) for document in documents]


class PythonMapper(Section):
    """Base class of a mapper: fields are options, `map_text` gives the new text."""

    @abstractmethod
    def map_text(self, document: DocumentRow) -> str:
        """Return the text of a document, changed or not."""


def load_python_annotator(config: AnnotatorConfig) -> tuple[PythonAnnotator, dict[str, type]]:
    """Run the user's code and build the annotator.

    Args:
        config: the section.

    Returns:
        The user's object, and its columns.

    Raises:
        ConfigError: the class is missing or wrong, an option is wrong, or a column has no type.
    """
    annotator = load_python_object(config, PythonAnnotator, f"the annotator {config.title}")  # type: ignore[type-abstract]
    try:
        columns = dict(annotator.list_columns())
    except Exception as error:
        raise ConfigError(
            f"{config.path}: list_columns failed: {describe_error(error, config.files[0])}. "
            "Correct it."
        ) from error
    if not columns or not all(
        isinstance(name, str) and name and kind in _TYPES for name, kind in columns.items()
    ):
        raise ConfigError(
            f"{config.path}: list_columns returned {columns!r}. Return at least one name, each "
            "with bool, int, float or str."
        )
    return annotator, columns


def load_python_mapper(config: MapperConfig) -> PythonMapper:
    """Run the user's code and build the mapper.

    Args:
        config: the section.

    Returns:
        The user's object.

    Raises:
        ConfigError: the class is missing or wrong, or an option is.
    """
    return load_python_object(config, PythonMapper, f"the mapper {config.title}")  # type: ignore[type-abstract]


def _keep_all(number: int) -> dict[str, Any]:
    """Return the part of verdicts that keeps every document."""
    nothing = np.full(number, np.nan)
    return {
        "tests": (),
        "failed_D": np.full(number, -1, np.int8),
        "values_D": nothing,
        "thresholds_D": nothing,
    }


class LoadedAnnotator:
    """A user's annotator in a chain."""

    kind = "annotator"
    limits: Sequence[ThresholdTest] = ()

    def __init__(self, config: AnnotatorConfig) -> None:
        """Load the user's class."""
        self._path = config.path
        self._file = config.files[0]
        self._annotator, self._columns = load_python_annotator(config)

    def apply(self, batch: DocumentBatch) -> RuleVerdicts:
        """Return the columns; every document is kept as it is."""
        rows = self._annotate_batch(batch)
        try:
            columns = {
                name: pa.array([_convert(row[name], kind) for row in rows], _TYPES[kind])
                for name, kind in self._columns.items()
            }
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise DataError(
                f"{self._path} returned a value that is not of its column's type: {error}. The "
                f"columns are {self._describe_columns()}. Correct annotate or list_columns."
            ) from error
        return RuleVerdicts(**_keep_all(len(batch)), statistics={}, columns=columns)

    def _annotate_batch(self, batch: DocumentBatch) -> Sequence[Mapping[str, Any]]:
        if not len(batch):
            return []
        try:
            rows = [dict(row) for row in self._annotator.annotate_all(batch.rows)]
        except Exception as error:
            raise _build_error(self._path, self._file, batch, error) from error
        wrong = next((row for row in rows if set(row) != set(self._columns)), None)
        if wrong is not None or len(rows) != len(batch):
            raise DataError(
                f"{self._path} annotated {len(rows)} of {len(batch)} documents, one with "
                f"{', '.join(sorted(map(str, wrong or ()))) or 'no other columns'}, but its "
                f"columns are {self._describe_columns()}. Return one value of each for every "
                "document, None for no value."
            )
        return rows

    def _describe_columns(self) -> str:
        return ", ".join(f"{name} ({kind.__name__})" for name, kind in self._columns.items())


def _convert(value: Any, kind: type) -> Any:
    """Return a value of a column, and an integer as a fraction where the column has fractions."""
    if value is None:
        return None
    if kind is float and isinstance(value, int | np.floating | np.integer):
        return float(value)
    if isinstance(value, np.bool_ | np.integer):
        value = value.item()
    if type(value) is not kind:
        raise TypeError(f"{value!r:.60} is not {kind.__name__}")
    return value


class LoadedMapper:
    """A user's mapper in a chain."""

    kind = "mapper"
    limits: Sequence[ThresholdTest] = ()

    def __init__(self, config: MapperConfig) -> None:
        """Load the user's class."""
        self._path = config.path
        self._file = config.files[0]
        self._mapper = load_python_mapper(config)

    def apply(self, batch: DocumentBatch) -> RuleVerdicts:
        """Return the new texts, whether each is another one, and how many are."""
        texts = self._map_batch(batch) if len(batch) else []
        changed = np.array([a != b for a, b in zip(batch.texts, texts, strict=True)], np.bool_)
        return RuleVerdicts(
            **_keep_all(len(batch)),
            statistics={},
            columns={"changed": pa.array(changed)},
            texts=texts,
            changes={"documents": changed.astype(np.int64)},
        )

    def _map_batch(self, batch: DocumentBatch) -> list[str]:
        texts = []
        for row in batch.rows:
            try:
                text: object = self._mapper.map_text(row)
                if isinstance(text, str):
                    text.encode()
            except Exception as error:
                raise _build_error(self._path, self._file, batch, error) from error
            if not isinstance(text, str) or not text.strip():
                raise DataError(
                    f"{self._path} returned {text!r:.60} for the document that begins "
                    f"{row.text[:SHOWN_CHARACTERS]!r}. Return a text that is not blank; a rule "
                    "(kind: python) drops documents."
                )
            texts.append(text)
        return texts


def _build_error(path: str, file: Path, batch: DocumentBatch, error: Exception) -> DataError:
    return DataError(
        f"{path} failed on {len(batch)} documents, the first of which begins "
        f"{batch.texts[0][:SHOWN_CHARACTERS]!r}: {describe_error(error, Path(file))}. Correct the "
        "code."
    )


def check_python_annotator(
    annotator: PythonAnnotator, document: DocumentRow, expected: Mapping[str, Any]
) -> None:
    """Test an annotator on a document.

    Args:
        annotator: the annotator, with its options.
        document: the document.
        expected: its values by column.

    Raises:
        AssertionError: the values are others, change when it annotates again, or are not those
            that `list_columns` names.
    """
    first, again = (dict(annotator.annotate_all([document] * 2)[turn]) for turn in range(2))
    if first != again:
        raise AssertionError(f"a document has the values {first}, and again {again}")
    if first != dict(expected):
        raise AssertionError(f"a document has the values {first}, not {dict(expected)}")
    if set(first) != set(annotator.list_columns()):
        raise AssertionError(f"list_columns names {sorted(annotator.list_columns())}")


def check_python_mapper(mapper: PythonMapper, document: DocumentRow, expected: str) -> None:
    """Test a mapper on a document.

    Args:
        mapper: the mapper, with its options.
        document: the document.
        expected: its new text.

    Raises:
        AssertionError: the text is another one.
    """
    found = mapper.map_text(document)
    if found != expected:
        raise AssertionError(f"the text becomes {found!r}, not {expected!r}")
