"""Cross entropy as sums in nats; the caller divides once by the valid targets of all ranks.

`cross_entropy(logits.float())` writes three float32 tensors of tokens × vocabulary. Here a few rows at a time stay in
cache, and the forward pass computes the gradient in the dtype of the logits: 3.7 times as fast on one core with 4,096
tokens and a vocabulary of 8,192 (tools/bench/loss.py).
"""

from typing import Any

import torch
from torch import Tensor

from llmsys.data.batch import IGNORED

# N tokens, V vocabulary
LOGITS_ON_CPU, ROWS_ON_ACCELERATOR = 1 << 19, 8_192  # on the CPU 2 MiB of float32, which stay in cache


def compute_sequence_losses(
    logits_BTV: Tensor, targets_BT: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Return the cross entropy in nats, summed over the valid targets of each sequence.

    A classifier's logits (B, V) with targets (B, 1) count as sequences of one.

    Args:
        logits_BTV: any float dtype; they are summed in float32.
        targets_BT: classes, or IGNORED.
        label_smoothing: ε. The target distribution is 1 - ε for the true class and ε / (V - 1) for each other class.
        z_loss: weight of the squared log-sum-exp of each token's logits (PaLM, arXiv:2204.02311, 5), added to its loss.

    Returns:
        float32 (B,).
    """
    flat = logits_BTV.flatten(0, -2), targets_BT.flatten()
    losses_N: Tensor = _TokenLosses.apply(*flat, label_smoothing, z_loss)  # type: ignore[no-untyped-call]
    return losses_N.view(targets_BT.shape).sum(1)


def compute_token_losses(
    logits_NV: Tensor, targets_N: Tensor, smoothing: float, z_weight: float, gradient_NV: Tensor | None = None
) -> Tensor:
    """Return the loss of each token, float32 (N,), 0 where the target is IGNORED. Without autograd.

    Args:
        logits_NV: any float dtype.
        targets_N: classes, or IGNORED.
        smoothing: label smoothing ε.
        z_weight: weight of the z loss.
        gradient_NV: filled with the gradient of the sum of losses; may be `logits_NV` itself.
    """
    other = smoothing / max(logits_NV.shape[1] - 1, 1)  # target probability of each class but the true one
    extra = 1 - smoothing - other  # target probability of the true one beyond that
    losses_N = torch.empty(len(logits_NV), dtype=torch.float32, device=logits_NV.device)
    valid_N1 = (targets_N != IGNORED)[:, None]
    index_N1 = targets_N[:, None].where(valid_N1, 0)
    on_cpu = logits_NV.device.type == "cpu"
    num_rows = max(8, LOGITS_ON_CPU // logits_NV.shape[1]) if on_cpu else ROWS_ON_ACCELERATOR
    for start in range(0, len(logits_NV), num_rows):
        rows = slice(start, start + num_rows)
        logits = logits_NV[rows].to(torch.float32, copy=True)
        index, valid = index_N1[rows], valid_N1[rows].float()
        chosen, top = logits.gather(1, index), logits.amax(-1, keepdim=True)
        all_others = other * logits.sum(-1, keepdim=True) if smoothing else 0.0
        # In place on the float32 copy: no further block of rows × vocabulary.
        exponentials = logits.sub_(top).exp_()
        total = exponentials.sum(-1, keepdim=True)
        z = total.log() + top
        losses_N[rows] = ((z - extra * chosen - all_others + z_weight * z * z) * valid)[:, 0]
        if gradient_NV is not None:  # softmax · (1 + 2 · weight · z) − target distribution
            softmax = exponentials.mul_(valid * (1 + 2 * z_weight * z) / total)
            if smoothing:
                softmax.sub_(other * valid)
            gradient_NV[rows] = softmax.scatter_add_(1, index, -extra * valid)
    return losses_N


class _TokenLosses(torch.autograd.Function):
    """Autograd for `compute_token_losses`, with the gradient computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, smoothing: float, z_weight: float) -> Tensor:
        gradient_NV = torch.empty_like(logits_NV) if ctx.needs_input_grad[0] else None
        ctx.gradient_NV = gradient_NV
        return compute_token_losses(logits_NV, targets_N, smoothing, z_weight, gradient_NV)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient_NV, ctx.gradient_NV = ctx.gradient_NV, None
        if gradient_NV is None:
            raise RuntimeError("the gradient of the loss was consumed by its first backward; call the loss again")
        return gradient_NV.mul_(gradients[0][:, None].to(gradient_NV.dtype)), None, None, None
