"""Look up the ids of documents by number: those of this dataset by input file and row, those of earlier ones by index.

Reads the files of document columns that the signing stage wrote. They are memory-mapped, not loaded.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline.dedup.dedup_index import EarlierDataset
from data_pipeline.dedup.keys import Columns
from data_pipeline.text.ragged_arrays import compute_offsets
from llmsys.token_shards import read_batches

Integers = np.ndarray[Any, np.dtype[np.int64]]


class DocumentTable:
    """The documents of several files, numbered across files; columns are read on demand.

    Files are mapped one after another, because a crawl can have more than a process can map.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        rows = [sum(batch.num_rows for batch in read_batches(path)) for path in paths]
        self.starts = compute_offsets(rows)

    def take_column(self, documents: Integers, column: str) -> pa.Array:
        """Return a column for the given documents, in their order."""
        order = np.argsort(documents, kind="stable")
        wanted = documents[order]
        edges = np.searchsorted(wanted, self.starts)
        pieces = [pa.array([], pa.string() if column == "id" else pa.int64())]
        for number in np.flatnonzero(np.diff(edges)).tolist():
            rows = wanted[edges[number] : edges[number + 1]] - self.starts[number]
            found = pa.chunked_array([batch.column(column) for batch in read_batches(self._paths[number])])
            pieces += found.take(pa.array(rows)).chunks
        inverse = np.empty(len(order), np.int64)
        inverse[order] = np.arange(len(order))
        return pa.concat_arrays(pieces).take(pa.array(inverse))

    def get_source_numbers(self, documents: Integers) -> Integers:
        """Return the file number of each document."""
        found: Integers = np.searchsorted(self.starts, documents, side="right") - 1
        return found


class DocumentIdLookup:
    """Ids of documents of this dataset and of earlier ones."""

    def __init__(self, documents: Sequence[Path], earlier: Sequence[EarlierDataset]) -> None:
        self._paths, self._earlier = documents, earlier

    @cached_property
    def _own_table(self) -> DocumentTable:
        return DocumentTable(self._paths)

    @cached_property
    def _earlier_tables(self) -> list[DocumentTable]:
        return [DocumentTable(dataset.documents) for dataset in self._earlier]

    def look_up_items(self, items: Columns) -> tuple[pa.Array, pa.Array]:
        """Return the ids of items, and the names of their earlier datasets ("" for this one).

        An earlier item has age 0, its dataset's number as source and its document number as row.
        """
        own = items["age"] == 1
        home = np.where(own, 0, np.asarray(items["source"]).astype(np.int64) + 1)
        pieces, places = [pa.array([], pa.string())], [np.zeros(0, np.int64)]
        for number in range(len(self._earlier) + 1):
            here = np.flatnonzero(home == number)
            if len(here):
                pieces.append(self._take_ids(number, items["source"][here], items["row"][here]))
                places.append(here)
        names = pa.concat_arrays(pieces).take(pa.array(np.argsort(np.concatenate(places))))
        datasets = pa.array(["", *(dataset.name for dataset in self._earlier)], pa.string())
        return names, datasets.take(pa.array(home))

    def _take_ids(self, number: int, source: Integers, row: Integers) -> pa.Array:
        """Return the ids of documents of this dataset (number 0) or of an earlier one."""
        if number:
            return self._earlier_tables[number - 1].take_column(row, "id")
        return self._own_table.take_column(self._own_table.starts[source] + row, "id")
