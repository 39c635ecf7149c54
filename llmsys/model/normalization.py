"""Normalization layers: RMSNorm and LayerNorm, built from `model.norm` of the config.

Both compute in float32 and return the dtype of their input, so they are safe under bfloat16
weights.
"""

from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.model import ModelConfig
from llmsys.config.norm import LayerNormConfig, RmsNormConfig
from llmsys.model import cpu_kernels


class RMSNorm(nn.Module):
    """weight · x / sqrt(mean(x²) + eps) over the last dim (Zhang and Sennrich 2019,
    arXiv:1910.07467).

    With `unit_offset` the factor is 1 + weight, so that weight decay pulls it towards 1 (Gemma).
    """

    def __init__(self, width: int, eps: float, *, unit_offset: bool = False) -> None:
        """Build the weight, whose initial factor is 1.

        Args:
            width: Size of the last dim of the input.
            eps: Added to the mean of squares.
            unit_offset: Store the factor minus 1, as Gemma does: the weight begins at 0.
        """
        super().__init__()
        self.eps = eps
        self.unit_offset = unit_offset
        self.weight = nn.Parameter(torch.zeros(width) if unit_offset else torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dim.

        Args:
            x: values, (..., channels).

        Returns:
            Same shape and dtype as `x`.
        """
        if self.unit_offset:
            # 1 + weight in float32: bfloat16 would round a small weight away.
            return F.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).to(
                x.dtype
            )
        if cpu_kernels.is_cpu_norm_supported(x, self.weight):
            return cpu_kernels.compute_rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        """Return the width and eps that `print(module)` shows."""
        return (
            f"{self.weight.shape[0]}, "
            f"eps={self.eps}{', unit_offset=True' if self.unit_offset else ''}"
        )


def build_norm(config: ModelConfig, width: int) -> nn.Module:
    """Build the norm of `model.norm`.

    Args:
        config: The model.
        width: Features that are normalized together.

    Returns:
        An RMSNorm or LayerNorm; maps (..., width) to the same shape.
    """
    match config.norm:
        case RmsNormConfig() as norm:
            return RMSNorm(width, norm.eps, unit_offset=norm.unit_offset)
        case LayerNormConfig() as norm:
            return nn.LayerNorm(width, eps=norm.eps, bias=norm.bias)
        case unreachable:
            assert_never(unreachable)
