"""DeepSeek-V3's multi-token prediction (arXiv:2412.19437, 2.2).

Module k takes the hidden states of module k - 1 and the embeddings of the tokens k positions ahead,
and returns hidden states from which the shared head predicts the token after those. Used in
training only.
"""

import torch
from torch import Tensor, nn

from llmsys.config.model import ModelConfig
from llmsys.model.forward_context import ForwardContext
from llmsys.model.normalization import build_norm
from llmsys.model.transformer_block import TransformerBlock

# B rows, T positions, D width


class MultiTokenPredictionModule(nn.Module):
    """block(W [norm(embedding); norm(hidden)]), with its own norm before the shared head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.embedding_norm = build_norm(config, width)
        self.hidden_norm = build_norm(config, width)
        self.projection = nn.Linear(2 * width, width, bias=False)
        # With the feed-forward or experts, window and rotations of the last layer.
        self.block = TransformerBlock(config, config.num_hidden_layers - 1)
        self.norm = build_norm(config, width)

    def forward(self, hidden_BTD: Tensor, embedded_BTD: Tensor, context: ForwardContext) -> Tensor:
        """Return the next hidden states, before `norm` and head.

        Args:
            hidden_BTD: states of the stack, or of the module before.
            embedded_BTD: embedded tokens k positions ahead, for the k-th module.
            context: masks, rotation and cache that all layers share.

        Returns:
            (B, T, D) in the dtype of hidden_BTD.
        """
        both = torch.cat([self.embedding_norm(embedded_BTD), self.hidden_norm(hidden_BTD)], dim=-1)
        return self.block(self.projection(both), context)  # type: ignore[no-any-return]


def shift_tokens(tokens_BT: Tensor, places: int) -> Tensor:
    """Move each token to the left, to the position that predicts it.

    Args:
        tokens_BT: Token ids.
        places: Positions to move by.

    Returns:
        Token t + places at position t, (B, T). The last `places` positions wrap around; the loss
        ignores them.
    """
    return tokens_BT.roll(-places, dims=1)
