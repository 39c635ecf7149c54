"""`__RANK_0.index`: the locations of the tensors that one rank wrote, as an Arrow file.

A save by several ranks has one index per rank, next to the rank's tensors, and no file that lists
all tensors. A reader maps every index and keeps the chunks that overlap what it loads. A save by
one process has `metadata.json` instead, see `checkpoint_metadata.py`.

Invariants:
- Only tensors are written and read.
- Chunks lie within their tensor and fill it; their bytes lie within the file of the same rank.
- Memory and time of Python objects grow with the chunks that are kept, not with those of all ranks.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from llmsys.errors import CheckpointError
from llmsys.storage.arrow_file import ARROW_ERRORS, ArrowFileWriter
from llmsys.storage.stored_formats import CHECKPOINT_INDEX
from llmsys.train.checkpoint_metadata import DTYPES

SUFFIX = ".index"
_COUNTS = pa.list_(pa.field("item", pa.int64(), nullable=False))
SCHEMA = pa.schema(
    [
        ("name", pa.dictionary(pa.int32(), pa.string())),
        ("dtype", pa.dictionary(pa.int32(), pa.string())),
        ("shape", _COUNTS),
        ("offset", _COUNTS),
        ("size", _COUNTS),
        ("begin", pa.int64()),
        ("bytes", pa.int64()),
    ],
    CHECKPOINT_INDEX.arrow_metadata,
)
# Offsets and sizes of the parts of a tensor that are loaded.
Boxes = Sequence[tuple[Sequence[int], Sequence[int]]]
Counts = np.ndarray[Any, np.dtype[np.int64]]


def write_index(path: Path, metadata: Metadata, results: Iterable[WriteResult]) -> None:
    """Write the index of one rank.

    Args:
        path: The file to write.
        metadata: The tensors and chunks of this rank.
        results: Location of each chunk.

    Raises:
        TypeError: an entry is no tensor. Such values belong into `state.json`.
    """
    places = {(one.index.fqn, one.index.offset): one.storage_data for one in results}
    rows: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError(
                f"{name} is not a tensor. A checkpoint stores tensors only; put other values into "
                "its record."
            )
        for chunk in entry.chunks:
            place = places[name, chunk.offsets]
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            values = name, dtype, entry.size, chunk.offsets, chunk.sizes, place.offset, place.length
            for column, value in zip(rows.values(), values, strict=True):
                column.append(list(value) if isinstance(value, torch.Size) else value)
    columns = [
        pa.array(rows[field.name], pa.string()).dictionary_encode()
        if pa.types.is_dictionary(field.type)
        else pa.array(rows[field.name], field.type)
        for field in SCHEMA
    ]
    with ArrowFileWriter(path, SCHEMA) as writer:
        writer.write(pa.record_batch(columns, schema=SCHEMA))


def read_indices(checkpoint: Path, wanted: Mapping[str, Boxes] | None = None) -> Metadata:
    """Return torch's metadata from the indices of all ranks, with every number and name checked.

    Args:
        checkpoint: Folder of the checkpoint.
        wanted: Parts to load by name. Chunks that do not overlap them along the first axis are left
            out, and those of other tensors are. None: all chunks.

    Returns:
        Shapes and types of all tensors, and the chunks.

    Raises:
        CheckpointError: an index is damaged or points outside of what it describes, or chunks are
            missing.
    """
    tensors = _TensorTable(wanted)
    for path in sorted(checkpoint.glob(f"__*{SUFFIX}")):
        data = path.with_suffix(".distcp")
        try:
            with pa.memory_map(str(path)) as file:
                table = pa.ipc.open_file(file).read_all()
                if not table.schema.equals(SCHEMA, check_metadata=True):
                    raise ValueError("it has other columns or another format version")
                tensors.add_chunks(
                    table.combine_chunks(), data.name, data.stat().st_size if data.is_file() else 0
                )
        except (*ARROW_ERRORS, ValueError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}). Use another checkpoint."
            ) from None
    try:
        return tensors.build_metadata()
    except ValueError as error:
        raise CheckpointError(
            f"{checkpoint} cannot be read ({error}). Use another checkpoint."
        ) from None


class _TensorTable:
    """Tensors by number, and the wanted chunks. The chunks of a rank are checked as arrays."""

    def __init__(self, wanted: Mapping[str, Boxes] | None) -> None:
        self._wanted = wanted
        self._numbers: dict[str, int] = {}
        self._entries: list[TensorStorageMetadata] = []
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._filled = np.zeros(0, np.int64)
        # Names, types and shapes of the index before, and the numbers of its names.
        self._latest: tuple[list[Any], Counts, Counts] = (
            [],
            np.zeros(0, np.int64),
            np.zeros(0, np.int64),
        )

    def add_chunks(self, table: pa.Table, file: str, file_bytes: int) -> None:
        """Check the chunks of one rank and keep the wanted ones."""
        if not table.num_rows:
            return
        names, dtypes = (table.column(name).chunk(0) for name in ("name", "dtype"))
        starts, (shapes, offsets, sizes) = _flatten_lists(table, ("shape", "offset", "size"))
        numbers = self._number_tensors(names, dtypes, starts, shapes)
        kinds = dtypes.dictionary.to_pylist()
        # 0 where the type is unknown, which `_add_tensor` rejects by name.
        itemsizes = np.array([DTYPES[kind].itemsize if kind in DTYPES else 0 for kind in kinds])
        # Without a sum of offset and size, which could overflow.
        if (
            min(offsets.min(initial=0), sizes.min(initial=0)) < 0
            or (sizes > shapes - offsets).any()
        ):
            raise ValueError("a chunk is not within its tensor")
        counts = _compute_row_products(starts, sizes)
        begin, length = table.column("begin").to_numpy(), table.column("bytes").to_numpy()
        needed = counts * itemsizes[dtypes.indices.to_numpy()]
        # Likewise without a sum.
        if begin.min() < 0 or (length < needed).any() or (length > file_bytes - begin).any():
            raise ValueError(f"{file} has no such bytes")
        np.add.at(self._filled, numbers, counts)
        for row in self._find_wanted_rows(numbers, starts, offsets, sizes).tolist():
            low, high = starts[row], starts[row + 1]
            entry = self._entries[numbers[row]]
            chunk = ChunkStorageMetadata(
                torch.Size(offsets[low:high].tolist()), torch.Size(sizes[low:high].tolist())
            )
            index = MetadataIndex(names[row].as_py(), chunk.offsets)
            entry.chunks.append(chunk)
            self._places[index] = _StorageInfo(file, int(begin[row]), int(length[row]))

    def _number_tensors(self, names: Any, dtypes: Any, starts: Counts, shapes: Counts) -> Counts:
        """Return the number of the tensor of each chunk. A tensor has one shape and one type in
        all indices.
        """
        codes, first, inverse = np.unique(
            names.indices.to_numpy(), return_index=True, return_inverse=True
        )
        # From the values of this row to those of the first chunk of its tensor.
        shift = np.repeat(starts[:-1] - starts[first[inverse]], np.diff(starts))
        kinds = dtypes.indices.to_numpy()
        lengths = np.diff(starts)
        if (
            (lengths != lengths[first[inverse]]).any()
            or (shapes != shapes[np.arange(len(shapes)) - shift]).any()
            or (kinds != kinds[first[inverse]]).any()
        ):
            raise ValueError("the chunks of a tensor differ in its shape or type")
        firsts = [
            names.dictionary,
            dtypes.dictionary,
            names.indices.take(pa.array(first)),
            dtypes.indices.take(pa.array(first)),
        ]
        layout = np.concatenate(
            [shapes[starts[row] : starts[row + 1]] for row in first] or [shapes]
        )
        known, known_layout, numbers = self._latest
        # Most ranks have the same tensors: then nothing is done for each.
        if not (
            known
            and all(map(pa.Array.equals, firsts, known))
            and np.array_equal(layout, known_layout)
        ):
            numbers = np.zeros(int(codes[-1]) + 1, np.int64)
            for code, row in zip(codes.tolist(), first.tolist(), strict=True):
                shape = torch.Size(shapes[starts[row] : starts[row + 1]].tolist())
                numbers[code] = self._add_tensor(
                    names.dictionary[code].as_py(), dtypes[row].as_py(), shape
                )
            self._filled = np.concatenate(
                [self._filled, np.zeros(len(self._entries) - len(self._filled), np.int64)]
            )
            self._latest = firsts, layout, numbers
        found: Counts = numbers[names.indices.to_numpy()]
        return found

    def _add_tensor(self, name: str, dtype: str, shape: torch.Size) -> int:
        """Return the number of a tensor, which is new or as it was in the index before."""
        if dtype not in DTYPES:
            raise ValueError(f"{dtype!r} is not a torch dtype")
        if name not in self._numbers:
            self._numbers[name] = len(self._entries)
            self._entries.append(
                TensorStorageMetadata(TensorProperties(dtype=DTYPES[dtype]), shape, [])
            )
        entry = self._entries[self._numbers[name]]
        if (entry.size, entry.properties.dtype) != (shape, DTYPES[dtype]):
            raise ValueError(f"{name} has another shape or type in another index")
        return self._numbers[name]

    def _find_wanted_rows(
        self, numbers: Counts, starts: Counts, offsets: Counts, sizes: Counts
    ) -> Counts:
        if self._wanted is None:
            return np.arange(len(numbers))
        low, high = np.zeros(len(self._numbers), np.int64), np.zeros(len(self._numbers), np.int64)
        for name, boxes in self._wanted.items():
            if name in self._numbers and boxes:
                # A scalar has no axis and counts as one row.
                firsts = [
                    (offset[0], offset[0] + size[0]) if len(offset) else (0, 1)
                    for offset, size in boxes
                ]
                low[self._numbers[name]] = min(first for first, _ in firsts)
                high[self._numbers[name]] = max(last for _, last in firsts)
        has_axis = np.diff(starts) > 0
        # One value more: a scalar in the last row has none of its own.
        first = np.where(has_axis, np.append(offsets, 0)[starts[:-1]], 0)
        last = first + np.where(has_axis, np.append(sizes, 0)[starts[:-1]], 1)
        # By the first axis alone: cheap, and it loses nothing.
        return np.flatnonzero((first < high[numbers]) & (last > low[numbers]))

    def build_metadata(self) -> Metadata:
        """Return the metadata if the chunks fill every tensor."""
        entries = {name: self._entries[number] for name, number in self._numbers.items()}
        for (name, entry), filled in zip(entries.items(), self._filled.tolist(), strict=True):
            if filled != entry.size.numel():
                raise ValueError(f"{name}: its chunks do not fill {list(entry.size)}")
        mappings = {name: (name,) for name in entries}
        return Metadata(dict(entries), mappings, self._places, StorageMeta(), CURRENT_DCP_VERSION)


def _flatten_lists(table: pa.Table, names: Sequence[str]) -> tuple[Counts, list[Counts]]:
    """Return where the list of each row begins, and the values of columns whose lists have equal
    lengths.
    """
    columns = [table.column(name).chunk(0) for name in names]
    starts = [column.offsets.to_numpy() - column.offsets[0].as_py() for column in columns]
    if any(column.null_count for column in columns) or not all(
        np.array_equal(each, starts[0]) for each in starts
    ):
        raise ValueError("the axes of a chunk differ from those of its tensor")
    return starts[0].astype(np.int64), [column.flatten().to_numpy() for column in columns]


def _compute_row_products(starts: Counts, values: Counts) -> Counts:
    """Return the product of the values of each row."""
    result = np.ones(len(starts) - 1, np.int64)
    lengths = np.diff(starts)
    for axis in range(int(lengths.max(initial=0))):
        rows = np.flatnonzero(lengths > axis)
        # In float64, because the integers may already overflow.
        if (result[rows].astype(np.float64) * values[starts[rows] + axis] > 1 << 60).any():
            raise ValueError("a chunk is larger than any file")
        result[rows] *= values[starts[rows] + axis]
    return result
