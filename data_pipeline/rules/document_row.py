"""Documents with all of their columns, for the user's own rules, annotators and mappers.

Rows are built only for rules that ask for them: others see columns of texts alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from llmsys.data_pipeline.core.input_fields import FIELDS, decode_fields, to_python_value

_NAMES = ("id", "url", "date", "file", "offset", "note", "language", "language_score")


@dataclass(frozen=True)
class DocumentRow:
    """One document as it reaches a rule.

    Attributes:
        text: its text, as earlier rules and mappers left it.
        id: its id.
        url: its address; "" without one.
        date: time of capture; "" without one.
        file: the input file.
        offset: its place in the file.
        note: what was damaged in it; "" for nothing.
        language: ISO code.
        language_score: score of the language.
        fields: further fields of the input by their names there: numbers, texts, times, lists and
            mappings. Absent and null fields are not among them.
        measured: columns that earlier rules and annotators added, such as `gopher_quality.words`.
    """

    text: str
    id: str = ""
    url: str = ""
    date: str = ""
    file: str = ""
    offset: int = 0
    note: str = ""
    language: str = ""
    language_score: float = 0.0
    fields: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)


class DocumentColumns:
    """Columns besides the text of the documents of a batch, and those that rules added.

    Args:
        batch: rows with the columns of filtered documents; others are ignored.
        measured: columns that earlier rules added, by name.
    """

    def __init__(self, batch: pa.RecordBatch, measured: Mapping[str, pa.Array] = {}) -> None:
        self._batch = batch
        self._measured = dict(measured)

    def select_documents(
        self, keep: npt.NDArray[np.bool_], rule: str, added: Mapping[str, pa.Array]
    ) -> "DocumentColumns":
        """Return the columns of the documents that a rule kept.

        Args:
            keep: (D,) whether each is kept.
            rule: name of the rule.
            added: columns that it added, with a value for each kept document.

        Returns:
            Their columns.
        """
        mask = pa.array(keep)
        measured = {name: column.filter(mask) for name, column in self._measured.items()}
        measured |= {f"{rule}.{name}": column for name, column in added.items()}
        return DocumentColumns(self._batch.filter(mask), measured)

    def build_rows(self, texts: Sequence[str]) -> list[DocumentRow]:
        """Build the documents.

        Args:
            texts: their texts.

        Returns:
            One row per text.
        """
        present = [name for name in _NAMES if name in self._batch.schema.names]
        columns = [self._batch.column(name).to_pylist() for name in present]
        rows = [dict(zip(present, row, strict=True)) for row in zip(*columns, strict=True)]
        rows = rows or [{} for _ in texts]
        cells = (
            self._batch.column(FIELDS).to_pylist()
            if FIELDS in self._batch.schema.names
            else [None] * len(texts)
        )
        measured = {name: column.to_pylist() for name, column in self._measured.items()}
        return [
            DocumentRow(
                text=text,
                fields=_build_fields(cell),
                measured={name: column[number] for name, column in measured.items()},
                **{name: value for name, value in row.items() if value is not None},
            )
            for number, (text, row, cell) in enumerate(zip(texts, rows, cells, strict=True))
        ]


def _build_fields(cell: str | None) -> dict[str, Any]:
    return {
        name: to_python_value(value)
        for name, value in decode_fields(cell).items()
        if value is not None
    }
