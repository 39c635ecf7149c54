"""Change exported weights so that a model without multipliers, or with another pairing of rotated
channels, computes the same: those of `llmsys.config.export.plain_model`.
"""

import torch
from torch import Tensor

from llmsys.config.model import ModelConfig
from llmsys.config.position import RopeConfig
from llmsys.model.parametrization import compute_exported_factor

ROTATED = ("q_proj", "k_proj", "q_norm", "k_norm")


def change_weight(model: ModelConfig, exported: ModelConfig, name: str, weight: Tensor) -> Tensor:
    """Return a weight as the exported model takes it.

    Args:
        model: The model with its parametrization and pairing.
        exported: The model that is exported instead, from `choose_export`.
        name: Name in a checkpoint, `parameter/…` or `buffer/…`.
        weight: The value.

    Returns:
        The value to export; `weight` itself where nothing changes.
    """
    if model.parametrization != exported.parametrization:
        factor = compute_exported_factor(model, name.removeprefix("parameter/"))
        weight = weight if factor == 1.0 else weight * factor
    ours, theirs = model.position, exported.position
    if isinstance(ours, RopeConfig) and isinstance(theirs, RopeConfig):
        owner = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        if ours.pairing != theirs.pairing and owner in ROTATED:
            order = _list_channels(exported)
            weight = weight.unflatten(0, (-1, model.head_dim))[:, order].flatten(0, 1)
    return weight


def _list_channels(exported: ModelConfig) -> list[int]:
    """Return the channel of the other pairing for each channel of a head of `exported`."""
    rotated = exported.rotary_channels
    pairs = torch.arange(rotated).view(2, -1)  # as halves: pair p is channels p and p + half
    assert isinstance(exported.position, RopeConfig)
    if exported.position.pairing == "neighbours":
        channels = pairs.T.flatten()
    else:
        channels = torch.arange(rotated).view(-1, 2).T.flatten()
    return [*channels.tolist(), *range(rotated, exported.head_dim)]
