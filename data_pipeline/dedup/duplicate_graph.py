"""Sort rows and find connected components of near duplicates in bounded memory.

Components do not depend on the order of the pairs. They are found in memory by union-find while the
pairs are few; else by alternating large and small stars (Kiveris et al. 2014, "Connected components
in MapReduce and beyond") over externally sorted pairs: sorted runs in files, which are merged block
by block.

Writes temporary files next to the output of a task, under names that the next preparation removes
after a crash.

Invariants:
- Memory does not grow with the number of pairs. A spanning forest of pairs (the fewest pairs with
  the same components) replaces them after every batch.
- The label of a component is its smallest document.
- Memory holds one run, or one block of each of `FAN_IN` runs.
- Rows with equal keys come in an order that depends on `run_rows`: keys that decide an output are
  unique.
"""

import os
from collections.abc import Iterator, Sequence
from itertools import chain, count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa

from llmsys.storage.arrow_file import ArrowFileWriter, read_copied_batches

# Runs merged at once: each costs an open file and a block in memory.
FAN_IN = 64
_BLOCK_ROWS = 16_384
_NUMBERS = count()  # sorters of one process


class ExternalSorter:
    """A context manager that sorts the rows of Arrow tables by numeric columns."""

    def __init__(self, output: Path, schema: pa.Schema, keys: Sequence[str], run_rows: int) -> None:
        """Sort by `keys`, the first being the most significant.

        Args:
            output: File of the task; runs are written to its folder.
            schema: Columns of the rows.
            keys: Names of numeric columns.
            run_rows: Rows that are sorted in memory at a time.
        """
        self._output = output
        self._schema = schema
        self._keys = keys
        self._run_rows = run_rows
        self._waiting: list[pa.Table] = []
        self._rows = 0
        self._runs: list[Path] = []
        self._names = (
            output.with_name(f".{output.name}.{os.getpid()}.{next(_NUMBERS)}.{number}.tmp")
            for number in count()
        )

    def __enter__(self) -> Self:
        """Write nothing yet."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the runs."""
        for path in self._runs:
            path.unlink(missing_ok=True)

    def add(self, **columns: Any) -> None:
        """Add rows. `run_rows` of them are sorted in memory and written as a run.

        Args:
            **columns: Arrays of equal length, one per field of the schema.
        """
        arrays = [pa.array(columns[field.name], field.type) for field in self._schema]
        self._waiting.append(pa.Table.from_arrays(arrays, schema=self._schema))
        self._rows += len(arrays[0])
        if self._rows >= self._run_rows:
            self._runs.append(self._write_run(iter([self._sort_tables(self._waiting)])))
            self._waiting = []
            self._rows = 0

    def iter_sorted(self) -> Iterator[pa.Table]:
        """Yield all rows in order. Called once, after the last `add`."""
        last = [self._sort_tables(self._waiting)] if self._rows else []
        self._waiting = []
        if not self._runs:
            yield from last
            return
        self._runs += [self._write_run(iter(last))] if last else []
        while len(self._runs) > FAN_IN:
            # As few as leave FAN_IN runs to the last merge.
            number = min(FAN_IN, len(self._runs) - FAN_IN + 1)
            merged = self._runs[:number]
            self._runs = self._runs[number:]
            self._runs.append(self._write_run(self._merge_runs(merged)))
            for path in merged:
                path.unlink()
        yield from self._merge_runs(self._runs)

    def _sort_tables(self, tables: Sequence[pa.Table]) -> pa.Table:
        table = pa.concat_tables(tables).combine_chunks()
        # np.lexsort takes the most significant key last.
        keys = [table.column(name).to_numpy() for name in reversed(self._keys)]
        return table.take(pa.array(np.lexsort(keys))).combine_chunks()

    def _write_run(self, tables: Iterator[pa.Table]) -> Path:
        path = next(self._names)
        with ArrowFileWriter(path, self._schema) as writer:
            for table in tables:
                for batch in table.to_batches(max_chunksize=_BLOCK_ROWS):
                    writer.write(batch)
        return path

    def _merge_runs(self, runs: Sequence[Path]) -> Iterator[pa.Table]:
        blocks = [_RunReader(path, self._schema, self._keys) for path in runs]
        while blocks := [block for block in blocks if block.fill()]:
            # Up to the smallest last key of a block, no other run can hold a row that comes before.
            bound = min(block.get_last_key() for block in blocks)
            yield self._sort_tables([block.take_up_to(bound) for block in blocks])


