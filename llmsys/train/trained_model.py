"""Load a trained model from a run folder in one process, without an engine, for evaluation and
generation.
"""

from pathlib import Path

import torch
from torch import Tensor

from llmsys.config.run import RunConfig
from llmsys.data.batch import Batch
from llmsys.engine.engine import iter_persistent_buffers
from llmsys.model.transformer import Transformer
from llmsys.parallel.process_group import get_local_device
from llmsys.train.build_engine import build_model
from llmsys.train.checkpoint_average import average_checkpoints
from llmsys.train.checkpoint_load import (
    find_newest_checkpoint,
    get_stored_weights_name,
    load_tensors,
    read_newest_checkpoint,
    read_tensor_metadata,
)
from llmsys.train.checkpoint_record import build_missing_error
from llmsys.train.evaluator import LogitsFunction
from llmsys.train.precision import DTYPES, resolve_precision
from llmsys.train.remote_run import fetch_run


def load_trained_model(config: RunConfig) -> tuple[Transformer, Path]:
    """Load the newest complete checkpoint of the run as a plain module in the run's compute dtype.

    With `checkpoint.average_last` it is the average of the last ones, which is written if it does
    not exist.

    Args:
        config: the config of the run.

    Returns:
        The model in evaluation mode on this process's device, and the checkpoint it was read from.

    Raises:
        CheckpointError: the run folder holds no complete checkpoint.
    """
    fetch_run(config.run.folder)
    config = resolve_precision(config)
    folder = config.run.folder / "checkpoints"
    average = config.checkpoint.average_last

    def find_checkpoint() -> Path | None:
        return (
            average_checkpoints(config.run.folder, average)
            if average > 1
            else find_newest_checkpoint(folder)
        )

    read = read_newest_checkpoint(
        find_checkpoint, lambda found: (_load_model(config, found), found)
    )
    if read is None:
        raise build_missing_error(folder)
    return read


def _load_model(config: RunConfig, found: Path) -> Transformer:
    model = build_model(config).to_empty(device=get_local_device())
    # Buffers that are not saved, such as RoPE frequencies, have no values after to_empty.
    model.reset_buffers()
    stored = read_tensor_metadata(found).keys()
    tensors: dict[str, Tensor] = {
        get_stored_weights_name(name, stored): value.detach()
        for name, value in model.named_parameters()
    }
    tensors |= {f"buffer/{name}": buffer for name, buffer in iter_persistent_buffers(model)}
    load_tensors(tensors, found)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[config.train.resolved_precision])
    return model.eval()


def build_logits_function(model: Transformer) -> LogitsFunction:
    """Return a function that computes the model's logits, as `Engine.compute_logits` does.

    Args:
        model: a plain module.

    Returns:
        A function from a batch to logits (B, T, V); (B, labels) for a classifier.
    """

    @torch.no_grad()
    def compute_logits(batch: Batch) -> Tensor:
        logits_BTV: Tensor = model(**batch.to(next(model.parameters()).device).to_model_inputs())
        return logits_BTV

    return compute_logits
