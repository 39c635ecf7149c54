"""Checkpoints: the logical state in torch.distributed.checkpoint's format, written aside and published by one rename.

A folder `step-00000100` under `checkpoints/` is whole by construction: every rank writes its shards into
`.step-00000100.partial`, rank 0 adds `state.json` with a digest of every file, flushes all to disk, and renames. A
reader verifies the digests and takes the newest folder that passes, saying which it skipped and why.
"""

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from llmsys.engine.engine import Engine
from llmsys.errors import CheckpointError, disk_problem
from llmsys.log import logger
from llmsys.manifest import publish_bytes, sync_folder
from llmsys.parallel.group import barrier, on_rank_zero, rank

FORMAT = 1
RECORD = "state.json"

log = logger(__name__)


def save(engine: Engine, folder: Path, run_state: dict[str, Any], keep_last: int) -> Path:
    """Publish the engine's state and `run_state` as `folder/step-…`; drop older ones beyond `keep_last`. Collective."""
    state = engine.state()
    target = folder / f"step-{state.steps:08d}"
    partial = folder / f".{target.name}.partial"
    if rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier()
    try:
        dcp.save(state.tensors, storage_writer=FileSystemWriter(partial, single_file_per_rank=True, sync_files=True))
    except CheckpointException as error:  # a BaseException, the same on every rank
        raise _not_saved(target, error) from error
    if rank() == 0:
        _publish(partial, target, {"format": FORMAT, "steps": state.steps, "run": run_state})
        for old in whole_names(folder)[:-keep_last]:
            shutil.rmtree(old)
    barrier()
    return target


def publish_weights(
    folder: Path, write: Callable[[Path], None], steps: int = 0, run_state: dict[str, Any] | None = None
) -> Path:
    """Publish a checkpoint of weights alone: `write` fills a folder aside. For one process, without a group.

    Evaluation and generation read it like any other; a run begins with it by `train.start_from`.
    """
    target = folder / f"step-{steps:08d}"
    partial = folder / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    _publish(partial, target, {"format": FORMAT, "steps": steps, "weights_only": True, "run": run_state or {}})
    return target


def _not_saved(target: Path, error: CheckpointException) -> BaseException:
    """A full or read-only disk as one message; any other failure as it is."""
    causes = [cause for cause, _ in error.failures.values()]
    for cause in causes:
        if isinstance(cause, OSError) and disk_problem(cause) is not None:
            return CheckpointError(
                f"{target} could not be saved: {cause.strerror}. The checkpoints before it are whole. Free space or "
                f"lower checkpoint.keep_last, then run the same command again: it continues from the newest of them."
            )
    return error


def _publish(partial: Path, target: Path, record: dict[str, Any]) -> None:
    record["files"] = {file.name: _digest(file) for file in sorted(partial.iterdir())}
    publish_bytes(partial / RECORD, json.dumps(record, indent=2).encode())
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    sync_folder(target.parent)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()


def whole_names(folder: Path) -> list[Path]:
    """Published checkpoints, oldest first."""
    return sorted(folder.glob("step-*"))


def problem_of(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be used, or None when every file is there and has the digest it was written with."""
    try:
        record = json.loads((checkpoint / RECORD).read_text())
        if record["format"] != FORMAT:
            return f"format {record['format']}, this version reads {FORMAT}"
        for name, digest in record["files"].items():
            if not (checkpoint / name).exists():
                return f"{name} is missing"
            if _digest(checkpoint / name) != digest:
                return f"{name} is damaged (its digest differs from the recorded one)"
    except (OSError, ValueError, KeyError) as error:
        return f"{RECORD} cannot be read ({error})"
    return None


def newest_whole(folder: Path) -> Path | None:
    """The newest checkpoint that passes verification. Rank 0 looks and tells the others. Collective."""

    def look() -> str:
        for checkpoint in reversed(whole_names(folder)):
            problem = problem_of(checkpoint)
            if problem is None:
                return str(checkpoint)
            log.warning("skipping checkpoint %s: %s", checkpoint, problem)
        return ""

    found = on_rank_zero(look)
    return Path(found) if found else None


def load(engine: Engine, checkpoint: Path) -> dict[str, Any]:
    """Fill the engine from a checkpoint of any engine and layout; gives the `run_state` saved with it. Collective."""
    record = json.loads((checkpoint / RECORD).read_text())
    if record.get("weights_only"):
        raise CheckpointError(
            f"{checkpoint} holds weights alone, without the optimizer's moments, and cannot be resumed. "
            f"Begin a run with it: set run.folder to a new folder and train.start_from={checkpoint}."
        )
    state = engine.state()
    reader = FileSystemReader(checkpoint)
    _check_names(checkpoint, state.tensors, reader.read_metadata().state_dict_metadata)
    dcp.load(state.tensors, storage_reader=reader)
    state.steps = record["steps"]
    engine.load(state)
    run_state: dict[str, Any] = record["run"]
    return run_state


def stored_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """What a checkpoint holds, by name, as tensors without storage: their shapes and types."""
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def load_tensors(tensors: dict[str, Tensor], checkpoint: Path) -> None:
    """Fill plain tensors, named as in LogicalState, from a checkpoint. For one process, without a group."""
    reader = FileSystemReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata
    _check_names(checkpoint, tensors, {name: stored[name] for name in stored.keys() & tensors.keys()})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is the intent
        dcp.load(tensors, storage_reader=reader, no_dist=True)


def load_into(engine: Engine, checkpoint: Path, names: Iterable[str]) -> None:
    """Fill the named tensors of an engine from a checkpoint of any engine and layout, and nothing else. Collective."""
    state = engine.state()
    wanted = {name: state.tensors[name] for name in sorted(names)}
    dcp.load(wanted, storage_reader=FileSystemReader(checkpoint))
    state.tensors.update(wanted)
    engine.load(state)


def save_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write plain tensors as the files of a checkpoint. For one process, without a group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is the intent
        writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
        dcp.save(tensors, storage_writer=writer, no_dist=True)


def run_state_of(checkpoint: Path) -> dict[str, Any]:
    """The `run_state` that was saved with a checkpoint that has no problem."""
    run_state: dict[str, Any] = json.loads((checkpoint / RECORD).read_text())["run"]
    return run_state


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
