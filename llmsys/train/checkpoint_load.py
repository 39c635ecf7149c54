"""Load checkpoints: find the newest complete one, and fill an engine or plain tensors from it.

Reads folders `step-00000100` in torch.distributed.checkpoint's format, which `checkpoint_write.py`
publishes.

Invariants:
- Checksums are verified before a checkpoint is used; each rank verifies its share of the files.
- A damaged checkpoint is skipped with a warning. One that cannot be read now, or has another format
  version, raises: it may be complete, and to skip it would lose work.
- Nothing depends on the engine or the layout that saved.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from llmsys.engine.engine import Engine
from llmsys.engine.grad_scaler import LOSS_SCALE
from llmsys.errors import CheckpointError, UnreadableCheckpointError
from llmsys.log import get_logger
from llmsys.parallel.process_group import (
    all_gather_object,
    get_rank,
    get_world_size,
    run_on_rank_zero,
)
from llmsys.train.checkpoint_record import find_checkpoint_error, list_checkpoints, read_record
from llmsys.train.checkpoint_storage import (
    CheckpointStorageReader,
    convert_read_errors,
    read_tensors,
)

# Times a reader takes another checkpoint because the run removed the one it was reading.
MAX_READ_ATTEMPTS = 5

READ_FAILURES = (CheckpointException, CheckpointError, OSError)

Result = TypeVar("Result")

log = get_logger(__name__)


def list_complete_checkpoints(folder: Path) -> list[Path]:
    """List published checkpoints.

    Args:
        folder: `checkpoints/` of a run.

    Returns:
        Folders in order of their steps. Their files are not verified.
    """
    return list(list_checkpoints(folder).values())


@dataclass
class VerifiedFolder:
    """The newest complete checkpoint of a folder, if there is one, and the problems of newer
    ones.
    """

    newest: Path | None = None
    problems: dict[Path, str] = field(default_factory=dict)


def find_newest_checkpoint(folder: Path) -> Path | None:
    """Find the newest checkpoint that passes verification. Collective.

    Args:
        folder: `checkpoints/` of a run.

    Returns:
        The checkpoint's folder, or None.

    Raises:
        UnreadableCheckpointError: a checkpoint cannot be read now. An older one is not taken in its
            place.
    """
    return verify_folder(folder).newest


def verify_folder(folder: Path) -> VerifiedFolder:
    """Find the newest complete checkpoint: verify from the newest down to the first that is
    complete. Collective.

    Args:
        folder: The folder `checkpoints` of a run.

    Returns:
        The checkpoint, if there is one, and the problem of each newer one. The same on every
        rank.

    Raises:
        CheckpointError: The newest has pickled metadata: to skip it would lose work.
        UnreadableCheckpointError: The system cannot read a file now, which is no damage.
    """
    seen: list[str] | None = None
    # A run that still trains may replace all of them during the search.
    while (names := _list_checkpoints_on_rank_zero(folder)) != seen:
        found = VerifiedFolder()
        for checkpoint in map(Path, reversed(names)):
            problem = find_error_in_shares(checkpoint)
            if problem is None:
                found.newest = checkpoint
                return found
            found.problems[checkpoint] = problem
            # A checkpoint that the run removed meanwhile is no damage.
            if get_rank() == 0 and not _is_gone(checkpoint):
                log.warning("skipping checkpoint %s: %s", checkpoint, problem)
        seen = names
    return found


def find_error_in_shares(checkpoint: Path) -> str | None:
    """Find the problem of a checkpoint, each rank in its share of the files. Collective.

    Args:
        checkpoint: folder of the checkpoint.

    Returns:
        The same message on every rank; None for a complete checkpoint.

    Raises:
        UnreadableCheckpointError: on the first rank that cannot read it; the others exit with
            status 2.
    """
    failure: UnreadableCheckpointError | None = None
    problem: str | None = None
    try:
        problem = find_checkpoint_error(checkpoint, get_rank(), get_world_size())
    except UnreadableCheckpointError as error:
        problem, failure = (
            ("it was removed while it was read", None) if _is_gone(checkpoint) else (None, error)
        )
    verdicts = all_gather_object((problem, failure is not None))
    unreadable = [number for number, (_, failed) in enumerate(verdicts) if failed]
    if unreadable and failure is not None and get_rank() == unreadable[0]:
        raise failure
    if unreadable:
        raise SystemExit(2)  # the other rank raises: one message is enough
    return next((problem for problem, _ in verdicts if problem), None)


def _is_gone(checkpoint: Path) -> bool:
    """Return whether the run removed a checkpoint. Network disks report that as read errors."""
    try:
        return checkpoint not in list_checkpoints(checkpoint.parent).values()
    except UnreadableCheckpointError:
        return False


def _list_checkpoints_on_rank_zero(folder: Path) -> list[str]:
    """List published checkpoints as rank 0 sees them, oldest first. Collective."""
    return run_on_rank_zero(
        lambda: "\n".join(str(path) for path in list_complete_checkpoints(folder))
    ).splitlines()


def read_newest_checkpoint(
    find: Callable[[], Path | None], read: Callable[[Path], Result]
) -> Result | None:
    """Return `read(find())`, searched again when the run removes the checkpoint during the read.
    For one process.

    Args:
        find: returns the checkpoint to read, or None.
        read: reads it.

    Returns:
        The result of `read`; None if `find` returns None.

    Raises:
        CheckpointError: it was removed `MAX_READ_ATTEMPTS` times.
    """
    for _ in range(MAX_READ_ATTEMPTS):
        found = find()
        if found is None:
            return None
        try:
            return read(found)
        except READ_FAILURES:
            if found.exists():
                raise
            log.info("%s was removed by its run while it was read; using the newest one now", found)
    raise CheckpointError(
        f"{MAX_READ_ATTEMPTS} checkpoints were removed by their run while they were read. "
        f"Raise checkpoint.keep_last or checkpoint.every_steps of that run, or wait for its end."
    )


def read_resumable_record(checkpoint: Path) -> dict[str, Any]:
    """Return the record of a checkpoint that a run can resume from.

    Raises:
        CheckpointError: it holds weights alone.
    """
    record = read_record(checkpoint)
    if record.get("weights_only"):
        raise CheckpointError(
            f"{checkpoint} has weights only, without optimizer moments, and cannot be resumed. "
            "Start a new run from it: set run.folder to a new folder and "
            f"train.init_from={checkpoint}."
        )
    return record


def load_checkpoint(engine: Engine, checkpoint: Path) -> dict[str, Any]:
    """Fill an engine from a checkpoint of any engine and layout. Collective.

    Args:
        engine: The engine; its state gives the shards that each rank reads.
        checkpoint: A complete checkpoint.

    Returns:
        The `run_state` that was saved with it.

    Raises:
        CheckpointError: It holds weights alone, or other tensors than the model.
    """
    record = read_resumable_record(checkpoint)
    state = engine.get_state()
    reader = CheckpointStorageReader(checkpoint)
    with convert_read_errors(checkpoint):
        stored = reader.read_layout()
    elsewhere = engine.module.shapes_elsewhere
    _check_names(
        checkpoint, _drop_optional_tensors(state.tensors), _drop_optional_tensors(stored), elsewhere
    )
    # An optional tensor that is missing keeps its initial value.
    state.tensors = {name: tensor for name, tensor in state.tensors.items() if name in stored}
    read_tensors(state.tensors, reader)
    # Skipped steps advance the data but not the optimizer.
    state.steps = record["updates"]
    engine.load_state(state)
    run_state: dict[str, Any] = record["run"]
    return run_state


def read_tensor_metadata(checkpoint: Path) -> dict[str, Tensor]:
    """List the tensors of a checkpoint without reading their values.

    Args:
        checkpoint: The checkpoint.

    Returns:
        Tensors by name on the meta device: shapes and dtypes without storage.
    """
    stored = CheckpointStorageReader(checkpoint).read_layout()
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def get_stored_weights_name(parameter: str, stored: Collection[str]) -> str:
    """Return the name of the tensor that holds a parameter's weights for inference.

    Args:
        parameter: name in the model.
        stored: names in the checkpoint.

    Returns:
        `average/NAME` where the checkpoint holds an exponential moving average, else
        `parameter/NAME`.
    """
    mean = f"average/{parameter}"
    return mean if mean in stored else f"parameter/{parameter}"


def load_tensors(tensors: dict[str, Tensor], checkpoint: Path) -> None:
    """Fill plain tensors from a checkpoint. For one process.

    Args:
        tensors: Tensors to fill, named as in `EngineState`. The checkpoint may hold more.
        checkpoint: The checkpoint.

    Raises:
        CheckpointError: It lacks one of them, or has it in another shape.
    """
    reader = CheckpointStorageReader(checkpoint)
    stored = reader.read_layout()
    _check_names(
        checkpoint, tensors, {name: stored[name] for name in stored.keys() & tensors.keys()}
    )
    read_tensors(tensors, reader, alone=True)


def read_run_state(checkpoint: Path) -> dict[str, Any]:
    """Return the `run_state` that was saved with a checkpoint.

    Args:
        checkpoint: a complete checkpoint.

    Returns:
        The settings and fingerprints that a resumed run must share.

    Raises:
        CheckpointError: the record is missing or damaged.
    """
    run_state: dict[str, Any] = read_record(checkpoint)["run"]
    return run_state


def _drop_optional_tensors(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors without the loss scale, which starts anew where it is missing."""
    return {name: tensor for name, tensor in tensors.items() if name != LOSS_SCALE}


def _check_names(
    checkpoint: Path,
    wanted: dict[str, Any],
    stored: dict[str, Any],
    elsewhere: Mapping[str, torch.Size] | None = None,
) -> None:
    """Reject a checkpoint of another model before a tensor is read; the message names the first
    difference.
    """
    elsewhere = elsewhere or {}  # of other ranks of a pipeline, so that every rank finds the same
    needed = {name: tuple(tensor.shape) for name, tensor in wanted.items()} | dict(elsewhere)
    missing = sorted(needed.keys() - stored.keys())
    extra = [
        name
        for name in stored.keys() - needed.keys()
        if f"parameter/{name.partition('/')[2]}" not in elsewhere
    ]
    shapes = [
        f"{name} has shape {tuple(stored[name].size)}, the model needs {shape}"
        for name, shape in needed.items()
        if name in stored and tuple(stored[name].size) != tuple(shape)
    ]
    for found in (
        [f"{name} is missing" for name in missing],
        [f"{name} is not in the model" for name in sorted(extra)],
        sorted(shapes),
    ):
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise CheckpointError(
                f"{checkpoint} belongs to another model: {found[0]}{more}. Use the model section "
                "of its run, or another run.folder."
            )
