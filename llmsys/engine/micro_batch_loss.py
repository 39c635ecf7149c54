"""What an engine sends backward for one micro-batch: the loss, that of further tokens, and the experts' balance.

Sums over this micro-batch, divided by the counts of the whole step over all ranks; so gradients add up over
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
    """(this micro-batch's share of the step's loss, to go backward; its plain sum over targets, for the log).

    `forward` runs `model`, perhaps inside a wrapper. `counts` are those of the step, see `reduce_token_counts`. With
    `parts`, `model` gives hidden states of this rank's positions, whose share this then is.
    """

    def compute_head_loss(head: nn.Module | None, x_BTD: Tensor, places: int) -> Tensor:
        targets_BT = shift_targets(batch, places)
        return loss(head, x_BTD, targets_BT if sharding is None else sharding.shard_targets(targets_BT, batch))

    nats = forward(**batch.to_model_inputs(), finish=compute_head_loss)
    learnt = nats + compute_mtp_loss(model)
    return learnt / counts[0] + model.compute_auxiliary_share(counts[1], counts[2]), nats.detach()


def compute_mtp_loss(model: Transformer) -> Tensor:
    """The weighted mean over modules of the loss on the token k places further; 0 for a model without modules.

    DeepSeek-V3 (arXiv:2412.19437, 2.2, equations 24 and 25): like there, the sum is divided by all targets later.
    """
    config = model.config.multi_token_prediction
    if config is None:
        return torch.zeros((), device=model.embed.weight.device)
    return config.weight * torch.stack(model.predicted).mean()


def shift_targets(batch: Batch, k: int) -> Tensor:
    """The targets k places further, (B, T - k); IGNORED where those belong to another document."""
    targets_BT = batch.targets_BT[:, k:]
    if batch.documents_BT is None or not k:
        return targets_BT
    same_BT = batch.documents_BT[:, k:] == batch.documents_BT[:, : targets_BT.shape[1]]
    return targets_BT.where(same_BT, torch.full_like(targets_BT, IGNORED))
