"""Going on from the newest whole checkpoint: only when it belongs to this model, these data and these settings.

Everything is compared before a tensor is read, so that a refusal leaves nothing half done.
"""

from pathlib import Path
from typing import Any

from llmsys.config.run import RunConfig
from llmsys.engine.engine import Engine
from llmsys.errors import CheckpointError
from llmsys.log import get_logger
from llmsys.parallel.group import run_on_rank_zero
from llmsys.train import checkpoint
from llmsys.train.agree import format_changes
from llmsys.train.bitwise import check_loaded_state, drop_reproducibility_mode
from llmsys.train.faults import StepGuard
from llmsys.train.history import restore_leftovers, start_over

log = get_logger(__name__)

ADVICE = {
    "data": "The data are not those that it was trained on: set data.folder to those, or prepare them as they were.",
    "tokenizer_fingerprint": "The tokenizer is another one, so ids mean other pieces: take the one of the run.",
    "model": "It belongs to another model: put the model section back.",
}
"""What to do about a difference, by how its key begins."""


def resume_from_checkpoint(engine: Engine, config: RunConfig, identity: dict[str, Any], judge: StepGuard) -> int | None:
    """Load the newest whole checkpoint, if there is one, and return how many steps are done. Collective.

    None means a start at step 0. CheckpointError where the folder has a history of which nothing can be resumed, and
    train.restart does not ask for a new start.
    """
    folder = config.run.folder / "checkpoints"
    run_on_rank_zero(lambda: restore_leftovers(folder))
    found = checkpoint.verify_folder(folder)
    newest = found.newest
    if newest is None:
        run_on_rank_zero(lambda: start_over(config, found.problems))
        return None
    record = checkpoint.read_resumable_record(newest)
    saved, now = drop_reproducibility_mode(record["run"], identity)
    require_same_settings(newest, saved, now)
    checkpoint.load_checkpoint(engine, newest)
    check_loaded_state(engine, newest, record)
    judge.load_state_dict(record.get("judge", {}))
    steps: int = record["steps"]
    log.info("resuming from %s: %d of %d steps are done", newest, steps, config.num_steps)
    return steps


def require_same_settings(newest: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """CheckpointError with every difference between what a checkpoint was trained with and what is wanted now."""
    changes = format_changes(saved, now)
    if not changes:
        return
    advice = [text for key, text in ADVICE.items() if any(change.startswith(key) for change in changes)]
    raise CheckpointError(
        f"{newest} was trained with other settings: {'; '.join(changes)}. A run follows one trajectory. "
        f"{''.join(f'{text} ' for text in advice)}"
        f"Put the settings back, or set run.folder to a new folder."
    )
