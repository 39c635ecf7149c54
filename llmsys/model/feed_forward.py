"""The dense feed-forward layer: two linear maps around an activation, or three with a gate (Shazeer 2020).

Also serves as the shared expert of a mixture-of-experts layer; routed experts use `apply_gated_activation` alone.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.feed_forward import Activation, ClampedSwigluConfig, FeedForwardConfig
from llmsys.model.dropout import apply_dropout

ACTIVATION_OF: dict[str, Activation] = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}


class FeedForward(nn.Module):
    """down(activation(gate(x), up(x))) over the last dim; without a gate down(activation(up(x)))."""

    def __init__(self, config: FeedForwardConfig, hidden_size: int, width: int, dropped: float = 0.0) -> None:
        super().__init__()
        self.config, self.dropped = config, dropped
        if config.is_gated:
            self.gate_proj = nn.Linear(hidden_size, width, bias=config.bias)
        self.up_proj = nn.Linear(hidden_size, width, bias=config.bias)
        self.down_proj = nn.Linear(width, hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map the last dim, of size hidden_size, to itself."""
        gate = self.gate_proj(x) if self.config.is_gated else None
        inner = apply_gated_activation(self.config, gate, self.up_proj(x))
        hidden: Tensor = self.down_proj(apply_dropout(inner, self.dropped, self.training))
        return hidden


def build_feed_forward(config: FeedForwardConfig, hidden_size: int, width: int, dropped: float = 0.0) -> FeedForward:
    """The layer for `model.feed_forward` (or `model.moe.expert`), `width` channels wide inside.

    `dropped` is the probability of dropping a channel inside, in training.
    """
    return FeedForward(config, hidden_size, width, dropped)


def apply_gated_activation(config: FeedForwardConfig, gate: Tensor | None, up: Tensor) -> Tensor:
    """What stands between the linear maps, element by element; `gate` is None where the kind has none."""
    if gate is None:
        return apply_activation(config.kind, up)
    if isinstance(config, ClampedSwigluConfig):
        gate, up = gate.clamp(max=config.limit), up.clamp(-config.limit, config.limit)
        return (up + 1) * (gate * (config.alpha * gate).sigmoid())
    return apply_activation(ACTIVATION_OF[config.kind], gate) * up


def apply_activation(kind: str, x: Tensor) -> Tensor:
    """ReLU, the exact GELU (Hendrycks and Gimpel 2016), its tanh form, or SiLU."""
    if kind == "relu":
        return F.relu(x)
    if kind == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
