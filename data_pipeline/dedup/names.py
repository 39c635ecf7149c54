"""Numbers of documents in, their ids out: of this dataset by judged file and row, of earlier ones by their index.

Reads the files of documents that signing wrote, mapped and not loaded.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline.dedup.index import EarlierDataset
from data_pipeline.dedup.keys import Columns
from llmsys.shards import read_batches

Integers = np.ndarray[Any, np.dtype[np.int64]]


class DocumentTable:
    """The documents of several files, numbered through in their order; columns are read when asked for."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._batches = [(number, batch) for number, path in enumerate(paths) for batch in read_batches(path)]
        self._starts = np.cumsum([0, *(batch.num_rows for _, batch in self._batches)])
        rows = np.zeros(len(paths), np.int64)
        for number, batch in self._batches:
            rows[number] += batch.num_rows
        self.starts: Integers = np.concatenate([[0], np.cumsum(rows)])

    def take(self, documents: Integers, column: str) -> pa.Array:
        """Return a column of some documents, in the order in which they are given."""
        order = np.argsort(documents, kind="stable")
        wanted = documents[order]
        edges = np.searchsorted(wanted, self._starts)
        pieces = [
            batch.column(column).take(pa.array(wanted[begin:end] - start))
            for (_, batch), begin, end, start in zip(
                self._batches, edges[:-1], edges[1:], self._starts[:-1], strict=True
            )
            if end > begin
        ]
        if not pieces:
            return pa.array([], pa.string() if column == "id" else pa.int64())
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return pa.concat_arrays(pieces).take(pa.array(back))

    def source_of(self, documents: Integers) -> Integers:
        """Return the number of the file of each document."""
        found: Integers = np.searchsorted(self.starts, documents, side="right") - 1
        return found


class DocumentNames:
    """Ids of documents, here and in earlier datasets."""

    def __init__(self, documents: Sequence[Path], earlier: Sequence[EarlierDataset]) -> None:
        self._paths, self._earlier = documents, earlier

    @cached_property
    def _here(self) -> DocumentTable:
        return DocumentTable(self._paths)

    @cached_property
    def _tables(self) -> list[DocumentTable]:
        return [DocumentTable(dataset.documents()) for dataset in self._earlier]

    def of_items(self, items: Columns) -> tuple[list[str], list[str]]:
        """Return the ids of items, and the names of the earlier datasets they lie in ("" for this one).

        An earlier item has age 0, the number of its dataset as source and its number there as row.
        """
        names = np.full(len(items["row"]), "", object)
        datasets = np.full(len(items["row"]), "", object)
        own = items["age"] == 1
        if own.any():
            names[own] = self._here.take(self._here.starts[items["source"][own]] + items["row"][own], "id").to_pylist()
        for number, dataset in enumerate(self._earlier):
            there = ~own & (items["source"] == number)
            if there.any():
                names[there] = self._tables[number].take(items["row"][there], "id").to_pylist()
                datasets[there] = dataset.name
        return names.tolist(), datasets.tolist()
