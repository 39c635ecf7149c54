"""Going on from the newest whole checkpoint: only when it belongs to this model, these data and these settings.

Everything is compared before a tensor is read, so that a refusal leaves nothing half done.

A new run with the weights of another one: all that both models have, the rest as it was initialised.

Fine-tuning begins so: the encoder of a masked language model under a new classifier. What was not taken is named.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llmsys.config.migration import to_current_names
from llmsys.config.run import RunConfig
from llmsys.engine.engine import Engine
from llmsys.errors import CheckpointError
from llmsys.log import get_logger
from llmsys.parallel.process_group import get_rank, run_on_rank_zero
from llmsys.train import checkpoint_load
from llmsys.train.bitwise_checks import check_loaded_state, drop_reproducibility_mode
from llmsys.train.checkpoint_history import restore_leftovers, start_over
from llmsys.train.checkpoint_load import (
    find_newest_checkpoint,
    load_named_tensors,
    read_run_state,
    read_tensor_metadata,
)
from llmsys.train.checkpoint_record import RECORD, find_checkpoint_error
from llmsys.train.rank_agreement import format_changes
from llmsys.train.step_guard import StepGuard

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
    found = checkpoint_load.verify_folder(folder)
    newest = found.newest
    if newest is None:
        run_on_rank_zero(lambda: start_over(config, found.problems))
        return None
    record = checkpoint_load.read_resumable_record(newest)
    saved, now = drop_reproducibility_mode(record["run"], identity)
    require_same_settings(newest, saved, now)
    checkpoint_load.load_checkpoint(engine, newest)
    check_loaded_state(engine, newest, record)
    judge.load_state_dict(record.get("judge", {}))
    steps: int = record["steps"]
    log.info("resuming from %s: %d of %d steps are done", newest, steps, config.num_steps)
    return steps


def require_same_settings(newest: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """CheckpointError with every difference between what a checkpoint was trained with and what is wanted now."""
    changes = format_changes(to_current_names(saved), to_current_names(now))
    if not changes:
        return
    advice = [text for key, text in ADVICE.items() if any(change.startswith(key) for change in changes)]
    raise CheckpointError(
        f"{newest} was trained with other settings: {'; '.join(changes)}. A run follows one trajectory. "
        f"{''.join(f'{text} ' for text in advice)}"
        f"Put the settings back, or set run.folder to a new folder."
    )


def load_initial_weights(engine: Engine, init_from: Path, identity: dict[str, Any]) -> None:
    """Fill the engine's parameters and buffers from a run folder or a checkpoint, by name. Collective.

    Raises CheckpointError when there is none, it is damaged, has nothing in common with the model, knows a parameter of
    the same name in another shape, or was trained on ids of another tokenizer.
    """
    checkpoint = _resolve_checkpoint(init_from)
    _check_tokenizer(checkpoint, identity)
    stored = {name: value for name, value in read_tensor_metadata(checkpoint).items() if "_moment/" not in name}
    wanted = {name: value for name, value in engine.get_state().tensors.items() if "_moment/" not in name}
    common = sorted(stored.keys() & wanted.keys())
    if not common:
        raise CheckpointError(f"{checkpoint} has no tensor of this model's. Correct train.init_from, or leave it out.")
    for name in common:
        if stored[name].shape != wanted[name].shape:
            raise CheckpointError(
                f"{checkpoint}: {name} has shape {tuple(stored[name].shape)}, the model needs "
                f"{tuple(wanted[name].shape)}. Use the model section it was trained with, except for its head."
            )
    load_named_tensors(engine, checkpoint, common)
    if get_rank() == 0:
        log.info("%d tensors are taken from %s", len(common), checkpoint)
        log.info("newly initialised: %s", _format_names(wanted.keys() - stored.keys()))
        log.info("not used: %s", _format_names(stored.keys() - wanted.keys()))


def _resolve_checkpoint(init_from: Path) -> Path:
    if (init_from / RECORD).exists():
        if (problem := find_checkpoint_error(init_from)) is not None:
            raise CheckpointError(f"{init_from} cannot be used: {problem}. Name another in train.init_from.")
        return init_from
    found = find_newest_checkpoint(init_from / "checkpoints")
    if found is None:
        raise CheckpointError(
            f"train.init_from={init_from} is neither a checkpoint nor a run folder that holds a whole one. "
            f"Correct the path, or train that run first."
        )
    return found


def _check_tokenizer(checkpoint: Path, identity: dict[str, Any]) -> None:
    theirs, ours = read_run_state(checkpoint).get("tokenizer_fingerprint"), identity["tokenizer_fingerprint"]
    if theirs not in (None, ours):
        raise CheckpointError(
            f"{checkpoint} was trained with tokenizer {theirs}, and the data are prepared with {ours}: the ids mean "
            f"other pieces. Prepare the data with its tokenizer: tokenizer.kind=file tokenizer.path=DATA/tokenizer."
        )


def _format_names(names: Iterable[str]) -> str:
    return ", ".join(name.removeprefix("parameter/") for name in sorted(names)) or "nothing"