class _RunReader:
    """The rows of a run that are in memory, with their keys."""

    def __init__(self, path: Path, schema: pa.Schema, keys: Sequence[str]) -> None:
        self._batches = read_copied_batches(path)
        self._schema = schema
        self._keys = keys
        self._table: pa.Table = schema.empty_table()

    def fill(self) -> bool:
        """Read the next block if this one is used up. Return whether there are rows."""
        while not self._table.num_rows:
            batch = next(self._batches, None)
            if batch is None:
                return False
            self._table = pa.Table.from_batches([batch])
        return True

    def get_last_key(self) -> tuple[Any, ...]:
        return tuple(self._table.column(name)[-1].as_py() for name in self._keys)

    def take_up_to(self, bound: tuple[Any, ...]) -> pa.Table:
        """Remove and return the rows that do not come after `bound`."""
        begin, end = 0, self._table.num_rows
        for name, value in zip(self._keys, bound, strict=True):
            # Only the rows whose more significant keys equal those of the bound.
            column = self._table.column(name).slice(begin, end - begin).to_numpy()
            # In the column's type: numpy compares uint64 and int64 as floats.
            value = column.dtype.type(value)
            end = begin + int(np.searchsorted(column, value, side="right"))
            begin += int(np.searchsorted(column, value))
        taken = self._table.slice(0, end)
        self._table = self._table.slice(end)
        return taken


Indices = np.ndarray[Any, np.dtype[np.int64]]
_PAIR = pa.schema([("one", pa.int64()), ("other", pa.int64())])
_LABEL = pa.schema([("label", pa.int64()), ("document", pa.int64())])
_MIX = np.uint64(0x9E3779B97F4A7C15)


def find_components(pairs: Indices) -> tuple[Indices, Indices]:
    """Find the connected components of pairs.

    Args:
        pairs: (P, 2) document numbers, in any order.

    Returns:
        The distinct documents (D,), sorted, and for each the smallest document of its component
        (D,).
    """
    documents, indices = np.unique(pairs, return_inverse=True)
    documents = documents.astype(np.int64)
    return documents, documents[_find_roots(indices.reshape(-1, 2), len(documents))]


def _find_roots(indices: Indices, size: int) -> Indices:
    """Return for each of `size` nodes the smallest one of its component."""
    roots = np.arange(size)
    low, high = indices.min(axis=1), indices.max(axis=1)
    while len(low):
        # The larger root of each pair hangs below the smallest root that it is linked with.
        np.minimum.at(roots, high, low)
        while not np.array_equal(above := roots[roots], roots):
            roots = above
        # Pairs inside of one component are done.
        one, other = roots[low], roots[high]
        is_open = one != other
        low, high = np.minimum(one, other)[is_open], np.maximum(one, other)[is_open]
    return roots


def build_spanning_forest(pairs: Indices) -> Indices:
    """Reduce pairs to the fewest with the same components.

    Args:
        pairs: (P, 2) document numbers, in any order.

    Returns:
        (F, 2) pairs of the smallest document of a component and another of its documents; at most
        one per document.
    """
    documents, first = find_components(pairs)
    linked = documents != first
    return np.stack([first[linked], documents[linked]], axis=1)


def find_labels(
    pairs: Iterator[Indices], output: Path, rows_in_memory: int
) -> Iterator[tuple[Indices, Indices]]:
    """Find the components of any number of pairs.

    Args:
        pairs: (P, 2) document numbers each.
        output: File of the task; temporary files are written to its folder.
        rows_in_memory: Pairs of a spanning forest that are held, and rows that are sorted, in
            memory.

    Yields:
        Labels (D,) and documents (D,), by rising document; every linked document once.
    """
    joined = np.zeros((0, 2), np.int64)
    for batch in pairs:
        joined = build_spanning_forest(np.concatenate([joined, batch]))
        if len(joined) > rows_in_memory:
            yield from _StarContraction(output, rows_in_memory).find_labels(joined, pairs)
            return
    documents, labels = find_components(joined)
    yield labels, documents


