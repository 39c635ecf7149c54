"""A new run with the weights of another one: all that both models have, the rest as it was initialised.

Fine-tuning begins so: the encoder of a masked language model under a new classifier. What was not taken is named.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llmsys.engine.engine import Engine
from llmsys.errors import CheckpointError
from llmsys.log import logger
from llmsys.parallel.group import rank
from llmsys.train.checkpoint import load_into, newest_whole, run_state_of, stored_tensors
from llmsys.train.checkpoint_record import RECORD, problem_of

log = logger(__name__)


def take_weights(engine: Engine, start_from: Path, identity: dict[str, Any]) -> None:
    """Fill the engine's parameters and buffers from a run folder or a checkpoint, by name. Collective.

    Raises CheckpointError when there is none, it is damaged, has nothing in common with the model, knows a parameter of
    the same name in another shape, or was trained on ids of another tokenizer.
    """
    checkpoint = _checkpoint(start_from)
    _check_tokenizer(checkpoint, identity)
    stored = {name: value for name, value in stored_tensors(checkpoint).items() if "_moment/" not in name}
    wanted = {name: value for name, value in engine.state().tensors.items() if "_moment/" not in name}
    common = sorted(stored.keys() & wanted.keys())
    if not common:
        raise CheckpointError(f"{checkpoint} has no tensor of this model's. Correct train.start_from, or leave it out.")
    for name in common:
        if stored[name].shape != wanted[name].shape:
            raise CheckpointError(
                f"{checkpoint}: {name} has shape {tuple(stored[name].shape)}, the model needs "
                f"{tuple(wanted[name].shape)}. Use the model section it was trained with, except for its head."
            )
    load_into(engine, checkpoint, common)
    if rank() == 0:
        log.info("%d tensors are taken from %s", len(common), checkpoint)
        log.info("newly initialised: %s", _listed(wanted.keys() - stored.keys()))
        log.info("not used: %s", _listed(stored.keys() - wanted.keys()))


def _checkpoint(start_from: Path) -> Path:
    if (start_from / RECORD).exists():
        if (problem := problem_of(start_from)) is not None:
            raise CheckpointError(f"{start_from} cannot be used: {problem}. Name another in train.start_from.")
        return start_from
    found = newest_whole(start_from / "checkpoints")
    if found is None:
        raise CheckpointError(
            f"train.start_from={start_from} is neither a checkpoint nor a run folder that holds a whole one. "
            f"Correct the path, or train that run first."
        )
    return found


def _check_tokenizer(checkpoint: Path, identity: dict[str, Any]) -> None:
    theirs, ours = run_state_of(checkpoint).get("tokenizer_fingerprint"), identity["tokenizer_fingerprint"]
    if theirs not in (None, ours):
        raise CheckpointError(
            f"{checkpoint} was trained with tokenizer {theirs}, and the data are prepared with {ours}: the ids mean "
            f"other pieces. Prepare the data with its tokenizer: tokenizer.kind=file tokenizer.path=DATA/tokenizer."
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(name.removeprefix("parameter/") for name in sorted(names)) or "nothing"
