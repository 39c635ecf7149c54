"""A new run with the weights of another one: all that both models have, the rest as it was initialised.

Fine-tuning begins so: the encoder of a masked language model under a new classifier. What was not taken is named.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llmsys.engine.engine import Engine
from llmsys.errors import CheckpointError
from llmsys.log import get_logger
from llmsys.parallel.group import get_rank
from llmsys.train.checkpoint import load_named_tensors, find_newest_checkpoint, read_run_state, read_tensor_metadata
from llmsys.train.checkpoint_record import RECORD, find_checkpoint_error

log = get_logger(__name__)


def load_initial_weights(engine: Engine, start_from: Path, identity: dict[str, Any]) -> None:
    """Fill the engine's parameters and buffers from a run folder or a checkpoint, by name. Collective.

    Raises CheckpointError when there is none, it is damaged, has nothing in common with the model, knows a parameter of
    the same name in another shape, or was trained on ids of another tokenizer.
    """
    checkpoint = _resolve_checkpoint(start_from)
    _check_tokenizer(checkpoint, identity)
    stored = {name: value for name, value in read_tensor_metadata(checkpoint).items() if "_moment/" not in name}
    wanted = {name: value for name, value in engine.get_state().tensors.items() if "_moment/" not in name}
    common = sorted(stored.keys() & wanted.keys())
    if not common:
        raise CheckpointError(f"{checkpoint} has no tensor of this model's. Correct train.start_from, or leave it out.")
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


def _resolve_checkpoint(start_from: Path) -> Path:
    if (start_from / RECORD).exists():
        if (problem := find_checkpoint_error(start_from)) is not None:
            raise CheckpointError(f"{start_from} cannot be used: {problem}. Name another in train.start_from.")
        return start_from
    found = find_newest_checkpoint(start_from / "checkpoints")
    if found is None:
        raise CheckpointError(
            f"train.start_from={start_from} is neither a checkpoint nor a run folder that holds a whole one. "
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