class _StarContraction:
    """Rounds of large stars (larger neighbours move to the smallest) and small stars (smaller
    ones do).
    """

    def __init__(self, output: Path, rows_in_memory: int) -> None:
        self._output = output
        self._rows = rows_in_memory
        self._labels = output.with_name(f".{output.name}.labels.tmp")

    def find_labels(
        self, first: Indices, more: Iterator[Indices]
    ) -> Iterator[tuple[Indices, Indices]]:
        """Contract until a round changes nothing, then yield labels and documents."""
        sorter = self._build_sorter()
        for pairs in chain([first], more):
            _add_pairs(sorter, pairs[:, 0], pairs[:, 1])
        state = 0
        before = -1
        while state != before:
            with (
                sorter,
                self._build_sorter() as small,
                ArrowFileWriter(self._labels, _LABEL) as labels,
            ):
                before = state
                state = self._run_large_star(sorter, small, labels)
                sorter = self._build_sorter()
                for one, other, smallest, is_first in _iter_groups(small):
                    one = np.where(is_first, one, other)
                    _add_pairs(sorter, one, smallest)
        with sorter:
            pass  # removes its files
        for batch in read_copied_batches(self._labels):
            yield batch.column("label").to_numpy(), batch.column("document").to_numpy()
        self._labels.unlink()

    def _run_large_star(
        self, sorter: ExternalSorter, small: ExternalSorter, labels: ArrowFileWriter
    ) -> int:
        """Give the small stars their pairs, write the smallest neighbour of each document, and
        digest the pairs.
        """
        total = 0
        for one, other, smallest, is_first in _iter_groups(sorter):
            # Of a document and its neighbours.
            smallest = np.minimum(one, smallest)
            larger = other > one
            small.add(one=other[larger], other=smallest[larger])
            columns = [pa.array(smallest[is_first]), pa.array(one[is_first])]
            labels.write(pa.record_batch(columns, schema=_LABEL))
            # A sum of mixed pairs, so that equal sets are equal in any order.
            mixed = (one.astype(np.uint64) * _MIX) ^ other.astype(np.uint64)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * _MIX
            total += int((mixed ^ (mixed >> np.uint64(32))).sum(dtype=np.uint64))
        # As each batch's sum: where batches end depends on the runs.
        return total % 2**64

    def _build_sorter(self) -> ExternalSorter:
        return ExternalSorter(self._output, _PAIR, _PAIR.names, self._rows)


def _add_pairs(sorter: ExternalSorter, one: Indices, other: Indices) -> None:
    """Add pairs in both directions. A document is no neighbour of itself."""
    linked = one != other
    one = one[linked]
    other = other[linked]
    sorter.add(one=np.concatenate([one, other]), other=np.concatenate([other, one]))


def _iter_groups(
    sorter: ExternalSorter,
) -> Iterator[tuple[Indices, Indices, Indices, np.ndarray[Any, np.dtype[np.bool_]]]]:
    """Yield distinct pairs in order, the smallest neighbour of each `one`, and whether a pair is
    its first.
    """
    last = (-1, -1, -1)  # one, other and smallest neighbour of the row before
    for table in sorter.iter_sorted():
        one = table.column("one").to_numpy()
        other = table.column("other").to_numpy()
        # A group may have begun in the table before.
        is_first = np.diff(one, prepend=last[0]) != 0
        fresh = is_first | (np.diff(other, prepend=last[1]) != 0)
        one = one[fresh]
        other = other[fresh]
        is_first = is_first[fresh]
        if not len(one):
            continue
        group = np.cumsum(is_first)
        # Neighbours are sorted: the first one is the smallest.
        smallest = np.concatenate([[last[2]], other[is_first]])[group]
        last = int(one[-1]), int(other[-1]), int(smallest[-1])
        yield one, other, smallest, is_first
