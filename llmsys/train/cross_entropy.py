"""Cross entropy as sums in nats, also fused with the output head, without holding all logits.

Fused: tokens × vocabulary is the largest activation of a model with a large vocabulary (16 GiB for
32k tokens and 256k pieces in bfloat16). Only valid targets are computed, one block of rows at a
time: logits, their loss, and at once the gradients of hidden states and weight. No second pass over
the logits is needed, because training asks for a sum, whose gradient is each token's gradient times
one number. An encoder that fills masks computes a seventh of its logits; on accelerators
llmsys/engine/micro_batch_loss.py selects those rows.

The caller divides once by the valid targets of all ranks.

`cross_entropy(logits.float())` writes three float32 tensors of tokens × vocabulary. Here a few rows
at a time stay in cache, and the forward pass computes the gradient in the dtype of the logits: 3.7
times as fast on one core with 4,096 tokens and a vocabulary of 8,192 (tools/bench/loss.py). On
accelerators one kernel does it (cross_entropy_kernel.py).

Invariants:
- The loss equals that of unfused logits.
"""

from typing import Any, assert_never

import torch
from torch import Tensor, nn

from llmsys.config.objective import LossConfig
from llmsys.data.batch import IGNORED
from llmsys.engine.engine import Loss
from llmsys.model.host_read import is_on_host
from llmsys.model.output_head import LmHead, MlmHead

# N tokens, V vocabulary
LOGITS_ON_CPU = 1 << 19  # 2 MiB of float32, which stay in cache


def compute_sequence_losses(
    logits_BTV: Tensor,
    targets_BT: Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    losses_BT: Tensor | None = None,
) -> Tensor:
    """Return the cross entropy in nats, summed over the valid targets of each sequence.

    A classifier's logits (B, V) with targets (B, 1) count as sequences of one.

    Args:
        logits_BTV: any float dtype; they are summed in float32.
        targets_BT: classes, or IGNORED.
        label_smoothing: ε. The target distribution is 1 - ε for the true class and ε / (V - 1) for
            each other class.
        z_loss: weight of the squared log-sum-exp of each token's logits (PaLM, arXiv:2204.02311,
            5), added to its loss.
        losses_BT: float32, filled with the loss of each target.

    Returns:
        float32 (B,).
    """
    flat = logits_BTV.flatten(0, -2), targets_BT.flatten()
    losses_N: Tensor = _TokenLosses.apply(*flat, label_smoothing, z_loss)  # type: ignore[no-untyped-call]
    if losses_BT is not None:
        losses_BT.copy_(losses_N.detach().view(targets_BT.shape))
    return losses_N.view(targets_BT.shape).sum(1)


