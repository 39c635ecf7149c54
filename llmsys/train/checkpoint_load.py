"""Reading checkpoints: which is whole, what it holds, and filling an engine or plain tensors from it.

The logical state in torch.distributed.checkpoint's format, in folders `step-00000100` that checkpoint_write.py
publishes. A reader verifies digests and takes the newest folder that passes, saying which it skipped and why; ranks
share the files out between them. Nothing here depends on the engine or layout that saved.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from llmsys.config.checkpoint import CheckpointConfig
from llmsys.engine.engine import Engine
from llmsys.engine.grad_scaler import LOSS_SCALE
from llmsys.errors import CheckpointError, UnreadableCheckpointError
from llmsys.log import get_logger
from llmsys.parallel.process_group import all_gather_object, get_rank, get_world_size, run_on_rank_zero
from llmsys.train.checkpoint_record import describe_pickle, find_checkpoint_error, list_checkpoints, read_record
from llmsys.train.checkpoint_saver import CheckpointSaver
from llmsys.train.checkpoint_storage import CheckpointStorageReader, convert_read_errors, read_tensors

MAX_READ_ATTEMPTS = 5
"""How often a reader takes another checkpoint because the one it was reading was removed."""

READ_FAILURES = (CheckpointException, CheckpointError, OSError)

Result = TypeVar("Result")

log = get_logger(__name__)


def save_checkpoint(engine: Engine, folder: Path, run_state: dict[str, Any], keep_last: int) -> Path:
    """Publish the engine's state and `run_state` as `folder/step-…` and keep the newest `keep_last`. Collective."""
    state = engine.get_state()
    saver = CheckpointSaver(folder, CheckpointConfig(keep_last=keep_last))
    saver.save_state(state, state.steps, run_state)
    saver.finish_saves()
    return folder / f"step-{state.steps:08d}"


def list_complete_checkpoints(folder: Path) -> list[Path]:
    """Published checkpoints, oldest first."""
    return list(list_checkpoints(folder).values())


@dataclass
class VerifiedFolder:
    """The newest whole checkpoint of a folder, if there is one, and what is wrong with those that are newer."""

    newest: Path | None = None
    problems: dict[Path, str] = field(default_factory=dict)


def find_newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that passes verification; each rank verifies its share of the files. Collective.

    UnreadableCheckpointError when one cannot be read now: an older one is not taken in its place.
    """
    return verify_folder(folder).newest


def verify_folder(folder: Path) -> VerifiedFolder:
    """Verify checkpoints from the newest down to the first whole one. Collective; the same on every rank."""
    seen: list[str] | None = None
    while (
        names := _list_checkpoints_on_rank_zero(folder)
    ) != seen:  # a run that trains on may have replaced them all meanwhile
        found = VerifiedFolder()
        for checkpoint in map(Path, reversed(names)):
            problem = _verify_in_shares(checkpoint)
            if problem is None:
                found.newest = checkpoint
                return found
            if problem == describe_pickle(checkpoint):  # whole, but of an older format: to skip it would lose work
                _reject_pickle(checkpoint)
            found.problems[checkpoint] = problem
            if get_rank() == 0 and not _is_gone(checkpoint):
                log.warning("skipping checkpoint %s: %s", checkpoint, problem)
        seen = names
    return found


def _verify_in_shares(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, on every rank. Collective; the first rank that cannot read it raises."""
    failure: UnreadableCheckpointError | None = None
    problem: str | None = None
    try:
        problem = find_checkpoint_error(checkpoint, get_rank(), get_world_size())
    except UnreadableCheckpointError as error:
        problem, failure = ("it was removed while it was read", None) if _is_gone(checkpoint) else (None, error)
    verdicts = all_gather_object((problem, failure is not None))
    unreadable = [number for number, (_, failed) in enumerate(verdicts) if failed]
    if unreadable and failure is not None and get_rank() == unreadable[0]:
        raise failure
    if unreadable:
        raise SystemExit(2)  # one failure reads as one message
    return next((one for one, _ in verdicts if one), None)


def _is_gone(checkpoint: Path) -> bool:
    """Return whether the run has removed a checkpoint, which network disks answer with errors of reading."""
    try:
        return checkpoint not in list_checkpoints(checkpoint.parent).values()
    except UnreadableCheckpointError:
        return False


def _reject_pickle(checkpoint: Path) -> None:
    """Raise CheckpointError on rank 0, once, and end the others. Collective."""

    def refuse() -> str:
        raise CheckpointError(f"{checkpoint} cannot be used: {describe_pickle(checkpoint)}.")

    run_on_rank_zero(refuse)


