"""Load the state that training starts from: the newest checkpoint of the run. source_checkpoint.py
has other runs.

A run folder with nothing to resume may start at step 0 if nothing was ever saved.

Reads `checkpoints/` and `events.jsonl`; moves unusable checkpoints to
`checkpoints/before-restart-N`.

Invariants:
- Model, data and settings are compared before a tensor is read, so a rejected checkpoint changes
  nothing.
- A folder in which a checkpoint was ever saved never starts at step 0 unless `train.restart` asks
  for it.
- Nothing is deleted.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmsys.config.run import RunConfig
from llmsys.engine.engine import Engine
from llmsys.errors import CheckpointError
from llmsys.events import iter_events
from llmsys.log import get_logger
from llmsys.parallel.process_group import run_on_rank_zero
from llmsys.storage.atomic_write import sync_folder
from llmsys.train import checkpoint_load
from llmsys.train.checkpoint_record import (
    DAMAGE_ERRORS,
    build_unreadable_error,
    is_present,
    list_checkpoints,
)
from llmsys.train.checkpoint_write import REMOVED, REPLACED, restore_replaced
from llmsys.train.run_checks import check_loaded_state
from llmsys.train.run_settings import drop_reproducibility_mode, require_same_settings
from llmsys.train.step_guard import StepGuard

# Checkpoints that an error lists with their problems.
MAX_LISTED = 5

log = get_logger(__name__)


def restore_leftovers(folder: Path) -> str:
    """Restore the checkpoint that a killed save had renamed. For rank 0.

    Args:
        folder: The folder `checkpoints` of a run.

    Returns:
        An empty string, for `run_on_rank_zero`.

    Raises:
        CheckpointError: The disk does not allow it.
    """
    try:
        restore_replaced(folder)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: the checkpoint that an interrupted save had moved away cannot be "
            f"restored: {error.strerror or error}. Repair the disk or the permissions, then run "
            "the same command again."
        ) from error
    return ""


def start_over(config: RunConfig, problems: Mapping[Path, str]) -> str:
    """Allow a start at step 0, with unusable checkpoints moved aside. For rank 0.

    Args:
        config: the config of the run.
        problems: the reason why each checkpoint cannot be resumed.

    Returns:
        An empty string, for `run_on_rank_zero`.

    Raises:
        CheckpointError: the folder has a history and `train.restart` is not set.
    """
    folder = config.run.folder / "checkpoints"
    reason = _find_saved_checkpoint(folder, problems)
    if reason is None:
        return ""
    if not config.train.restart:
        raise CheckpointError(
            f"{config.run.folder} has a history but no checkpoint to resume: {reason}. The run "
            "was not restarted, and nothing was deleted. Restore a complete checkpoint, set "
            "run.folder to a new folder, or set train.restart=true to start at step 0."
        )
    aside = _move_aside(folder)
    log.warning(
        "train.restart=true: starting at step 0, because %s%s",
        reason,
        f"; see {aside}" if aside else "",
    )
    return ""


def _find_saved_checkpoint(folder: Path, problems: Mapping[Path, str]) -> str | None:
    """Return the evidence that a checkpoint was ever saved in the folder, or None."""
    if problems:
        named = [f"{checkpoint.name}: {problem}" for checkpoint, problem in problems.items()]
        more = f"; and {len(named) - MAX_LISTED} more" if len(named) > MAX_LISTED else ""
        return f"no checkpoint is complete ({'; '.join(named[:MAX_LISTED])}{more})"
    leftovers = sorted(
        path.name for pattern in (REPLACED, REMOVED) for path in folder.glob(pattern)
    )
    if leftovers:
        return f"{folder} has only leftovers of a killed run ({', '.join(leftovers)})"
    step = _read_last_save(folder.parent / "events.jsonl")
    return (
        None
        if step is None
        else f"its events.jsonl lists a checkpoint of step {step}, but {folder} has none"
    )


def _read_last_save(events: Path) -> int | None:
    """Return the step of the newest checkpoint since the run last started at step 0, or None."""
    found: int | None = None
    if not is_present(events):
        return None
    try:
        for event in iter_events(events):
            # A start at step 0 begins a new history in the same file.
            if event["event"] == "start" and event.get("resumed_from") is None:
                found = None
            elif event["event"] == "checkpoint":
                found = event.get("step", 0)
    except OSError as error:
        if error.errno not in DAMAGE_ERRORS:
            raise build_unreadable_error(events, error) from error
    return found


def _move_aside(folder: Path) -> Path | None:
    """Move checkpoints and leftovers into a new folder inside `folder` and return it; None if
    there are none.
    """
    leftovers = [path for pattern in (REPLACED, REMOVED) for path in sorted(folder.glob(pattern))]
    moving = [*list_checkpoints(folder).values(), *leftovers]
    if not moving:
        return None
    number = 1
    # Never into an existing folder: nothing is overwritten.
    while is_present(folder / f"before-restart-{number}"):
        number += 1
    aside = folder / f"before-restart-{number}"
    try:
        aside.mkdir()
        for path in moving:
            path.rename(aside / path.name)
        sync_folder(folder)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: unusable checkpoints cannot be moved to {aside.name}: "
            f"{error.strerror or error}. Repair the disk or the permissions, then run the same "
            "command again, or set run.folder to a new folder."
        ) from error
    return aside


def find_resume_point(config: RunConfig) -> Path | None:
    """Find the newest complete checkpoint of a run, or None for a start at step 0. Collective.

    Before a model is built: one that is loaded needs no initial values.

    Args:
        config: the config of the run.

    Returns:
        The checkpoint, every byte of it verified.

    Raises:
        CheckpointError: the folder has a history but nothing to resume and no `train.restart`.
    """
    folder = config.run.folder / "checkpoints"
    run_on_rank_zero(lambda: restore_leftovers(folder))
    found = checkpoint_load.verify_folder(folder)
    if found.newest is None:
        run_on_rank_zero(lambda: start_over(config, found.problems))
    return found.newest


def resume_from_checkpoint(
    engine: Engine, newest: Path, config: RunConfig, identity: dict[str, Any], step_guard: StepGuard
) -> int:
    """Load a checkpoint and return its step. Collective.

    Args:
        engine: filled with the state.
        newest: the result of `find_resume_point`.
        config: the config of the run.
        identity: settings and fingerprints of this run.
        step_guard: filled with the skipped steps and the accepted losses.

    Returns:
        The number of steps done.

    Raises:
        CheckpointError: the settings differ.
    """
    record = checkpoint_load.read_resumable_record(newest)
    saved, now = drop_reproducibility_mode(record["run"], identity)
    require_same_settings(newest, saved, now)
    checkpoint_load.load_checkpoint(engine, newest)
    # Checksums prove that the files are unchanged, not that they were loaded into the right places.
    check_loaded_state(engine, newest, record)
    step_guard.load_state_dict(record.get("step_guard", {}))
    steps: int = record["steps"]
    log.info("resuming from %s: %d of %d steps done", newest, steps, config.num_steps)
    return steps
