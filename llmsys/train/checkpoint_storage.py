"""Storage of torch.distributed.checkpoint with JSON metadata: reading a checkpoint runs no code
from it.

Writes `metadata.json` instead of torch's pickled `.metadata` and reads it back into torch's
classes. Tensors stay in torch's files, which are read with `weights_only=True`.

Invariants:
- A pickled `.metadata` is never opened here, not even that of a single rank (`__0.metadata`).
- Entries other than tensors, which torch would unpickle, are neither written nor read.
"""

import os
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from llmsys.errors import CheckpointError
from llmsys.parallel.process_group import all_gather_object
from llmsys.storage.local_files import write_bytes_atomically
from llmsys.train.checkpoint_index import SUFFIX, Boxes, read_indices, write_index
from llmsys.train.checkpoint_metadata import METADATA, format_metadata, parse_metadata
from llmsys.train.checkpoint_record import DAMAGE_ERRORS, build_unreadable_error


class CheckpointWriter(FileSystemWriter):
    """A writer of tensors in torch's format, one synced file per rank, with the metadata as
    JSON.
    """

    def __init__(self, folder: Path) -> None:
        """Write into `folder`, which is created if it is missing."""
        super().__init__(folder, single_file_per_rank=True, sync_files=True)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `metadata.json` durably from the results of all ranks. Called on rank 0 alone."""
        metadata.storage_data = {
            one.index: one.storage_data for written in results for one in written
        }
        write_bytes_atomically(Path(self.path) / METADATA, format_metadata(metadata))

    def _get_metadata_path(self, rank: int | None = None) -> os.PathLike[str]:
        return Path(self.path) / METADATA


class RankWriter(CheckpointWriter):
    """A writer of the tensors of one rank and of their index, without the other ranks."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Write `__RANK_0.distcp` and `__RANK_0.index` into `folder`, which exists."""
        super().__init__(folder)
        self._own_rank = rank

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Name the files after the rank."""
        super().set_up_storage_writer(is_coordinator, rank=self._own_rank, use_collectives=False)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index of this rank."""
        path = Path(self.path) / f"__{self._own_rank}_0{SUFFIX}"
        write_index(path, metadata, [one for written in results for one in written])


class CheckpointStorageReader(FileSystemReader):
    """A reader of checkpoints by `CheckpointWriter` or `RankWriter`; it reads the metadata once."""

    def __init__(self, checkpoint: Path) -> None:
        """Read from `checkpoint`; errors are raised when the metadata are read."""
        super().__init__(checkpoint)
        self._metadata: Metadata | None = None
        self._is_selected = False

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the whole checkpoint, also where torch asks for those of one rank.

        Raises:
            CheckpointError: they are missing or damaged.
        """
        if self._metadata is None:
            self._metadata = _read_metadata(Path(self.path))
        return self._metadata

    def read_layout(self) -> dict[str, STORAGE_TYPES]:
        """Return shapes and types of all tensors, without the chunks of many ranks. Raises as
        `read_metadata`.
        """
        checkpoint = Path(self.path)
        # No chunk is wanted, only shapes and types.
        found = self._metadata or _read_metadata(checkpoint, {})
        return found.state_dict_metadata

    def select_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Read the metadata of what this rank holds of some tensors. Raises as `read_metadata`."""
        if self._metadata is None or self._is_selected:
            self._metadata = _read_metadata(
                Path(self.path), {name: _list_boxes(one) for name, one in tensors.items()}
            )
            self._is_selected = True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the metadata if another checkpoint is named."""
        if checkpoint_id:
            self._metadata = None
        super().reset(checkpoint_id)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read tensors into those of the planner.

        Raises:
            CheckpointError: the plan names something else than a tensor, which torch would
                unpickle.
        """
        for item in plan.items:
            if item.type != LoadItemType.TENSOR:
                raise CheckpointError(
                    f"{self.path}: {item.storage_index.fqn} is not a tensor. Use another "
                    "checkpoint."
                )
        done: Future[None] = super().read_data(plan, planner)
        return done


def _list_boxes(tensor: Tensor) -> Boxes:
    """Return offset and size of what this rank holds of a tensor."""
    if not isinstance(tensor, DTensor):
        return [([0] * tensor.ndim, list(tensor.shape))]
    if tensor.device_mesh.get_coordinate() is None:
        return []
    chunks = tensor.__create_chunk_list__()
    return [(list(chunk.offsets), list(chunk.sizes)) for chunk in chunks]


def _read_metadata(checkpoint: Path, wanted: dict[str, Boxes] | None = None) -> Metadata:
    file = checkpoint / METADATA
    if not file.is_file():
        if any(checkpoint.glob(f"__*{SUFFIX}")):
            return read_indices(checkpoint, wanted)
        raise CheckpointError(f"{file} is missing. Use another checkpoint.")
    return parse_metadata(file.read_bytes(), checkpoint)


@contextmanager
def convert_read_errors(checkpoint: Path) -> Iterator[None]:
    """Raise UnreadableCheckpointError for what the system cannot read now; leave the rest, and
    Ctrl-C, as it is.
    """
    try:
        yield
    except (CheckpointException, OSError) as error:
        # torch wraps the errors of all ranks into one CheckpointException.
        causes = (
            [cause for cause, _ in error.failures.values()]
            if isinstance(error, CheckpointException)
            else [error]
        )
        for cause in causes:
            if isinstance(cause, KeyboardInterrupt):
                raise cause from None
            if isinstance(cause, OSError) and cause.errno not in DAMAGE_ERRORS:
                raise build_unreadable_error(Path(cause.filename or checkpoint), cause) from error
        raise


def read_tensors(
    tensors: dict[str, Tensor], reader: CheckpointStorageReader, alone: bool = False
) -> None:
    """Fill tensors by name from a checkpoint. Collective, unless `alone`.

    Args:
        tensors: tensors or DTensors to fill in place.
        reader: reader of the checkpoint.
        alone: read in this process only, without a process group.

    Raises:
        CheckpointError: the files do not match the metadata.
        UnreadableCheckpointError: the system cannot read a file now.
    """
    failure: CheckpointError | None = None
    try:
        _read_own_tensors(tensors, reader)
    except CheckpointError as error:
        failure = error
    failures = [failure] if alone else all_gather_object(failure)
    for failed in failures:
        if failed is not None:
            raise failed


def _read_own_tensors(tensors: dict[str, Tensor], reader: CheckpointStorageReader) -> None:
    """Fill this rank's part of the tensors. Ranks plan for themselves: rank 0 would handle the
    plans of all.
    """
    with convert_read_errors(Path(reader.path)):
        reader.select_tensors(tensors)  # before dcp.load, which would wrap its error
    try:
        with warnings.catch_warnings(), convert_read_errors(Path(reader.path)):
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        reason = _describe(causes[0]) if causes else str(error)
        raise CheckpointError(
            f"{reader.path} cannot be read: {reason}. Use another checkpoint."
        ) from error


def _describe(cause: BaseException) -> str:
    # torch's text advises weights_only=False, which would run code from the file.
    if isinstance(cause, pickle.UnpicklingError):
        return "its files contain objects that are not tensors"
    return f"{type(cause).__name__}: {cause}"
