"""Read and write our checkpoints tensor by tensor.

Writes a weights-only checkpoint: `parameter/NAME` in any dtype, `buffer/NAME`, step 0, no moments.
It is written through the planner of torch.distributed.checkpoint, which asks for each tensor when
it is due. One expert of a stacked tensor is a separate chunk.

Invariants:
- At most one file is held in memory.
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
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from llmsys.convert.conversion_plan import TensorPart
from llmsys.train.checkpoint_average import average_tensor
from llmsys.train.checkpoint_load import get_stored_weights_name
from llmsys.train.checkpoint_storage import CheckpointStorageReader, CheckpointWriter, read_tensors

# Largest file of a checkpoint that is written here.
FILE_BYTES = 1 << 30


class TensorToWrite(NamedTuple):
    """A tensor to write, with its dtype."""

    part: TensorPart
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.part.part_shape) * self.dtype.itemsize


def write_tensors(
    folder: Path,
    pieces: Sequence[TensorToWrite],
    value_of: Callable[[TensorPart], Tensor],
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write tensors into an existing folder, in their order, asking for each value once.

    A file holds up to `file_bytes`, or one larger tensor, and so does memory. Raises OSError when
    the disk is full or read-only.
    """
    writer = _Writer(
        folder, {_build_index(piece.part): piece.nbytes for piece in pieces}, file_bytes
    )
    try:
        with _ignore_distributed_warning():
            # the planner lists the tensors itself, so the state dict is empty
            dcp.save({}, storage_writer=writer, planner=_Planner(pieces, value_of), no_dist=True)
    except CheckpointException as error:  # a BaseException around what happened
        causes = [cause for cause, _ in error.failures.values()]
        raise (causes[0] if causes else RuntimeError(str(error))) from None


class _Writer(CheckpointWriter):
    """Writes a plan file by file, because the library keeps written tensors until their file is
    closed.
    """

    def __init__(self, folder: Path, sizes: dict[MetadataIndex, int], file_bytes: int) -> None:
        super().__init__(folder)
        self._sizes, self._file_bytes = sizes, file_bytes

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write each file's items as StorageWriter does."""
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
    """Plans from shapes and dtypes, and computes each tensor when it is written."""

    def __init__(
        self, pieces: Sequence[TensorToWrite], value_of: Callable[[TensorPart], Tensor]
    ) -> None:
        super().__init__(flatten_state_dict=False)
        self._pieces = {_build_index(piece.part): piece for piece in pieces}
        self._value_of = value_of

    def create_local_plan(self) -> SavePlan:
        """Return one item for each tensor."""
        self.plan = SavePlan([_build_write_item(piece) for piece in self._pieces.values()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the values, in separate storage."""
        part = self._pieces[_drop_hint(write_item.index)].part
        value = self._value_of(part).contiguous()
        # A chunk of a stack has the axis of the experts.
        return value if part.expert is None else value.unsqueeze(0)


def _build_index(part: TensorPart) -> MetadataIndex:
    # The offset of an expert's chunk in its stack: its number, and zeros.
    return MetadataIndex(
        part.name, torch.Size([part.expert or 0, *(0 for _ in part.shape[1:])][: len(part.shape)])
    )


def _drop_hint(index: MetadataIndex) -> MetadataIndex:
    return dataclasses.replace(index, index=None)


def _build_write_item(piece: TensorToWrite) -> WriteItem:
    """Describe a piece as torch.distributed.checkpoint wants it: a whole tensor, or one expert of a
    stacked tensor as a shard of it.
    """
    part, index = piece.part, _build_index(piece.part)
    sizes = part.shape if part.expert is None else (1, *part.part_shape)
    chunk = ChunkStorageMetadata(offsets=index.offset or torch.Size(), sizes=torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=piece.dtype), torch.Size(part.shape))
    return WriteItem(
        index,
        WriteItemType.TENSOR if part.expert is None else WriteItemType.SHARD,
        tensor_data=data,
    )


class CheckpointReader:
    """Reads tensors of our checkpoints by name. Keeps the last one, because experts of a stack
    are read in a row.
    """

    def __init__(self, checkpoint: Path) -> None:
        """Read the checkpoint's index.

        Args:
            checkpoint: Folder of the checkpoint.

        Raises:
            CheckpointError: The index is missing or damaged.
        """
        self._reader = CheckpointStorageReader(checkpoint)
        stored: dict[str, Any] = self._reader.read_metadata().state_dict_metadata
        self.shapes = {name: tuple(one.size) for name, one in stored.items()}
        self.dtypes: dict[str, torch.dtype] = {
            name: one.properties.dtype for name, one in stored.items()
        }
        self._last: tuple[str, Tensor] | None = None

    def read(self, part: TensorPart) -> Tensor:
        """Return one tensor. Weights are the running mean if the checkpoint has one.

        Args:
            part: name of the tensor, or of one expert of a stack.

        Returns:
            The tensor, on the CPU in the saved dtype. Only the last one read is kept in memory.
        """
        if self._last is None or self._last[0] != part.name:
            # freed before the next one is read, or both would be in memory
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
    """Reads the mean of several checkpoints tensor by tensor, without writing it."""

    def __init__(self, checkpoints: list[Path]) -> None:
        """Read the index of the last checkpoint. Averaged checkpoints have no running mean."""
        super().__init__(checkpoints[-1])
        self._checkpoints = checkpoints
        self.shapes = {
            name: shape for name, shape in self.shapes.items() if not name.startswith("average/")
        }

    def _load(self, name: str) -> Tensor:
        like = torch.empty(self.shapes[name], dtype=self.dtypes[name], device="meta")
        return average_tensor(name, like, self._checkpoints)


@contextmanager
def _ignore_distributed_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        # that is the intent
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
