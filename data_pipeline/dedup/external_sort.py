"""Sort any number of rows in bounded memory: sorted runs in files, which are merged block by block.

Writes temporary files next to the output of a task, under names that the next preparation removes after a crash.

Invariants:
    - Memory holds one run, or one block of each of `FAN_IN` runs.
    - Rows with equal keys come in an order that depends on `run_rows`: keys that decide an output are unique.
"""

import os
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa

from llmsys.token_shards import ArrowFileWriter, read_batches

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
        self._output, self._schema, self._keys, self._run_rows = output, schema, keys, run_rows
        self._waiting: list[pa.Table] = []
        self._rows = 0
        self._runs: list[Path] = []
        self._names = (
            output.with_name(f".{output.name}.{os.getpid()}.{next(_NUMBERS)}.{number}.tmp") for number in count()
        )

    def __enter__(self) -> Self:
        """Write nothing yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the runs."""
        for path in self._runs:
            path.unlink(missing_ok=True)

    def add(self, **columns: Any) -> None:
        """Add rows, given as arrays of equal length by column."""
        arrays = [pa.array(columns[field.name], field.type) for field in self._schema]
        self._waiting.append(pa.Table.from_arrays(arrays, schema=self._schema))
        self._rows += len(arrays[0])
        if self._rows >= self._run_rows:
            self._runs.append(self._write_run(iter([self._sort_tables(self._waiting)])))
            self._waiting, self._rows = [], 0

    def iter_sorted(self) -> Iterator[pa.Table]:
        """Yield all rows in order. Called once, after the last `add`."""
        last = [self._sort_tables(self._waiting)] if self._rows else []
        self._waiting = []
        if not self._runs:
            yield from last
            return
        self._runs += [self._write_run(iter(last))] if last else []
        while len(self._runs) > FAN_IN:
            merged, self._runs = self._runs[:FAN_IN], self._runs[FAN_IN:]
            self._runs.append(self._write_run(self._merge_runs(merged)))
            for path in merged:
                path.unlink()
        yield from self._merge_runs(self._runs)

    def _sort_tables(self, tables: Sequence[pa.Table]) -> pa.Table:
        table = pa.concat_tables(tables).combine_chunks()
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
        self._batches, self._schema, self._keys = read_batches(path), schema, keys
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
            column = self._table.column(name).slice(begin, end - begin).to_numpy()
            value = column.dtype.type(value)
            end = begin + int(np.searchsorted(column, value, side="right"))
            begin += int(np.searchsorted(column, value))
        taken, self._table = self._table.slice(0, end), self._table.slice(end)
        return taken
