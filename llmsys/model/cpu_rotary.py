"""Rotation of queries and keys for bfloat16 on the CPU, forward and backward, one sequence at a time.

Composed from torch's operations it writes four float32 tensors as large as the queries, and autograd three more. Here
the float32 copies are those of a piece that stays in cache, and nothing is kept for the backward but the table.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# B rows, T positions, H heads, R rotated channels of a head

ELEMENTS = 1 << 18  # of one piece: a MiB in float32, which the second cache of a core holds


def is_cpu_rotary_supported(x_BTHR: Tensor, cos_T1R: Tensor) -> bool:
    """Whether this path applies: bfloat16 on the CPU, and one table for all rows."""
    return x_BTHR.device.type == "cpu" and x_BTHR.dtype == torch.bfloat16 and cos_T1R.dim() == 3


def rotate_halves(x_BTHR: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """x * cos + roll(x, R / 2) * sin over the last dim, in float32; shape and dtype of `x_BTHR`."""
    y_BTHR: Tensor = _HalfRotationFunction.apply(x_BTHR, cos_T1R, sin_T1R)  # type: ignore[no-untyped-call]
    return y_BTHR


class _HalfRotationFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTHR: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
        ctx.save_for_backward(cos_T1R, sin_T1R)
        return _apply_rotation(x_BTHR, cos_T1R, sin_T1R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # Of y_i = x_i cos_i + x_j sin_i, with j the partner of i, the transpose: dx_i = dy_i cos_i + dy_j sin_j.
        cos_T1R, sin_T1R = ctx.saved_tensors
        return _apply_rotation(gradients[0], cos_T1R, sin_T1R.roll(sin_T1R.shape[-1] // 2, dims=-1)), None, None


def _apply_rotation(x_BTHR: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    y_BTHR = torch.empty(x_BTHR.shape, dtype=x_BTHR.dtype)
    half, size = x_BTHR.shape[-1] // 2, max(1, ELEMENTS // math.prod(x_BTHR.shape[2:]))
    for start in range(0, x_BTHR.shape[1], size):
        piece = slice(start, start + size)
        cos, sin = cos_T1R[piece], sin_T1R[piece]
        for x, y in zip(x_BTHR[:, piece], y_BTHR[:, piece], strict=True):
            x = x.float()
            rotated = x * cos
            rotated[..., :half].addcmul_(x[..., half:], sin[..., :half])
            rotated[..., half:].addcmul_(x[..., :half], sin[..., half:])
            y.copy_(rotated)
    return y_BTHR
