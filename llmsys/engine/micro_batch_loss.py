"""The loss that an engine sends backward for one micro-batch: head loss, multi-token prediction,
load balancing.

In a pipeline each stage adds the auxiliary losses of its own layers; they need no way to the last
stage.

Invariants:
- All are sums over this micro-batch, divided by the counts of the step over all ranks, so gradients
  add up over micro-batches and ranks without another factor.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from llmsys.data.batch import IGNORED, Batch
from llmsys.engine.engine import Loss
from llmsys.model.host_read import is_on_host
from llmsys.model.output_head import get_next_sentence_head
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
    **stage: Any,
) -> tuple[Tensor, Tensor]:
    """Return this micro-batch's share of the step's loss, for backward, and its sum over targets in
    nats, for the log.

    Args:
        model: The model.
        forward: Runs `model`, possibly inside a wrapper.
        batch: The micro-batch.
        loss: The loss at the head.
        counts: Counts of the step, see `reduce_token_counts`.
        sharding: With it, `model` returns hidden states of this rank's positions, and both results
            are their share.
        stage: `layers` and `hidden_BTD` of `Transformer.forward`, for the last stage of a pipeline.
    """

    def compute_head_loss(head: nn.Module | None, x_BTD: Tensor, places: int) -> Tensor:
        targets_BT = shift_targets(batch, places)
        targets_BT = targets_BT if sharding is None else sharding.shard_targets(targets_BT, batch)
        # The loss of the run has no part of multi-token prediction.
        recorded = batch.target_documents if places == 0 else None
        spans_BT = None
        if recorded is not None:
            spans_BT = recorded.spans_BT
            spans_BT = spans_BT if sharding is None else sharding.shard_positions(spans_BT)
        # On the host the loss selects the rows (train/cross_entropy.py).
        if head is not None and not is_on_host(x_BTD):
            max_valid = batch.num_valid_targets
            if spans_BT is not None:
                spans_BT = select_valid_spans(spans_BT, targets_BT, max_valid)
            x_BTD, targets_BT = select_valid_positions(x_BTD, targets_BT, max_valid)
        if recorded is None or spans_BT is None:
            return loss(head, x_BTD, targets_BT)
        losses_BT = torch.zeros(targets_BT.shape, dtype=torch.float32, device=targets_BT.device)
        nats = loss(head, x_BTD, targets_BT, losses_BT)
        valid_N = targets_BT.flatten() != IGNORED
        recorded.sums.add_losses(losses_BT.flatten(), valid_N, spans_BT.flatten())
        return nats

    nats = forward(**batch.to_model_inputs(), finish=compute_head_loss, **stage)
    total = nats + compute_mtp_loss(model)
    auxiliary = model.compute_auxiliary_share(counts[1], counts[2], stage.get("layers"))
    if batch.next_sentence_B is not None:
        auxiliary = auxiliary + get_next_sentence_head(model).take_loss() / counts[3]
    return total / counts[0] + auxiliary, nats.detach()


def compute_stage_output(
    model: Transformer,
    forward: Callable[..., Tensor],
    batch: Batch,
    counts: Tensor,
    scale: float,
    **stage: Any,
) -> Tensor:
    """Return the hidden states that a stage before the last one sends on, with its auxiliary losses
    attached.

    Args:
        model: The model.
        forward: Runs `model`, possibly inside a wrapper.
        batch: The micro-batch.
        counts: Counts of the step, see `reduce_token_counts`.
        scale: The loss scale.
        stage: `layers` and `hidden_BTD` of `Transformer.forward`.

    Returns:
        (B, T, D); in its backward pass these losses, times `scale`, get the gradient 1.
    """
    x_BTD = forward(**batch.to_model_inputs(), **stage).contiguous()
    if not model.list_auxiliary_layers(stage["layers"]):
        return x_BTD
    share = model.compute_auxiliary_share(counts[1], counts[2], stage["layers"]) * scale
    attached: Tensor = _LossAttachment.apply(x_BTD, share)  # type: ignore[no-untyped-call]
    return attached


class _LossAttachment(torch.autograd.Function):
    """Hidden states, unchanged, whose backward pass also begins that of a loss (Megatron's
    MoEAuxLossAutoScaler).
    """

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, loss: Tensor) -> Tensor:
        return x_BTD.view_as(x_BTD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones((), device=gradients[0].device)


def select_valid_positions(
    x_BTD: Tensor, targets_BT: Tensor, max_valid: int
) -> tuple[Tensor, Tensor]:
    """Leave out positions without a target, without waiting for a device to say which: shapes
    follow from `max_valid`.

    Args:
        x_BTD: Hidden states.
        targets_BT: Targets, or IGNORED.
        max_valid: Number of valid targets, or more. It is rounded up to a sixteenth of the
            positions: few shapes.

    Returns:
        (1, N, D) and (1, N): all valid positions in their order, then position 0 with targets
        IGNORED. The arguments themselves where nothing can be left out.
    """
    if (index_N := _find_valid_positions(targets_BT, max_valid)) is None:
        return x_BTD, targets_BT
    place_N = index_N.clamp(min=0)
    targets_N = targets_BT.flatten().index_select(0, place_N).where(index_N >= 0, IGNORED)
    return x_BTD.flatten(0, 1).index_select(0, place_N)[None], targets_N[None]


def select_valid_spans(spans_BT: Tensor, targets_BT: Tensor, max_valid: int) -> Tensor:
    """Select the spans of the targets that `select_valid_positions` returns.

    Args:
        spans_BT: Span of each target.
        targets_BT: Targets, or IGNORED.
        max_valid: As there.

    Returns:
        (1, N), in the order of the selected targets; `spans_BT` itself where all are.
    """
    if (index_N := _find_valid_positions(targets_BT, max_valid)) is None:
        return spans_BT
    return spans_BT.flatten().index_select(0, index_N.clamp(min=0))[None]


def _find_valid_positions(targets_BT: Tensor, max_valid: int) -> Tensor | None:
    """Return the positions with a target, then -1, (N,); None where nothing can be left out."""
    positions = targets_BT.numel()
    increment = max(1, positions // 16)
    # In steps of a sixteenth: few different shapes.
    size = -(-max_valid // increment) * increment
    if size >= positions:
        return None
    index_N1 = torch.nonzero_static(targets_BT.flatten() != IGNORED, size=size, fill_value=-1)
    return index_N1[:, 0]


def compute_mtp_loss(model: Transformer) -> Tensor:
    """Return the loss of multi-token prediction of the last forward pass.

    DeepSeek-V3 (arXiv:2412.19437, 2.2, equations 24 and 25): as there, the sum is divided by all
    targets later.

    Args:
        model: The model after a forward pass with a loss: `predicted` holds the loss of each
            module.

    Returns:
        The weighted mean over modules, summed over targets; 0 for a model without modules.
    """
    config = model.config.multi_token_prediction
    if config is None:
        return torch.zeros(())
    return config.weight * torch.stack(model.predicted).mean()


def shift_targets(batch: Batch, k: int) -> Tensor:
    """Return the targets k positions ahead.

    Args:
        batch: The batch.
        k: Positions beyond the next token.

    Returns:
        (B, T - k); IGNORED where they belong to another document.
    """
    targets_BT = batch.targets_BT[:, k:]
    if batch.documents_BT is None or not k:
        return targets_BT
    # Without numbers a window is one document.
    same_BT = batch.documents_BT[:, k:] == batch.documents_BT[:, : targets_BT.shape[1]]
    return targets_BT.where(same_BT, torch.full_like(targets_BT, IGNORED))
