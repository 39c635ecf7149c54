"""Our checkpoints tensor by tensor: written while the values are still being made, read one at a time.

A weights-only checkpoint is a checkpoint without moments: `parameter/NAME` in any dtype, `buffer/NAME`, step 0. It is
written through torch.distributed.checkpoint's planner, which asks for each tensor when its turn comes, so no more than
one file is in memory; one expert of a stacked tensor is a chunk of its own.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, SavePlan
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from llmsys.convert.conversion_plan import TensorPart
from llmsys.train.checkpoint_average import average_tensor
from llmsys.train.checkpoint_load import get_stored_weights_name
from llmsys.train.checkpoint_storage import CheckpointStorageReader, CheckpointWriter, read_tensors

FILE_BYTES = 1 << 30
"""Largest file of a checkpoint that is written here."""


class TensorToWrite(NamedTuple):
    """What to write, and in which dtype."""

    part: TensorPart
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return prod(self.part.part_shape) * self.dtype.itemsize


def write_tensors(
    folder: Path,
    pieces: Sequence[TensorToWrite],
    value_of: Callable[[TensorPart], Tensor],
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the pieces into an existing folder in their order, asking for each value once.

    A file holds up to `file_bytes`, or one larger piece, and so does memory. Raises OSError when the disk is full or
    read-only.
    """
    writer = _Writer(folder, {_build_index(piece.part): piece.nbytes for piece in pieces}, file_bytes)
    try:
        with _ignore_distributed_warning():
            dcp.save({}, storage_writer=writer, planner=_Planner(pieces, value_of), no_dist=True)
    except CheckpointException as error:  # a BaseException around what happened
        causes = [cause for cause, _ in error.failures.values()]
        raise (causes[0] if causes else RuntimeError(str(error))) from None


class _Writer(CheckpointWriter):
    """Writes a plan file by file: the library keeps what it has written until the file is closed."""

    def __init__(self, folder: Path, sizes: dict[MetadataIndex, int], file_bytes: int) -> None:
        super().__init__(folder)
        self._sizes, self._file_bytes = sizes, file_bytes

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """See StorageWriter."""
        results: list[WriteResult] = []
        for number, items in enumerate(self._split_items_by_file(plan.items)):
            names = dataclasses.replace(plan.storage_data, prefix=f"__{number}_")
            one = dataclasses.replace(plan, items=items, storage_data=names)
            results += super().write_data(one, planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _split_items_by_file(self, items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
        file: list[WriteItem] = []
        room = self._file_bytes
        for item in items:
            size = self._sizes[_drop_hint(item.index)]
            if file and size > room:
                yield file
                file, room = [], self._file_bytes
            file.append(item)
            room -= size
        yield file


class _Planner(DefaultSavePlanner):
    """Plans from shapes and dtypes, and makes each tensor when it is written."""

    def __init__(self, pieces: Sequence[TensorToWrite], value_of: Callable[[TensorPart], Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._pieces = {_build_index(piece.part): piece for piece in pieces}
        self._value_of = value_of

    def create_local_plan(self) -> SavePlan:
        """One item for each piece."""
        self.plan = SavePlan([_build_write_item(piece) for piece in self._pieces.values()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The values, in storage of their own."""
        part = self._pieces[_drop_hint(write_item.index)].part
        value = self._value_of(part).contiguous()
        return value if part.expert is None else value.unsqueeze(0)


def _build_index(part: TensorPart) -> MetadataIndex:
    return MetadataIndex(part.name, torch.Size([part.expert or 0, *(0 for _ in part.shape[1:])][: len(part.shape)]))


def _drop_hint(index: MetadataIndex) -> MetadataIndex:
    return dataclasses.replace(index, index=None)


def _build_write_item(piece: TensorToWrite) -> WriteItem:
    part, index = piece.part, _build_index(piece.part)
    sizes = part.shape if part.expert is None else (1, *part.part_shape)
    chunk = ChunkStorageMetadata(offsets=index.offset or torch.Size(), sizes=torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=piece.dtype), torch.Size(part.shape))
    return WriteItem(index, WriteItemType.TENSOR if part.expert is None else WriteItemType.SHARD, tensor_data=data)


class CheckpointReader:
    """Reads the tensors of one of our checkpoints by name; keeps the last one, since experts come in a row."""

    def __init__(self, checkpoint: Path) -> None:
        """Read what the checkpoint holds."""
        self._reader = CheckpointStorageReader(checkpoint)
        stored: dict[str, Any] = self._reader.read_metadata().state_dict_metadata
        self.shapes = {name: tuple(one.size) for name, one in stored.items()}
        self.dtypes: dict[str, torch.dtype] = {name: one.properties.dtype for name, one in stored.items()}
        self._last: tuple[str, Tensor] | None = None

    def read(self, part: TensorPart) -> Tensor:
        """The values of one part, on the CPU, in the dtype they were saved in; of weights the mean, if one is kept."""
        if self._last is None or self._last[0] != part.name:
            self._last = None
            name = part.name
            if name.startswith("parameter/"):
                name = get_stored_weights_name(name.removeprefix("parameter/"), self.shapes)
            self._last = (part.name, self._load(name))
        return self._last[1] if part.expert is None else self._last[1][part.expert]

    def _load(self, name: str) -> Tensor:
        tensor = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        read_tensors({name: tensor}, self._reader, alone=True)
        return tensor


class AverageReader(CheckpointReader):
    """Reads the mean of several checkpoints tensor by tensor, and writes none of it."""

    def __init__(self, checkpoints: list[Path]) -> None:
        """Read what the last of the checkpoints holds; a mean has no running mean beside it."""
        super().__init__(checkpoints[-1])
        self._checkpoints = checkpoints
        self.shapes = {name: shape for name, shape in self.shapes.items() if not name.startswith("average/")}

    def _load(self, name: str) -> Tensor:
        like = torch.empty(self.shapes[name], dtype=self.dtypes[name], device="meta")
        return average_tensor(name, like, self._checkpoints)


@contextmanager
def _ignore_distributed_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is the intent
        yield
