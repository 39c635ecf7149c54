"""The mixer of `model.linear_attention.kind=gated_delta`: projections, a short causal convolution,
the gated delta rule, and a gated norm of its outputs (Yang 2024, arXiv:2412.06464, section 3.4;
Qwen3-Next).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.linear_attention import GatedDeltaConfig
from llmsys.config.model import ModelConfig
from llmsys.model.gated_delta_rule import apply_gated_delta_rule, normalize_heads
from llmsys.model.linear_mixer import LinearMixer
from llmsys.model.state_chunks import RowStart

# B rows, T positions, D width, G key heads, S value heads of a key head, K channels of a key, V of
# a value, C channels of the convolution


class GatedRmsNorm(nn.Module):
    """RMSNorm of each head, times an activation of a gate."""

    def __init__(
        self, width: int, eps: float, activation: Callable[[Tensor], Tensor] = F.silu
    ) -> None:
        """Build the weight, which begins at 1.

        Args:
            width: Channels of a head.
            eps: Added to the mean of squares.
            activation: Of the gate.
        """
        super().__init__()
        self.activation = activation
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalize the last dim in float32 at least, and gate it.

        Args:
            x: heads, (..., channels).
            gate: of the same shape.

        Returns:
            Same shape and dtype as the gate.
        """
        normed = F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        return (normed * self.activation(gate.to(x.dtype))).to(gate.dtype)


class GatedDeltaNet(LinearMixer):
    """Linear attention by the gated delta rule; `num_value_heads` / `num_key_heads` states share
    queries and keys.
    """

    projections = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")

    def __init__(self, config: ModelConfig, attention: GatedDeltaConfig, layer: int) -> None:
        """Build the projections on the current default device.

        Args:
            config: Width and eps of norms of the model.
            attention: Heads, convolution and chunks.
            layer: Index of the layer, from 0; the key of its states in a cache.
        """
        super().__init__(config, attention, layer)
        self.o_norm = GatedRmsNorm(attention.value_head_dim, config.norm.eps)

    def run_rule(
        self,
        projected: list[Tensor],
        tail_BTC: Tensor,
        segments_BL: Tensor | None,
        start: RowStart | None,
        *,
        keeps_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Implement `LinearMixer.run_rule`."""
        gate, b, a = projected[3:]
        sizes, new = self.sizes, gate.shape[1]
        q, k, v = self.apply_convolution(projected, tail_BTC, segments_BL)
        # Of this rank, where others have other heads.
        groups = q.shape[-1] // sizes.key_head_dim
        q, k = (normalize_heads(x.unflatten(-1, (groups, -1))) for x in (q, k))
        dtype = v.dtype
        rates_H, offsets_H = (self.select_heads(x).to(dtype) for x in (self.A_log, self.dt_bias))
        log_decay_BTH = -rates_H.exp() * F.softplus(a.to(dtype) + offsets_H)
        y_BTGSV, state = apply_gated_delta_rule(
            q,
            k,
            v.unflatten(-1, (groups, -1, sizes.value_head_dim)),
            log_decay_BTH.unflatten(-1, (groups, -1)),
            b.to(dtype).sigmoid().unflatten(-1, (groups, -1)),
            # A few new positions are a chunk of their own.
            chunk_length=min(sizes.chunk_length, new) if keeps_state else sizes.chunk_length,
            segments_BT=None if segments_BL is None else segments_BL[:, -new:],
            start=start,
            keeps_state=keeps_state,
        )
        normed = self.o_norm(y_BTGSV, gate.unflatten(-1, (groups, -1, sizes.value_head_dim)))
        mixed_BTH: Tensor = normed.flatten(2)
        return mixed_BTH, state
