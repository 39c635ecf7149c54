"""The dense feed-forward layer: two linear layers around an activation, or three with a gate
(Shazeer 2020).

Also the shared expert of a mixture-of-experts layer. Routed experts use `apply_gated_activation`
alone.
"""

from typing import assert_never

import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.feed_forward import (
    Activation,
    ClampedSwigluConfig,
    FeedForwardConfig,
    GegluConfig,
    GegluTanhConfig,
    GeluConfig,
    GeluTanhConfig,
    ReluConfig,
    SiluConfig,
    SquaredReluConfig,
    SwigluConfig,
)
from llmsys.model.dropout import apply_dropout


class FeedForward(nn.Module):
    """down(activation(gate(x), up(x))) over the last dim; without a gate
    down(activation(up(x))).
    """

    def __init__(
        self, config: FeedForwardConfig, hidden_size: int, width: int, dropped: float = 0.0
    ) -> None:
        """Build the projections on the current default device.

        Args:
            config: Activation, gate and biases.
            hidden_size: Channels of input and output, D.
            width: Inner channels.
            dropped: Dropout probability of inner channels in training. Default: 0.
        """
        super().__init__()
        self.config = config
        self.dropped = dropped
        if config.is_gated:
            self.gate_proj = nn.Linear(hidden_size, width, bias=config.bias)
        self.up_proj = nn.Linear(hidden_size, width, bias=config.bias)
        self.down_proj = nn.Linear(width, hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map the last dim, of size hidden_size, to itself.

        Args:
            x: states, (..., D).

        Returns:
            Same shape and dtype as `x`.
        """
        gate = self.gate_proj(x) if self.config.is_gated else None
        inner = self.apply_activation(gate, self.up_proj(x))
        hidden: Tensor = self.down_proj(apply_dropout(inner, self.dropped, self.training))
        return hidden

    def apply_activation(self, gate: Tensor | None, up: Tensor) -> Tensor:
        """Return the element-wise operation between the projections.

        Args:
            gate: output of the gate projection; None for a kind without a gate.
            up: output of the up-projection, of the same shape.
        """
        return apply_gated_activation(self.config, gate, up)


def build_feed_forward(
    config: FeedForwardConfig, hidden_size: int, width: int, dropped: float = 0.0
) -> FeedForward:
    """Build the layer of `model.feed_forward`, or an expert of `model.moe.expert`.

    Args:
        config: Activation, gate and biases.
        hidden_size: Channels of input and output.
        width: Inner channels.
        dropped: Dropout probability of inner channels in training.

    Returns:
        The module; maps (..., hidden_size) to the same shape.
    """
    return FeedForward(config, hidden_size, width, dropped)


def apply_gated_activation(config: FeedForwardConfig, gate: Tensor | None, up: Tensor) -> Tensor:
    """Return the element-wise operation between the linear layers.

    Args:
        config: The kind of feed-forward.
        gate: Output of the gate projection, (…, F); None for kinds without a gate.
        up: Output of the up projection, (…, F).

    Returns:
        The input of the down projection, (…, F).
    """
    match config:
        case ReluConfig() | SquaredReluConfig() | GeluConfig() | GeluTanhConfig() | SiluConfig():
            return apply_activation(config.kind, up)
        case SwigluConfig():
            return apply_activation("silu", _require_gate(gate)) * up
        case GegluConfig():
            return apply_activation("gelu", _require_gate(gate)) * up
        case GegluTanhConfig():
            return apply_activation("gelu_tanh", _require_gate(gate)) * up
        case ClampedSwigluConfig():
            gate = _require_gate(gate).clamp(max=config.limit)
            up = up.clamp(-config.limit, config.limit)
            return (up + 1) * (gate * (config.alpha * gate).sigmoid())
        case unreachable:
            assert_never(unreachable)


def _require_gate(gate: Tensor | None) -> Tensor:
    assert gate is not None, "a gated kind has a gate_proj"
    return gate


def apply_activation(kind: Activation, x: Tensor) -> Tensor:
    """Apply an activation function to each element.

    Args:
        kind: relu, squared_relu, silu, gelu (exact; Hendrycks and Gimpel 2016) or gelu_tanh.
        x: Inner channels.

    Returns:
        A tensor in the shape and dtype of `x`.
    """
    match kind:
        case "relu":
            return F.relu(x)
        case "squared_relu":
            return F.relu(x).square()
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case unreachable:
            assert_never(unreachable)
