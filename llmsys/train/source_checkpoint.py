"""The checkpoint of another run that a new run starts from, and the tensors that it takes by name.

Reads a checkpoint that `train.init_from` or `train.branch_from` names (see branch_point.py).

Invariants:
- The checkpoint is complete and of the run's tokenizer before a model is built.
- A tensor is taken as it is, grown by a rule of model_growth.py where `train.grow_model` allows it,
  or left at its initial value; the log and the run's events list all three.
- Moments, averages and the loss scale are taken together or not at all.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmsys.config.run import RunConfig
from llmsys.engine.engine import Engine, EngineState
from llmsys.errors import CheckpointError
from llmsys.log import get_logger
from llmsys.model.local_tensor import get_local_tensor
from llmsys.parallel.dtensor_slices import get_local_slice
from llmsys.parallel.process_group import get_rank
from llmsys.train.checkpoint_load import (
    find_error_in_shares,
    find_newest_checkpoint,
    load_tensors,
    read_run_state,
    read_tensor_metadata,
)
from llmsys.train.checkpoint_record import RECORD, list_checkpoints
from llmsys.train.checkpoint_storage import CheckpointStorageReader, read_tensors
from llmsys.train.model_growth import Growth, find_growth, find_shape_violation, grow_tensor

PARAMETER = "parameter/"
BUFFER = "buffer/"
AVERAGE = "average/"

log = get_logger(__name__)


@dataclass(frozen=True)
class TakenTensors:
    """The tensors of a new run by where they come from: names as in `EngineState`, equal on every
    rank.

    Attributes:
        common: Taken as they are.
        grown: Made from a stored tensor by a rule.
        new: Left at their initial values.
        unused: Stored, and not in the model.
    """

    common: tuple[str, ...]
    grown: dict[str, Growth]
    new: tuple[str, ...]
    unused: tuple[str, ...]

    @property
    def has_all_parameters(self) -> bool:
        """True where every parameter of the model is taken as it is."""
        return not any(name.startswith(PARAMETER) for name in (*self.grown, *self.new))

    def to_dict(self) -> dict[str, list[str]]:
        """Return the names of the log, with one entry for all layers."""
        return {
            "grown": _shorten_names(self.grown),
            "new": _shorten_names(self.new),
            "unused": _shorten_names(self.unused),
        }


def _shorten_names(names: Iterable[str]) -> list[str]:
    shortened = (
        re.sub(r"blocks\.\d+", "blocks.*", name.removeprefix(PARAMETER)) for name in sorted(names)
    )
    return list(dict.fromkeys(shortened))


def find_source_checkpoint(source: Path, key: str, tokenizer_fingerprint: str) -> Path:
    """Find the checkpoint that a path names, complete and of the run's tokenizer. Collective.

    Args:
        source: A run folder (its newest checkpoint), RUN@STEP, or the folder of a checkpoint.
        key: The config key, for error messages.
        tokenizer_fingerprint: That of the run's data.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: There is none, it is damaged, or its run has another tokenizer.
    """
    checkpoint = _resolve_path(source, key)
    if (problem := find_error_in_shares(checkpoint)) is not None:
        raise CheckpointError(f"{checkpoint} cannot be used: {problem}. Name another in {key}.")
    theirs = read_run_state(checkpoint).get("tokenizer_fingerprint")
    if theirs not in (None, tokenizer_fingerprint):
        raise CheckpointError(
            f"{checkpoint} was trained with tokenizer {theirs}, but the data were prepared with "
            f"{tokenizer_fingerprint}, so ids have another meaning. Prepare the data with its "
            "tokenizer: tokenizer.kind=file tokenizer.path=DATA/tokenizer."
        )
    return checkpoint


def _resolve_path(source: Path, key: str) -> Path:
    if (source / RECORD).exists():
        return source
    folder, _, step = str(source).rpartition("@")
    # RUN@STEP, unless a folder has this very name.
    if folder and step.isdigit() and not source.exists():
        saved = list_checkpoints(Path(folder) / "checkpoints")
        if int(step) in saved:
            return saved[int(step)]
        steps = ", ".join(map(str, list(saved)[-10:])) or "none"
        raise CheckpointError(
            f"{key}={source}: {folder} has no checkpoint of step {step}. Its last steps with one: "
            f"{steps}. Name one of them, or keep more with checkpoint.keep_every_steps."
        )
    found = find_newest_checkpoint(source / "checkpoints")
    if found is None:
        raise CheckpointError(
            f"{key}={source} is neither a checkpoint nor a run folder with a complete one. "
            "Correct the path, or train that run first."
        )
    return found


def select_tensors(engine: Engine, checkpoint: Path, config: RunConfig) -> TakenTensors:
    """Compare the tensors of a checkpoint with those of the model, by name and shape.

    Args:
        engine: the engine of the new run.
        checkpoint: from `find_source_checkpoint`.
        config: the config of the new run.

    Returns:
        The tensors by where they come from. Moments are in none of the lists.

    Raises:
        CheckpointError: no tensor is common, or a shape differs and cannot grow.
    """
    stored = _drop_moments(read_tensor_metadata(checkpoint))
    needed = _drop_moments(engine.get_state().tensors) | dict(engine.module.shapes_elsewhere)
    if not stored.keys() & needed.keys():
        raise CheckpointError(
            f"{checkpoint} has no tensor of this model. Correct the path, or leave it out."
        )
    saved = read_run_state(checkpoint).get("model")
    if (
        config.train.grow_model
        and isinstance(saved, dict)
        and (problem := find_shape_violation(saved, config.model))
    ):
        raise CheckpointError(f"{checkpoint} cannot be grown: {problem}")
    parameters = {
        name.removeprefix(PARAMETER): shape
        for name, shape in stored.items()
        if name.startswith(PARAMETER)
    }
    common = []
    new = []
    grown = {}
    for name, shape in sorted(needed.items()):
        if stored.get(name) == shape:
            common.append(name)
            continue
        growth = None
        if config.train.grow_model and name.startswith(PARAMETER):
            growth = find_growth(name.removeprefix(PARAMETER), tuple(shape), parameters)
        if growth is not None:
            grown[name] = growth
        elif name in stored and name.startswith(PARAMETER):
            raise CheckpointError(_describe_shape(checkpoint, name, stored[name], shape, config))
        else:
            new.append(name)
    used = {*common, *(PARAMETER + growth.source for growth in grown.values())}
    return TakenTensors(tuple(common), grown, tuple(new), tuple(sorted(stored.keys() - used)))


def _drop_moments(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {
        name: tensor.shape
        for name, tensor in tensors.items()
        if name.startswith((PARAMETER, BUFFER))
    }


def _describe_shape(
    checkpoint: Path, name: str, theirs: torch.Size, ours: torch.Size, config: RunConfig
) -> str:
    text = f"{checkpoint}: {name} has shape {tuple(theirs)}, the model needs {tuple(ours)}. "
    if config.train.grow_model:
        return text + (
            "No rule grows it: widths grow by whole factors, heads as whole heads, and vocabulary "
            "and number of experts stay. Use such sizes."
        )
    return text + (
        "Use the model section it was trained with, except for its head, or train.grow_model=true "
        "for a deeper or wider model."
    )


def load_taken_tensors(
    engine: Engine, checkpoint: Path, taken: TakenTensors, config: RunConfig, *, updates: int
) -> None:
    """Fill an engine with the selected tensors. Collective.

    Args:
        engine: filled.
        checkpoint: from `find_source_checkpoint`.
        taken: from `select_tensors`.
        config: the config of the new run.
        updates: optimizer steps of the checkpoint, to take its moments as well; 0 starts the
            optimizer anew.
    """
    state = engine.get_state()
    stored = read_tensor_metadata(checkpoint)
    names = [name for name in taken.common if name in state.tensors]
    if updates:
        names += [
            name
            for name in state.tensors
            if name in stored and not name.startswith((PARAMETER, BUFFER))
        ]
    wanted = {name: state.tensors[name] for name in sorted(names)}
    read_tensors(wanted, CheckpointStorageReader(checkpoint))
    state.tensors.update(wanted)
    for name, growth in taken.grown.items():
        if name in state.tensors:  # else another stage of a pipeline has it
            _grow_parameter(state.tensors[name], name, growth, checkpoint, config, stored)
    if updates:
        _start_averages(state, stored)
    state.steps = updates
    engine.load_state(state)
    if get_rank() == 0:
        log.info("%d tensors initialized from %s", len(taken.common), checkpoint)
        shown = {key: ", ".join(names) or "nothing" for key, names in taken.to_dict().items()}
        for words, key in (
            ("grown", "grown"),
            ("newly initialised", "new"),
            ("not used", "unused"),
        ):
            if key != "grown" or taken.grown:
                log.info("%s: %s", words, shown[key])


@torch.no_grad()
def _grow_parameter(
    target: Tensor,
    name: str,
    growth: Growth,
    checkpoint: Path,
    config: RunConfig,
    stored: dict[str, Tensor],
) -> None:
    """Fill this rank's shard of a parameter; every rank reads the stored tensor as a whole, one
    at a time.
    """
    source = f"{PARAMETER}{growth.source}"
    whole = {source: torch.empty(stored[source].shape)}
    load_tensors(whole, checkpoint)
    grown = grow_tensor(whole[source], growth, (config.run.seed, name))
    local = get_local_tensor(target)
    local.copy_(get_local_slice(grown, target).reshape(local.shape))


@torch.no_grad()
def _start_averages(state: EngineState, stored: Mapping[str, Any]) -> None:
    """Start the averages that the checkpoint has none of at the weights."""
    for name, average in state.tensors.items():
        if name.startswith(AVERAGE) and name not in stored:
            average.copy_(state.tensors[name.replace(AVERAGE, PARAMETER, 1)])
