"""Rotary positions (RoPE): the table of angles, and the rotation of queries and keys.

The table holds float32 whatever dtype the weights have, because angles grow with the position and bfloat16 would
round them away. It is a buffer that is never saved: `reset` computes it again from the configuration.
"""

import torch
from torch import Tensor

from llmsys.model.buffers import Float32Buffers

# B rows, T positions, P positions of the table, H heads, K width of a head


class Rotation:
    """Cosines and signed sines for the positions of one forward pass; not a tensor, so that no wrapper casts it."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin

    def __call__(self, x_BTHK: Tensor) -> Tensor:
        """Rotate feature i together with feature i + K/2 (the pairing of Hugging Face's Llama); dtype is kept."""
        half = x_BTHK.shape[-1] // 2
        rotated = x_BTHK * self.cos + torch.roll(x_BTHK, half, dims=-1) * self.sin
        return rotated.to(x_BTHK.dtype)


class RotaryTable(Float32Buffers):
    """Angles m * theta^(-2i/K) for every position m (Su 2021, arXiv:2104.09864, section 3.2.2)."""

    cos_PK: Tensor
    sin_PK: Tensor

    def __init__(self, head_dim: int, positions: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.positions, self.theta = head_dim, positions, theta
        self.register_buffer("cos_PK", torch.empty(positions, head_dim), persistent=False)
        self.register_buffer("sin_PK", torch.empty(positions, head_dim), persistent=False)
        self.reset()

    def reset(self) -> None:
        """Compute the table on the device it lives on, for instance after `to_empty`."""
        if self.cos_PK.is_meta:
            return
        # The angles are computed in float64: at position 100,000 a float32 product is already off by 4e-3 radians.
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        angles = torch.outer(torch.arange(self.positions, dtype=torch.float64), self.theta**-exponents)
        cos, sin = angles.cos(), angles.sin()
        self.cos_PK.copy_(torch.cat([cos, cos], dim=-1))
        # rotate_half negates the half that moves to the front; the sign lives in the table, which saves an operation.
        self.sin_PK.copy_(torch.cat([-sin, sin], dim=-1))

    def forward(self, positions_BT: Tensor | None, length: int) -> Rotation:
        """The rotation for positions 0..length-1, or for explicit `positions_BT`."""
        if positions_BT is None:
            return Rotation(self.cos_PK[:length, None], self.sin_PK[:length, None])
        return Rotation(self.cos_PK[positions_BT].unsqueeze(2), self.sin_PK[positions_BT].unsqueeze(2))
