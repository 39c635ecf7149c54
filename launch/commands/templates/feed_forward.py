"""A feed-forward, to copy and change. Run this file to test it: python my_feed_forward.py

model:
  feed_forward:
    kind: python
    path: my_feed_forward.py:SquaredRelu
    options: {bias: false}
"""

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from llmsys.config.block_measurement import BlockShape
from llmsys.config.model import ModelConfig
from llmsys.model.python_block import PythonFeedForward
from llmsys.model.python_block_check import check_python_block


class SquaredRelu(PythonFeedForward):
    """down(relu(up(x))²) (So 2021, Primer)."""

    bias: bool = Field(False, description="Add a bias to both linear layers.")

    def build(self, shape: BlockShape) -> nn.Module:
        """Return the module of one layer."""
        return SquaredReluModule(shape, self.bias)

    def count_flops(self, shape: BlockShape, length: int, documents: tuple[int, ...]) -> int:
        """Return the FLOPs of one row, which are compared with torch's count."""
        return length * 2 * 2 * shape.hidden_size * shape.intermediate_size


class SquaredReluModule(nn.Module):
    """Two linear layers around a squared ReLU."""

    def __init__(self, shape: BlockShape, bias: bool) -> None:
        super().__init__()
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return a function of each position, in the shape and dtype of the input."""
        y_BTD: Tensor = self.down_proj(F.relu(self.up_proj(x_BTD)).square())
        return y_BTD


if __name__ == "__main__":
    check_python_block(
        SquaredRelu(),
        ModelConfig(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
        ),
    )
    print("every position is computed by itself, and every parameter is used")
