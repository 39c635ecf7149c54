"""The token embedding and its scale."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.model import ModelConfig


class TokenEmbedding(nn.Embedding):
    """An embedding whose gradient is summed in float32, also when the weight is bfloat16."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return rows of the weight, in its dtype."""
        return look_up_embedding(tokens, self.weight)


def look_up_embedding(rows: Tensor, table: Tensor) -> Tensor:
    """Return rows of a trained table, in its dtype; their gradients are summed in float32."""
    if table.dtype == torch.float32 or table.device.type != "cpu":
        return F.embedding(rows, table)
    # On CPU the backward adds row by row in the dtype of the table, and a bfloat16 sum of a frequent token's
    # gradients stops growing after a few hundred terms. (CUDA adds in float32 by itself.)
    return F.embedding(rows, table.float()).to(table.dtype)


def get_embedding_scale(config: ModelConfig) -> float:
    """Return the factor on the token embedding: sqrt(d) in the original (Vaswani 2017, 3.4) and in Gemma."""
    scale = config.embedding.scale
    return math.sqrt(config.hidden_size) if scale == "sqrt_hidden_size" else float(scale)
