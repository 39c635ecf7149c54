"""Keys of documents that an earlier config kept of the same block, with their new rows.

Reads the filtered file and the keys of that config, and the filtered file of the present one.

Invariants:
    - Keys are taken over for documents whose columns, the text included, are equal, and no others.
    - Keys of a row come in the order in which they are computed.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from llmsys.data_pipeline.core.document_schema import concat_batches
from llmsys.data_pipeline.dedup.keys import Columns
from llmsys.storage.arrow_file import read_batches, read_columns, read_schema

Rows = npt.NDArray[np.int64]

# What keys and ranks are computed from.
_COLUMNS = frozenset({"id", "url", "date", "language", "text"})
_NONE = -1


class KnownSignatures:
    """Keys by relation whose `row` is that of the present file."""

    def __init__(self, rows: Rows, keys: Mapping[str, Columns]) -> None:
        """Number the keys anew.

        Args:
            rows: Row in the present file of each row of the earlier one; -1 without one.
            keys: Keys by relation, with rows of the earlier file.
        """
        self._known = np.sort(rows[rows != _NONE])
        self._keys = dict[str, Columns]()
        for relation, columns in keys.items():
            present = rows[columns["row"]]
            mask = present != _NONE
            kept = {name: column[mask] for name, column in columns.items()}
            self._keys[relation] = _sort_keys(kept | {"row": present[mask]})

    def mask_rows(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Mask the rows of the present file whose keys are known."""
        return np.isin(rows, self._known, assume_unique=True)

    def add_keys(self, relation: str, columns: Columns, first: int, last: int) -> Columns:
        """Return computed keys and the known ones of the rows `first` to `last`, in the order of
        rows.
        """
        known = self._keys[relation]
        start, stop = np.searchsorted(known["row"], [first, last]).tolist()
        joined = {
            name: np.concatenate([column, known[name][start:stop].astype(column.dtype)])
            for name, column in columns.items()
        }
        return _sort_keys(joined)


def _sort_keys(columns: Columns) -> Columns:
    # Keys of buckets are computed in the order of their numbers, which are in `low`.
    order = np.lexsort((columns["low"], columns["row"]))
    return {name: column[order] for name, column in columns.items()}


def read_known_signatures(source: Path, earlier: Mapping[str, Path]) -> KnownSignatures | None:
    """Read the keys that hold for a filtered file.

    Args:
        source: The filtered file.
        earlier: Filtered file (`source`), its documents and its keys (`keys.…`) under an earlier
            config.

    Returns:
        The known keys; None where two documents of a file have one id.
    """
    present = _read_whole(source)
    before = _read_whole(earlier["source"])
    places = {name: row for row, name in enumerate(present.column("id").to_pylist())}
    names = before.column("id").to_pylist()
    if len(places) < present.num_rows or len(set(names)) < len(names):
        return None
    rows = np.array([places.get(name, _NONE) for name in names], np.int64)
    common = np.flatnonzero(rows != _NONE)
    pair = before.take(pa.array(common)), present.take(pa.array(rows[common]))
    for name in sorted(_COLUMNS):
        rows[common[~_mask_equal(*(batch.column(name) for batch in pair))]] = _NONE
    keys = {
        name.removeprefix("keys."): _read_keys(path)
        for name, path in earlier.items()
        if name.startswith("keys.")
    }
    return KnownSignatures(rows, keys)


def _mask_equal(left: pa.Array, right: pa.Array) -> npt.NDArray[np.bool_]:
    import pyarrow.compute as pc  # slow to import

    equal = pc.fill_null(pc.equal(left, right), False)
    both_null = pc.and_(left.is_null(), right.is_null())
    return np.asarray(pc.or_(equal, both_null).to_numpy(zero_copy_only=False), np.bool_)


def _read_whole(path: Path) -> pa.RecordBatch:
    empty = pa.RecordBatch.from_pylist([], read_schema(path)).select(
        [name for name in read_schema(path).names if name in _COLUMNS]
    )
    return concat_batches([*read_columns(path, _COLUMNS.__contains__), empty])


def _read_keys(path: Path) -> Columns:
    batches = list(read_batches(path))
    return {
        field.name: np.concatenate(
            [
                np.zeros(0, field.type.to_pandas_dtype()),
                *(batch.column(field.name).to_numpy() for batch in batches),
            ]
        )
        for field in read_schema(path)
    }
