"""From token ids to vectors: the token embedding and its factor."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.model import ModelConfig


class TokenEmbedding(nn.Embedding):
    """An embedding whose gradient is added up in float32, also when the weight is bfloat16."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Rows of the weight, in its dtype."""
        if self.weight.dtype == torch.float32 or self.weight.device.type != "cpu":
            return super().forward(tokens)
        # On CPU the backward adds row by row in the dtype of the weight, and a bfloat16 sum of a frequent token's
        # gradients stops growing after a few hundred terms. (CUDA adds in float32 by itself.)
        return F.embedding(tokens, self.weight.float()).to(self.weight.dtype)


def scale_of(config: ModelConfig) -> float:
    """The factor on the token embedding: sqrt(d) in the original (Vaswani 2017, 3.4) and in Gemma."""
    scale = config.embedding.scale
    return math.sqrt(config.hidden_size) if scale == "sqrt_hidden_size" else float(scale)
