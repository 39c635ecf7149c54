"""Lists of files that tasks read, kept in a file of their own.

A task that reads every file of a stage is pickled with the name of the list, and millions of tasks and files take no
memory in the driver.

Reads and writes uncompressed Arrow files, which are mapped. Names are relative to the folder of the dataset.
"""

import filecmp
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa

from data_pipeline.core.staging import JOURNAL, LISTS
from llmsys.arrow_file import ArrowFileWriter, map_file, open_arrow

ROWS_PER_BATCH = 4_096
LIST_FOLDER = f"{JOURNAL}/{LISTS}"
_NAMES = pa.schema([("name", pa.binary())])  # file names may hold bytes that are not UTF-8


class FileRows(Sequence[dict[str, Any]]):
    """Rows of a list; picklable by name. One batch of them is in memory."""

    def __init__(self, path: Path) -> None:
        """Read the list that `write_rows` wrote."""
        self.path = path
        self._latest: tuple[int, list[dict[str, Any]]] = (-1, [])

    @cached_property
    def _arrow(self) -> pa.RecordBatchFileReader:
        return open_arrow(self.path, map_file(self.path))

    @cached_property
    def _length(self) -> int:
        batches = self._arrow.num_record_batches
        return (batches - 1) * ROWS_PER_BATCH + self._arrow.get_batch(batches - 1).num_rows if batches else 0

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._length

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        """Return one row, or a list of them."""
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._length))]
        batch, row = divmod(range(self._length)[index], ROWS_PER_BATCH)
        if self._latest[0] != batch:
            self._latest = batch, self._arrow.get_batch(batch).to_pylist()
        return self._latest[1][row]

    def read_numbers(self, column: str) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return a column of numbers, (rows,) int64."""
        batches = [self._arrow.get_batch(index) for index in range(self._arrow.num_record_batches)]
        return np.concatenate([np.zeros(0, np.int64), *(batch.column(column).to_numpy() for batch in batches)])

    def __getstate__(self) -> dict[str, Any]:
        """Return the name alone."""
        return {"path": self.path, "_latest": (-1, [])}


class FileList(Sequence[Path]):
    """Paths of the files of a stage; picklable by the name of the list."""

    def __init__(self, folder: Path, rows: FileRows) -> None:
        """List the files that the column `name` names, relative to `folder`."""
        self._folder, self._rows = folder, rows

    @property
    def name(self) -> str:
        """The name of the list."""
        return self._rows.path.stem

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Path: ...
    @overload
    def __getitem__(self, index: slice) -> list[Path]: ...
    def __getitem__(self, index: int | slice) -> Path | list[Path]:
        """Return one path, or a list of them."""
        if isinstance(index, slice):
            return [self._folder / os.fsdecode(row["name"]) for row in self._rows[index]]
        return self._folder / os.fsdecode(self._rows[index]["name"])


def write_rows(path: Path, schema: pa.Schema, rows: Iterable[dict[str, Any]]) -> FileRows:
    """Write a list.

    Args:
        path: The file to write.
        schema: Columns of the list.
        rows: Values by column; they are taken one by one.

    Returns:
        The list, which reads the file.
    """
    aside = path.with_name(f".{path.name}.new.tmp")
    with ArrowFileWriter(aside, schema) as writer:
        waiting: list[dict[str, Any]] = []
        for row in rows:
            waiting.append(row)
            if len(waiting) == ROWS_PER_BATCH:
                writer.write(pa.RecordBatch.from_pylist(waiting, schema))
                waiting = []
        if waiting:
            writer.write(pa.RecordBatch.from_pylist(waiting, schema))
    if path.exists() and filecmp.cmp(aside, path, shallow=False):
        aside.unlink()  # a run that changes nothing leaves every file as it is
    else:
        aside.replace(path)
    return FileRows(path)


def write_file_list(folder: Path, name: str, files: Iterable[str]) -> FileList:
    """Write the list of files that the tasks of a stage read.

    Args:
        folder: Dataset folder.
        name: Name of the list, unique among the stages.
        files: Names, relative to the folder.

    Returns:
        The paths.
    """
    rows = ({"name": os.fsencode(file)} for file in files)
    return FileList(folder, write_rows(folder / LIST_FOLDER / f"{name}.arrow", _NAMES, rows))
