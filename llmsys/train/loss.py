"""Losses return sums; whoever knows all ranks' targets divides once."""

import torch
from torch import Tensor

from llmsys.data.batch import IGNORED


def sequence_losses(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Cross entropy in nats, summed over the valid targets of each sequence: float32, one number for each of B."""
    losses_BT = torch.nn.functional.cross_entropy(
        logits_BTV.float().flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(targets_BT.shape)
    return losses_BT.sum(1)
