"""Attention and feed-forward as a user would write them, equal to the built-in softmax attention
and SwiGLU.
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.block_measurement import BlockShape
from llmsys.model.python_block import MixerContext, PythonFeedForward, PythonMixer
from tests.helpers.paths import ROOT

FILE = ROOT / "tests" / "helpers" / "own_blocks.py"
SOFTMAX = {"kind": "python", "path": f"{FILE}:Softmax"}
NORMED = {"kind": "python", "path": f"{FILE}:Normed"}
GATED = {"kind": "python", "path": f"{FILE}:Gated"}


class Softmax(PythonMixer):
    """Multi-head attention with grouped keys, which declares all that it may declare."""

    masks_documents = True

    def build(self, shape: BlockShape) -> nn.Module:
        return SoftmaxModule(shape)

    def list_parameters(self, shape: BlockShape) -> dict[str, tuple[int, ...]]:
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        return {
            "q_proj.weight": (queries, shape.hidden_size),
            "k_proj.weight": (keys, shape.hidden_size),
            "v_proj.weight": (keys, shape.hidden_size),
            "o_proj.weight": (shape.hidden_size, queries),
        }

    def count_flops(self, shape: BlockShape, length: int, documents: tuple[int, ...]) -> int:
        weights = sum(rows * columns for rows, columns in self.list_parameters(shape).values())
        pairs = length * length
        if documents:
            pairs = sum(one * (one + 1) // 2 for one in documents)
        return 2 * length * weights + 4 * shape.num_attention_heads * shape.head_dim * pairs


class SoftmaxModule(nn.Module):
    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.group = shape.num_attention_heads // shape.num_key_value_heads
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor, context: MixerContext) -> Tensor:
        q_BTHK = context.rotate(self.q_proj(x_BTD).unflatten(-1, (-1, self.head_dim)))
        k_BTHK = context.rotate(self.k_proj(x_BTD).unflatten(-1, (-1, self.head_dim)))
        v_BTHK = self.v_proj(x_BTD).unflatten(-1, (-1, self.head_dim))
        k_BTHK = k_BTHK.repeat_interleave(self.group, dim=2)
        v_BTHK = v_BTHK.repeat_interleave(self.group, dim=2)
        scores_BHTS = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK) * self.head_dim**-0.5
        scores_BHTS = scores_BHTS.masked_fill(~context.build_mask(), -torch.inf)
        weights_BHTS = scores_BHTS.float().softmax(-1).to(x_BTD.dtype)
        mixed_BTD: Tensor = self.o_proj(
            torch.einsum("bhts,bshk->bthk", weights_BHTS, v_BTHK).flatten(2)
        )
        return mixed_BTD


class Normed(PythonFeedForward):
    """A projection of normalized states."""

    def build(self, shape: BlockShape) -> nn.Module:
        return nn.Sequential(
            OrderedDict(
                inner_norm=nn.RMSNorm(shape.hidden_size),
                down_proj=nn.Linear(shape.hidden_size, shape.hidden_size, bias=False),
            )
        )


class Gated(PythonFeedForward):
    """SwiGLU."""

    def build(self, shape: BlockShape) -> nn.Module:
        return GatedModule(shape)


class GatedModule(nn.Module):
    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return y_BTD
