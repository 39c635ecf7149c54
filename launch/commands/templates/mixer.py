"""An attention, to copy and change. Run this file to test it: python my_mixer.py

model:
  attention:
    kind: python
    path: my_mixer.py:LinearAttention
    options: {epsilon: 1e-6}
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from llmsys.config.block_measurement import BlockShape
from llmsys.config.model import ModelConfig
from llmsys.model.python_block import MixerContext, PythonMixer
from llmsys.model.python_block_check import check_python_block


class LinearAttention(PythonMixer):
    """Attention with elu(x) + 1 instead of a softmax (Katharopoulos 2020)."""

    masks_documents = True  # by context.build_mask()
    epsilon: float = Field(1e-6, gt=0, description="Added to the sum of the weights.")

    def build(self, shape: BlockShape) -> nn.Module:
        """Return the module of one layer."""
        return LinearAttentionModule(shape, self.epsilon)


class LinearAttentionModule(nn.Module):
    """Weighs every visible value by the product of its key with the query, both positive."""

    def __init__(self, shape: BlockShape, epsilon: float) -> None:
        super().__init__()
        width = shape.num_attention_heads * shape.head_dim
        self.heads = shape.num_attention_heads
        self.epsilon = epsilon
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor, context: MixerContext) -> Tensor:
        """Return the mixed states, in the shape and dtype of the input."""
        q_BTHK = F.elu(context.rotate(self._split(self.q_proj(x_BTD)))) + 1
        k_BTHK = F.elu(context.rotate(self._split(self.k_proj(x_BTD)))) + 1
        v_BTHK = self._split(self.v_proj(x_BTD))
        weights_BHTS = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK) * context.build_mask()
        weights_BHTS = weights_BHTS / (weights_BHTS.sum(-1, keepdim=True) + self.epsilon)
        mixed_BTHK = torch.einsum("bhts,bshk->bthk", weights_BHTS, v_BTHK)
        mixed_BTD: Tensor = self.o_proj(mixed_BTHK.flatten(2))
        return mixed_BTD

    def _split(self, x_BTW: Tensor) -> Tensor:
        x_BTHK: Tensor = x_BTW.unflatten(-1, (self.heads, -1))
        return x_BTHK


if __name__ == "__main__":
    check_python_block(
        LinearAttention(),
        ModelConfig(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
        ),
    )
    print("no position reads later ones or other documents, and every parameter is used")