def compute_token_losses(
    logits_NV: Tensor,
    targets_N: Tensor,
    smoothing: float,
    z_weight: float,
    gradient_NV: Tensor | None = None,
) -> Tensor:
    """Return the loss of each token, float32 (N,), 0 where the target is IGNORED. Without autograd.

    Args:
        logits_NV: any float dtype.
        targets_N: classes, or IGNORED.
        smoothing: label smoothing ε.
        z_weight: weight of the z loss.
        gradient_NV: filled with the gradient of the sum of losses; may be `logits_NV` itself.
    """
    # target probability of each class but the true one
    other = smoothing / max(logits_NV.shape[1] - 1, 1)
    extra = 1 - smoothing - other  # target probability of the true one beyond that
    if logits_NV.device.type == "cuda":
        nats_N: Tensor = _compute_on_accelerator(
            logits_NV, targets_N, other, extra, z_weight, gradient_NV
        )
        return nats_N
    losses_N = torch.empty(len(logits_NV), dtype=torch.float32, device=logits_NV.device)
    valid_N1 = (targets_N != IGNORED)[:, None]
    index_N1 = targets_N[:, None].where(valid_N1, 0)
    num_rows = max(8, LOGITS_ON_CPU // logits_NV.shape[1])
    for start in range(0, len(logits_NV), num_rows):
        rows = slice(start, start + num_rows)
        # A copy also of float32 logits: it is overwritten.
        logits = logits_NV[rows].to(torch.float32, copy=True)
        index = index_N1[rows]
        valid = valid_N1[rows].float()
        chosen = logits.gather(1, index)
        top = logits.amax(-1, keepdim=True)
        all_others = other * logits.sum(-1, keepdim=True) if smoothing else 0.0
        # In place on the float32 copy: no further block of rows × vocabulary.
        exponentials = logits.sub_(top).exp_()
        total = exponentials.sum(-1, keepdim=True)
        # The log-sum-exp, as in the z loss.
        z = total.log() + top
        losses_N[rows] = ((z - extra * chosen - all_others + z_weight * z * z) * valid)[:, 0]
        if gradient_NV is not None:  # softmax · (1 + 2 · weight · z) − target distribution
            exponentials.mul_(valid * (1 + 2 * z_weight * z) / total)
            if smoothing:
                exponentials.sub_(other * valid)
            gradient_NV[rows] = exponentials.scatter_add_(1, index, -extra * valid)
        # Or the next rows' copy would be held at the same time: 4.6 GiB for 8,192 rows of 150k.
        del logits, exponentials
    return losses_N


# A custom op, so that fake tensors pass.
@torch.library.custom_op("llmsys::token_losses", mutates_args=("gradient_NV",))
def _compute_on_accelerator(
    logits_NV: Tensor,
    targets_N: Tensor,
    other: float,
    extra: float,
    z_weight: float,
    gradient_NV: Tensor | None,
) -> Tensor:
    # Not at the top: CPU wheels do not bring triton.
    from llmsys.train.cross_entropy_kernel import run_token_losses

    return run_token_losses(logits_NV, targets_N, other, extra, z_weight, IGNORED, gradient_NV)


@_compute_on_accelerator.register_fake
def _(logits_NV: Tensor, *others: Tensor | float | None) -> Tensor:
    return logits_NV.new_empty(len(logits_NV), dtype=torch.float32)


class _TokenLosses(torch.autograd.Function):
    """Autograd for `compute_token_losses`, with the gradient computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, smoothing: float, z_weight: float
    ) -> Tensor:
        gradient_NV = torch.empty_like(logits_NV) if ctx.needs_input_grad[0] else None
        ctx.gradient_NV = gradient_NV
        return compute_token_losses(logits_NV, targets_N, smoothing, z_weight, gradient_NV)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient_NV = ctx.gradient_NV
        ctx.gradient_NV = None
        if gradient_NV is None:
            raise RuntimeError(
                "the gradient of the loss was consumed by its first backward; call the loss again"
            )
        return gradient_NV.mul_(gradients[0][:, None].to(gradient_NV.dtype)), None, None, None


# B rows, T positions, D width, N valid targets, V vocabulary

# Bytes of one block of logits, large enough that adding the weight's gradients costs little.
LOGITS_BYTES_ON_CPU = 1 << 28
LOGITS_BYTES_ON_ACCELERATOR = 1 << 29
TILE_ROWS = 128


def compute_linear_cross_entropy(
    head: LmHead | MlmHead,
    x_BTD: Tensor,
    targets_BT: Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    losses_BT: Tensor | None = None,
) -> Tensor:
    """Return the loss of `head(x_BTD)` summed over all valid targets, a float32 scalar.

    Args:
        head: output head; its weight is (V, D).
        x_BTD: hidden states.
        targets_BT: classes, or IGNORED.
        label_smoothing: see `compute_sequence_losses`.
        z_loss: see `compute_sequence_losses`.
        losses_BT: float32 zeros, filled with the loss of each valid target.
    """
    # Indexing with a mask makes the host wait for an accelerator. There the engine has left out
    # most rows without a target, and the loss masks the others.
    rows = targets_BT != IGNORED if is_on_host(x_BTD) else slice(None)
    x_ND = head.prepare_hidden(x_BTD[rows].reshape(-1, x_BTD.shape[-1]))
    targets_N = targets_BT[rows].flatten()
    fixed_V: Tensor | None = None
    softcap: float | None = None
    match head:
        case LmHead():
            fixed_V = head.fixed_bias_V if head.has_fixed_bias else None
            softcap = head.softcap
        case MlmHead():
            pass
        case unreachable:
            assert_never(unreachable)
    losses_N = (
        None
        if losses_BT is None
        else torch.empty(len(targets_N), dtype=torch.float32, device=targets_N.device)
    )
    arguments = x_ND, head.weight, head.bias, fixed_V, targets_N, label_smoothing, z_loss, softcap
    loss: Tensor = _LinearCrossEntropy.apply(*arguments, losses_N)  # type: ignore[no-untyped-call]
    if losses_BT is not None and losses_N is not None:
        losses_BT[rows] = losses_N if is_on_host(x_BTD) else losses_N.view(losses_BT.shape)
    return loss


def build_training_loss(config: LossConfig) -> Loss:
    """Return the loss of training. Evaluation uses `compute_sequence_losses` without smoothing and
    z loss.

    Args:
        config: label smoothing and z loss.

    Returns:
        A function of the head, the last states (B, T, D) and the targets (B, T), which sums the
        losses of all targets; without a head the states are logits.
    """
    weights = config.label_smoothing, config.z_loss

    def compute_loss(
        head: nn.Module | None,
        x_BTD: Tensor,
        targets_BT: Tensor,
        losses_BT: Tensor | None = None,
        /,
    ) -> Tensor:
        if isinstance(head, LmHead | MlmHead):
            return compute_linear_cross_entropy(head, x_BTD, targets_BT, *weights, losses_BT)
        return compute_sequence_losses(x_BTD, targets_BT, *weights, losses_BT).sum()

    return compute_loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum over tokens, with the gradients computed in the forward pass and scaled in the
    backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        fixed_V: Tensor | None,
        targets_N: Tensor,
        smoothing: float,
        z_weight: float,
        softcap: float | None,
        losses_N: Tensor | None,
    ) -> Tensor:
        needs_gradient = any(ctx.needs_input_grad[:3])
        total = torch.zeros((), dtype=torch.float32, device=x_ND.device)
        dx_ND = torch.empty_like(x_ND) if needs_gradient else None
        dweight_VD = None
        dbias_V = None
        blocks = _list_row_blocks(x_ND, len(weight_VD))
        for rows in blocks:
            logits = _compute_logits(x_ND[rows], weight_VD, bias_V, fixed_V, softcap)
            # d/dx of cap · tanh(x / cap) is 1 − tanh²; computed before the logits are overwritten.
            softcap_slope = (
                None if softcap is None or not needs_gradient else 1 - (logits / softcap).square_()
            )
            # The gradient overwrites the logits, which saves one block of memory.
            losses = compute_token_losses(
                logits, targets_N[rows], smoothing, z_weight, logits if needs_gradient else None
            )
            if losses_N is not None:
                losses_N[rows] = losses
            total += losses.sum()
            if dx_ND is None:
                continue
            gradient = logits if softcap_slope is None else logits.mul_(softcap_slope)
            torch.mm(gradient, weight_VD, out=dx_ND[rows])
            dweight_VD = _add_product(dweight_VD, gradient.T, x_ND[rows], len(blocks))
            if bias_V is not None:
                dbias_V = _add_block(dbias_V, gradient.sum(0, dtype=torch.float32), len(blocks))
        ctx.gradients = (dx_ND, dweight_VD, dbias_V)
        ctx.dtypes = (weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Freed at once, and scaled in place: so a second backward is not possible.
        dx_ND, dweight_VD, dbias_V = ctx.gradients
        ctx.gradients = (None, None, None)
        if dx_ND is None or dweight_VD is None:
            raise RuntimeError(
                "the gradient of the loss was consumed by its first backward; call the loss again"
            )
        factor = gradients[0]
        weight_dtype, bias_dtype = ctx.dtypes
        dweight_VD = _scale(dweight_VD, factor, weight_dtype)
        dbias_V = None if dbias_V is None else dbias_V.mul_(factor).to(bias_dtype)
        return dx_ND.mul_(factor.to(dx_ND.dtype)), dweight_VD, dbias_V, *[None] * 6


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, num_blocks: int) -> Tensor:
    """Return the sum so far plus a matrix product of one more block, in float32 where there are
    several.
    """
    if a.device.type != "cuda" or num_blocks == 1:
        return _add_block(total, a @ b, num_blocks)
    # The product is added where it is made, in float32: no block's part in 16 bits, and no pass to
    # add it.
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def _scale(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return total · factor in a dtype. Overwrites `total`, except on accelerators that convert
    in the same pass.
    """
    if total.device.type != "cuda" or total.dtype == dtype:
        return total.mul_(factor).to(dtype)
    return torch.mul(total, factor, out=torch.empty_like(total, dtype=dtype))


def _add_block(total: Tensor | None, part: Tensor, num_blocks: int) -> Tensor:
    """Return the sum so far plus one more block, in float32 where there are several."""
    if total is not None:
        return total.add_(part)
    # In bfloat16 small blocks would be lost in a large sum. At once: a sum that is converted at the
    # second block would exist twice, next to that block.
    return part if num_blocks == 1 else part.float()


def _list_row_blocks(x_ND: Tensor, vocabulary: int) -> list[slice]:
    """Return slices of at least 16 rows whose logits fill one block."""
    on_cpu = x_ND.device.type == "cpu"
    rows = (LOGITS_BYTES_ON_CPU if on_cpu else LOGITS_BYTES_ON_ACCELERATOR) // (
        vocabulary * x_ND.element_size()
    )
    # Whole tiles of matrix products on accelerators.
    rows = max(16, rows if on_cpu or rows < TILE_ROWS else rows // TILE_ROWS * TILE_ROWS)
    # One empty block without targets, so that the weight gets a gradient of zeros.
    return [slice(start, start + rows) for start in range(0, max(len(x_ND), 1), rows)]


def _compute_logits(
    x_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    fixed_V: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Return the head's logits for some rows, valid until the next call."""
    logits_NV = torch.mm(x_ND, weight_VD.T, out=_get_logits_buffer(len(x_ND), len(weight_VD), x_ND))
    for bias in (bias_V, fixed_V):
        if bias is not None:
            logits_NV += bias.to(logits_NV.dtype)
    return logits_NV if softcap is None else logits_NV.div_(softcap).tanh_().mul_(softcap)


_logits_buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}


def _get_logits_buffer(rows: int, columns: int, like: Tensor) -> Tensor:
    """Return memory for one block of logits, reused between steps on the CPU.

    New memory costs a page fault for every 4 KiB on a CPU: a quarter of the time of the matmul that
    fills it. Accelerators have allocators that keep theirs.
    """
    if like.device.type != "cpu":
        return like.new_empty(rows, columns)
    buffer = _logits_buffers.get((like.device, like.dtype))
    if buffer is None or buffer.numel() < rows * columns:
        buffer = _logits_buffers[like.device, like.dtype] = like.new_empty(rows * columns)
    return buffer[: rows * columns].view(rows, columns)
