"""The dense feed-forward layer: SwiGLU with three matrices, or GELU or ReLU with two. No biases.

Also serves as the shared expert of a mixture-of-experts layer.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map the last dim, of size hidden_size, to itself."""
        hidden: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return hidden


class TwoLayer(nn.Module):
    """down(f(up(x))) with f = ReLU (Vaswani 2017, section 3.3) or the exact GELU (Hendrycks and Gimpel 2016)."""

    def __init__(self, hidden_size: int, intermediate_size: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map the last dim, of size hidden_size, to itself."""
        up = self.up_proj(x)
        hidden: Tensor = self.down_proj(F.relu(up) if self.kind == "relu" else F.gelu(up))
        return hidden


def build_feed_forward(kind: str, hidden_size: int, intermediate_size: int) -> nn.Module:
    """The layer for `model.feed_forward.kind`: "swiglu", "gelu" or "relu"."""
    if kind == "swiglu":
        return SwiGLU(hidden_size, intermediate_size)
    return TwoLayer(hidden_size, intermediate_size, kind)
