"""Triton kernel of the cross entropy of rows of logits, with its gradient instead of the
logits.

Plain operations read and write a float32 copy of the logits eight times. Here a row is read twice,
the second time from the L2 cache, and written once, in the dtype of the logits.

Imported where the kernel runs: triton comes with torch's CUDA wheels only.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# N tokens, V vocabulary

# Logits that a program reads at a time.
BLOCK = 4096
OPTIONS = {"num_warps": 8, "num_stages": 1}


@triton.jit
def compute_row(
    logits, targets, losses, gradients, logits_row, gradients_row, num_columns, other, extra,
    z_weight,
    IGNORED: tl.constexpr, HAS_OTHER: tl.constexpr, HAS_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the loss of one row, and the gradient of its logits."""
    row = tl.program_id(0)
    # int64: 16,384 rows of 150,000 logits have more than 2**31 elements.
    logits += row.to(tl.int64) * logits_row
    target = tl.load(targets + row)
    is_valid = target != IGNORED
    highest = float("-inf")
    total = 0.0
    logits_sum = 0.0
    for begin in range(0, num_columns, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + columns, mask=columns < num_columns, other=float("-inf")).to(
            tl.float32
        )
        new_highest = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp(highest - new_highest) + tl.sum(tl.exp(x - new_highest), 0)
        highest = new_highest
        if HAS_OTHER:
            logits_sum += tl.sum(tl.where(columns < num_columns, x, 0.0), 0)
    z = tl.log(total) + highest
    chosen = tl.load(logits + tl.where(is_valid, target, 0)).to(tl.float32)
    loss = z - extra * chosen - other * logits_sum + z_weight * z * z
    tl.store(losses + row, tl.where(is_valid, loss, 0.0))
    if HAS_GRADIENT:
        gradients += row.to(tl.int64) * gradients_row
        factor = 1 + 2 * z_weight * z
        for begin in range(0, num_columns, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            x = tl.load(logits + columns, mask=columns < num_columns, other=float("-inf")).to(
                tl.float32
            )
            gradient = tl.exp(x - z) * factor - other - tl.where(columns == target, extra, 0.0)
            gradient = tl.where(is_valid, gradient, 0.0)
            tl.store(
                gradients + columns,
                gradient.to(gradients.dtype.element_ty),
                mask=columns < num_columns,
            )


def run_token_losses(
    logits_NV: Tensor, targets_N: Tensor, other: float, extra: float, z_weight: float, ignored: int,
    gradient_NV: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the loss of each token, float32 (N,), and fill the gradient.

    Args:
        logits_NV: any float dtype, contiguous in the last dim.
        targets_N: classes, or `ignored`.
        other: target probability of each class.
        extra: target probability of the true class beyond that.
        z_weight: weight of the squared log-sum-exp.
        ignored: target of a token without a loss.
        gradient_NV: filled with the gradient of the sum of losses; may be `logits_NV`.
    """
    losses_N = torch.empty(len(logits_NV), dtype=torch.float32, device=logits_NV.device)
    if not len(logits_NV):
        return losses_N
    gradient = logits_NV if gradient_NV is None else gradient_NV
    compute_row[(len(logits_NV),)](
        logits_NV, targets_N, losses_N, gradient, logits_NV.stride(0), gradient.stride(0),
        logits_NV.shape[1],
        other, extra, z_weight, ignored, other != 0, gradient_NV is not None, BLOCK, **OPTIONS,
    )  # fmt: skip
    return losses_N
