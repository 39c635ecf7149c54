"""Normalisation layers: RMSNorm and LayerNorm, built from `model.norm` of the configuration.

Both compute in float32 and return the dtype of their input, so they are safe under bfloat16 weights.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.model import ModelConfig


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) over the last dim (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim; same shape and dtype as `x`."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        """Width and eps, for printing the module."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


def build_norm(config: ModelConfig, width: int) -> nn.Module:
    """The normalisation that `config.norm` asks for, over `width` features."""
    if config.norm.kind == "layernorm":
        return nn.LayerNorm(width, eps=config.norm.eps)
    return RMSNorm(width, config.norm.eps)