def _list_checkpoints_on_rank_zero(folder: Path) -> list[str]:
    """Published checkpoints as rank 0 sees them, oldest first. Collective."""
    return run_on_rank_zero(lambda: "\n".join(str(path) for path in list_complete_checkpoints(folder))).splitlines()


def read_newest_checkpoint(find: Callable[[], Path | None], read: Callable[[Path], Result]) -> Result | None:
    """What `read` gives for the checkpoint that `find` names; None when it names none. For one process.

    A run that is still training removes old checkpoints, perhaps the one that is being read: then the search is made
    again.
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
            log.info("%s was removed by its run while it was read; taking the newest there is now", found)
    raise CheckpointError(
        f"{MAX_READ_ATTEMPTS} checkpoints were removed by their run while they were read. "
        f"Raise checkpoint.keep_last or checkpoint.every_steps of that run, or wait for its end."
    )


def read_resumable_record(checkpoint: Path) -> dict[str, Any]:
    """The record of a checkpoint that a run can go on from. CheckpointError for weights alone."""
    record = read_record(checkpoint)
    if record.get("weights_only"):
        raise CheckpointError(
            f"{checkpoint} holds weights alone, without the optimizer's moments, and cannot be resumed. "
            f"Begin a run with it: set run.folder to a new folder and train.start_from={checkpoint}."
        )
    return record


def load_checkpoint(engine: Engine, checkpoint: Path) -> dict[str, Any]:
    """Fill the engine from a checkpoint of any engine and layout; gives the `run_state` saved with it. Collective."""
    record = read_resumable_record(checkpoint)
    state = engine.get_state()
    reader = CheckpointStorageReader(checkpoint)
    with convert_read_errors(checkpoint):
        stored = reader.read_metadata().state_dict_metadata
    _check_names(checkpoint, _drop_optional_tensors(state.tensors), _drop_optional_tensors(stored))
    state.tensors = {name: tensor for name, tensor in state.tensors.items() if name in stored}
    read_tensors(state.tensors, reader)
    state.steps = record.get("updates", record["steps"])
    engine.load_state(state)
    run_state: dict[str, Any] = record["run"]
    return run_state


def read_tensor_metadata(checkpoint: Path) -> dict[str, Tensor]:
    """What a checkpoint holds, by name, as tensors without storage: their shapes and types."""
    stored = CheckpointStorageReader(checkpoint).read_metadata().state_dict_metadata
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def get_stored_weights_name(parameter: str, stored: Collection[str]) -> str:
    """What a checkpoint calls the weights of a parameter that are to be used: their running mean, if it keeps one."""
    mean = f"average/{parameter}"
    return mean if mean in stored else f"parameter/{parameter}"


def load_tensors(tensors: dict[str, Tensor], checkpoint: Path) -> None:
    """Fill plain tensors, named as in LogicalState, from a checkpoint. For one process, without a group."""
    reader = CheckpointStorageReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata
    _check_names(checkpoint, tensors, {name: stored[name] for name in stored.keys() & tensors.keys()})
    read_tensors(tensors, reader, alone=True)


def load_named_tensors(engine: Engine, checkpoint: Path, names: Iterable[str]) -> None:
    """Fill the named tensors of an engine from a checkpoint of any engine and layout, and nothing else. Collective."""
    state = engine.get_state()
    wanted = {name: state.tensors[name] for name in sorted(names)}
    read_tensors(wanted, CheckpointStorageReader(checkpoint))
    state.tensors.update(wanted)
    engine.load_state(state)


def read_run_state(checkpoint: Path) -> dict[str, Any]:
    """The `run_state` that was saved with a checkpoint that has no problem."""
    run_state: dict[str, Any] = read_record(checkpoint)["run"]
    return run_state


def _drop_optional_tensors(tensors: dict[str, Any]) -> dict[str, Any]:
    """Without what only some engines and precisions have, and start from anew where a checkpoint lacks it."""
    return {name: tensor for name, tensor in tensors.items() if name != LOSS_SCALE}


def _check_names(checkpoint: Path, wanted: dict[str, Any], stored: dict[str, Any]) -> None:
    """Refuse a checkpoint of another model before anything is read, naming the first difference."""
    missing = sorted(wanted.keys() - stored.keys())
    extra = sorted(stored.keys() - wanted.keys())
    shapes = [
        f"{name} has shape {tuple(stored[name].size)}, the model needs {tuple(wanted[name].shape)}"
        for name in wanted.keys() & stored.keys()
        if tuple(stored[name].size) != tuple(wanted[name].shape)
    ]
    for found in (
        [f"{name} is missing" for name in missing],
        [f"{name} is not in the model" for name in extra],
        sorted(shapes),
    ):
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise CheckpointError(
                f"{checkpoint} belongs to another model: {found[0]}{more}. "
                f"Use the model section it was trained with, or another run.folder."
            )
