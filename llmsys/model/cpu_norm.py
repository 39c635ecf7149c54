"""RMSNorm for bfloat16 on the CPU, forward and backward, a few rows at a time.

torch composes it there from seven operations, each of which writes a float32 tensor as large as the activations and,
in a large model, asks the system for its pages. Here the float32 copies are as small as the cache.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# N rows, D width

ELEMENTS = 1 << 18  # of one piece: a MiB in float32, which the second cache of a core holds


def is_cpu_norm_supported(x: Tensor, weight: Tensor) -> bool:
    """Whether this path applies: bfloat16 on the CPU, both, and neither a tensor spread over processes."""
    plain = not (hasattr(x, "to_local") or hasattr(weight, "to_local"))
    return plain and x.device.type == "cpu" and x.dtype == weight.dtype == torch.bfloat16


def compute_rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dim, computed in float32; shape and dtype of `x`."""
    y_ND: Tensor = _RmsNormFunction.apply(x.reshape(-1, x.shape[-1]), weight_D, eps)  # type: ignore[no-untyped-call]
    return y_ND.view(x.shape)


class _RmsNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        y_ND, weight = torch.empty_like(x_ND), weight_D.float()
        scale_N1 = x_ND.new_empty(len(x_ND), 1, dtype=torch.float32)
        for rows in _iter_row_slices(x_ND):
            x = x_ND[rows].float()
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            scale = torch.rsqrt(norm.square_().div_(x.shape[1]).add_(eps), out=scale_N1[rows])
            y_ND[rows] = x.mul_(scale).mul_(weight)
        ctx.save_for_backward(x_ND, weight_D, scale_N1)
        return y_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        # With s the scale and g = weight * dy: dx = s g − x s³ (g · x) / D, and dweight = the sum of dy x s over rows.
        x_ND, weight_D, scale_N1 = ctx.saved_tensors
        dx_ND, weight = torch.empty_like(x_ND), weight_D.float()
        dweight_D = torch.zeros_like(weight)
        for rows in _iter_row_slices(x_ND):
            x, dy, scale = x_ND[rows].float(), gradients[0][rows].float(), scale_N1[rows]
            product = dy * x
            dweight_D.addmv_(product.T, scale[:, 0])
            inner = torch.mv(product, weight)[:, None].mul_(scale.pow(3)).div_(x.shape[1])
            dx_ND[rows] = dy.mul_(weight).mul_(scale).sub_(x.mul_(inner))
        return dx_ND, dweight_D.to(weight_D.dtype), None


def _iter_row_slices(x_ND: Tensor) -> Iterator[slice]:
    size = max(1, ELEMENTS // x_ND.shape[1])
    for start in range(0, len(x_ND), size):
        yield slice(start, start + size)
