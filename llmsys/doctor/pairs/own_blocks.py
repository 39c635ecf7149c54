"""A mixer and a feed-forward as users write them, for the cases with `kind: python`.

The plain process runs the same modules, so a case compares what engines, checkpoints and events do
with a block that is no part of the model's code.
"""

import torch
from pydantic import Field
from torch import Tensor, nn

from llmsys.config.block_measurement import BlockShape
from llmsys.model.python_block import MixerContext, PythonFeedForward, PythonMixer

# B rows, T and S positions, D width, H heads, K channels of a head, W channels of all heads


class SigmoidAttention(PythonMixer):
    """Attention that weighs each visible value by a sigmoid instead of a softmax (Ramapuram 2024,
    Theory, analysis, and best practices for sigmoid self-attention).
    """

    masks_documents = True
    temperature: float = Field(1.0, gt=0, description="Divides the scores.")

    def build(self, shape: BlockShape) -> nn.Module:
        """Return the module of one layer."""
        return _SigmoidAttention(shape, self.temperature)


class _SigmoidAttention(nn.Module):
    def __init__(self, shape: BlockShape, temperature: float) -> None:
        super().__init__()
        width = shape.num_attention_heads * shape.head_dim
        self.heads = shape.num_attention_heads
        self.scale = 1 / (temperature * shape.head_dim**0.5)
        self.qkv_proj = nn.Linear(shape.hidden_size, 3 * width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=True)
        # A parameter without a matrix, which optimizers and norms of matrices treat apart.
        self.shift_H = nn.Parameter(torch.empty(self.heads))

    def forward(self, x_BTD: Tensor, context: MixerContext) -> Tensor:
        q_BTW, k_BTW, v_BTW = self.qkv_proj(x_BTD).chunk(3, dim=-1)
        q_BTHK = context.rotate(q_BTW.unflatten(-1, (self.heads, -1)))
        k_BTHK = context.rotate(k_BTW.unflatten(-1, (self.heads, -1)))
        v_BTHK = v_BTW.unflatten(-1, (self.heads, -1))
        scores_BHTS = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK) * self.scale
        shift_H11 = self.shift_H.to(scores_BHTS.dtype)[:, None, None]
        weights_BHTS = torch.sigmoid(scores_BHTS + shift_H11) * context.build_mask()
        mixed_BTHK = torch.einsum("bhts,bshk->bthk", weights_BHTS, v_BTHK)
        mixed_BTD: Tensor = self.o_proj(mixed_BTHK.flatten(2))
        return mixed_BTD


class SquaredRelu(PythonFeedForward):
    """down(relu(up(x))²) (So 2021, Primer)."""

    bias: bool = Field(False, description="Add a bias to both linear layers.")

    def build(self, shape: BlockShape) -> nn.Module:
        """Return the module of one layer."""
        return _SquaredRelu(shape, self.bias)


class _SquaredRelu(nn.Module):
    def __init__(self, shape: BlockShape, bias: bool) -> None:
        super().__init__()
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD: Tensor = self.down_proj(self.up_proj(x_BTD).relu().square())
        return y_BTD
