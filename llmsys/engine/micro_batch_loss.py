"""The loss that an engine sends backward for one micro-batch: head loss, multi-token prediction, load balancing.

Invariants:
- All are sums over this micro-batch, divided by the counts of the step over all ranks, so gradients add up over
  micro-batches and ranks without another factor.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from llmsys.data.batch import IGNORED, Batch
from llmsys.engine.engine import Loss
from llmsys.model.transformer import Transformer
from llmsys.parallel.sequence_sharding import SequenceSharding

# B sequences, T positions, D width, k modules of multi-token prediction


def compute_loss_share(
    model: Transformer,
    forward: Callable[..., Tensor],
    batch: Batch,
    loss: Loss,
    counts: Tensor,
    sharding: SequenceSharding | None = None,
) -> tuple[Tensor, Tensor]:
    """Return this micro-batch's share of the step's loss, for backward, and its sum over targets in nats, for the log.

    Args:
        model: The model.
        forward: Runs `model`, possibly inside a wrapper.
        batch: The micro-batch.
        loss: The loss at the head.
        counts: Counts of the step, see `reduce_token_counts`.
        sharding: With it, `model` returns hidden states of this rank's positions, and both results are their share.
    """

    def compute_head_loss(head: nn.Module | None, x_BTD: Tensor, places: int) -> Tensor:
        targets_BT = shift_targets(batch, places)
        return loss(head, x_BTD, targets_BT if sharding is None else sharding.shard_targets(targets_BT, batch))

    nats = forward(**batch.to_model_inputs(), finish=compute_head_loss)
    total = nats + compute_mtp_loss(model)
    return total / counts[0] + model.compute_auxiliary_share(counts[1], counts[2]), nats.detach()


def compute_mtp_loss(model: Transformer) -> Tensor:
    """Return the weighted mean over modules of the multi-token prediction losses; 0 for a model without modules.

    DeepSeek-V3 (arXiv:2412.19437, 2.2, equations 24 and 25): as there, the sum is divided by all targets later.
    """
    config = model.config.multi_token_prediction
    if config is None:
        return torch.zeros((), device=model.embed.weight.device)
    return config.weight * torch.stack(model.predicted).mean()


def shift_targets(batch: Batch, k: int) -> Tensor:
    """Return the targets k positions ahead, (B, T - k); IGNORED where those belong to another document."""
    targets_BT = batch.targets_BT[:, k:]
    if batch.documents_BT is None or not k:
        return targets_BT
    # Without numbers a window is one document.
    same_BT = batch.documents_BT[:, k:] == batch.documents_BT[:, : targets_BT.shape[1]]
    return targets_BT.where(same_BT, torch.full_like(targets_BT, IGNORED))
