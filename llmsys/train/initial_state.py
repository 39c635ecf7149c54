"""Load the state that training starts from: the newest checkpoint of the run, or the weights of another run.

Reads `checkpoints/` of the run folder, or `train.init_from`.

Invariants:
- Model, data and settings are compared before a tensor is read, so a rejected checkpoint changes nothing.
- `train.init_from` takes the tensors that both models have; the log lists the others.
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
    "data": "The data differ: set data.folder to the original dataset, or prepare it again with the original config.",
    "tokenizer_fingerprint": "The tokenizer differs, so ids have another meaning: use the tokenizer of the run.",
    "model": "The model differs: restore the model section.",
}
"""Next step for a difference, by the prefix of its key."""


def resume_from_checkpoint(engine: Engine, config: RunConfig, identity: dict[str, Any], judge: StepGuard) -> int | None:
    """Load the newest complete checkpoint and return its step, or None for a start at step 0. Collective.

    Args:
        engine: filled with the state.
        config: the config of the run.
        identity: settings and fingerprints of this run.
        step_guard: filled with the skipped steps and the accepted losses.

    Raises:
        CheckpointError: the settings differ, or the folder has a history but nothing to resume and no `train.restart`.
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
    # Checksums prove that the files are unchanged, not that they were loaded into the right places.
    check_loaded_state(engine, newest, record)
    judge.load_state_dict(record.get("judge", {}))
    steps: int = record["steps"]
    log.info("resuming from %s: %d of %d steps done", newest, steps, config.num_steps)
    return steps


def require_same_settings(newest: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Compare the settings that a checkpoint was trained with and the current ones.

    Raises:
        CheckpointError: they differ; the message lists every difference.
    """
    changes = format_changes(to_current_names(saved), to_current_names(now))
    if not changes:
        return
    advice = [text for key, text in ADVICE.items() if any(change.startswith(key) for change in changes)]
    raise CheckpointError(
        f"{newest} was trained with other settings: {'; '.join(changes)}. A run folder belongs to one "
        f"trajectory. {''.join(f'{text} ' for text in advice)}Restore the settings, or set run.folder to a new "
        "folder."
    )


def load_initial_weights(engine: Engine, init_from: Path, identity: dict[str, Any]) -> None:
    """Fill parameters and buffers by name from a run folder or a checkpoint. Collective.

    Args:
        engine: filled with the tensors that both models have.
        init_from: `train.init_from`.
        identity: fingerprints of this run.

    Raises:
        CheckpointError: there is no complete checkpoint, no tensor in common, a shape differs, or the tokenizer does.
    """
    checkpoint = _resolve_checkpoint(init_from)
    _check_tokenizer(checkpoint, identity)
    # Moments belong to the old run: fine-tuning starts the optimizer anew.
    stored = {name: value for name, value in read_tensor_metadata(checkpoint).items() if "_moment/" not in name}
    wanted = {name: value for name, value in engine.get_state().tensors.items() if "_moment/" not in name}
    common = sorted(stored.keys() & wanted.keys())
    if not common:
        raise CheckpointError(f"{checkpoint} has no tensor of this model. Correct train.init_from, or leave it out.")
    for name in common:
        if stored[name].shape != wanted[name].shape:
            raise CheckpointError(
                f"{checkpoint}: {name} has shape {tuple(stored[name].shape)}, the model needs "
                f"{tuple(wanted[name].shape)}. Use the model section it was trained with, except for its head."
            )
    load_named_tensors(engine, checkpoint, common)
    if get_rank() == 0:
        log.info("%d tensors initialized from %s", len(common), checkpoint)
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
            f"train.init_from={init_from} is neither a checkpoint nor a run folder with a complete one. "
            "Correct the path, or train that run first."
        )
    return found


def _check_tokenizer(checkpoint: Path, identity: dict[str, Any]) -> None:
    theirs, ours = read_run_state(checkpoint).get("tokenizer_fingerprint"), identity["tokenizer_fingerprint"]
    if theirs not in (None, ours):
        raise CheckpointError(
            f"{checkpoint} was trained with tokenizer {theirs}, but the data were prepared with {ours}, so ids "
            "have another meaning. Prepare the data with its tokenizer: tokenizer.kind=file "
            "tokenizer.path=DATA/tokenizer."
        )


def _format_names(names: Iterable[str]) -> str:
    return ", ".join(name.removeprefix("parameter/") for name in sorted(names)) or "nothing"
