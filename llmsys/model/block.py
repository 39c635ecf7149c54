"""One layer of the Transformer: attention, then a dense or mixture-of-experts feed-forward, each around a residual."""

from torch import Tensor, nn

from llmsys.config.model import ModelConfig
from llmsys.model.attention import Attention, AttentionContext
from llmsys.model.feed_forward import build_feed_forward
from llmsys.model.moe import MoE
from llmsys.model.norm import build_norm


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = build_norm(config, config.hidden_size)
        self.attention = Attention(config, layer)
        self.feed_forward_norm = build_norm(config, config.hidden_size)
        self.feed_forward = _feed_forward(config, layer)

    def forward(self, x_BTD: Tensor, context: AttentionContext) -> Tensor:
        """Same shape and dtype as the input."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), context)
        y_BTD: Tensor = x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))
        return y_BTD


def _feed_forward(config: ModelConfig, layer: int) -> nn.Module:
    if config.moe is not None and config.is_moe_layer(layer):
        return MoE(config.hidden_size, config.moe)
    return build_feed_forward(config.feed_forward, config.hidden_size, config.intermediate_size)
