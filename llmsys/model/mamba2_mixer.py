"""The mixer of `model.linear_attention.kind=mamba2`: projections, a short causal convolution, the
state space dual, and a norm of its gated outputs (Dao and Gu 2024, arXiv:2405.21060, 7; Bamba).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.linear_attention import Mamba2Config
from llmsys.config.model import ModelConfig
from llmsys.model.linear_mixer import LinearMixer
from llmsys.model.state_chunks import RowStart
from llmsys.model.state_space_dual import apply_state_space_dual

# B rows, T positions, D width, H value heads, G key heads, S value heads of a key head, K channels
# of a key, V of a value


class GatedGroupNorm(nn.Module):
    """RMSNorm over the value heads of each key head, which are gated by silu before or after."""

    def __init__(self, width: int, eps: float, *, is_gated_first: bool) -> None:
        """Build the weight, which begins at 1.

        Args:
            width: Channels of all value heads.
            eps: Added to the mean of squares.
            is_gated_first: Normalize gated outputs instead of gating normed ones.
        """
        super().__init__()
        self.eps = eps
        self.is_gated_first = is_gated_first
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x_BTGW: Tensor, gate_BTGW: Tensor, weight_GW: Tensor) -> Tensor:
        """Gate, and normalize the last dim in float32 at least.

        Args:
            x_BTGW: outputs, with those of a key head in the last dim.
            gate_BTGW: of the same shape.
            weight_GW: the weight of these.

        Returns:
            Same shape, in the dtype of the gate.
        """
        gated = F.silu(gate_BTGW.to(x_BTGW.dtype))
        inner = x_BTGW * gated if self.is_gated_first else x_BTGW
        normed = F.rms_norm(inner, inner.shape[-1:], None, self.eps) * weight_GW.to(inner.dtype)
        return (normed if self.is_gated_first else normed * gated).to(gate_BTGW.dtype)


class Mamba2Mixer(LinearMixer):
    """A state space of which `num_value_heads` / `num_key_heads` heads share queries and keys."""

    def __init__(self, config: ModelConfig, attention: Mamba2Config, layer: int) -> None:
        """Build the projections on the current default device.

        Args:
            config: Width and eps of norms of the model.
            attention: Heads, convolution and chunks.
            layer: Index of the layer, from 0; the key of its states in a cache.
        """
        super().__init__(config, attention, layer)
        self.min_step = attention.min_step
        self.D = nn.Parameter(torch.ones(attention.num_value_heads))
        channels = attention.conv_channels
        self.conv_bias = nn.Parameter(torch.zeros(channels)) if attention.conv_bias else None
        self.o_norm: GatedGroupNorm | None = None
        if attention.output_norm != "none":
            is_first = attention.output_norm == "after_gate"
            width = attention.value_channels
            self.o_norm = GatedGroupNorm(width, config.norm.eps, is_gated_first=is_first)

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
        gate, a = projected[3:]
        sizes, new = self.sizes, gate.shape[1]
        q, k, v = self.apply_convolution(projected, tail_BTC, segments_BL)
        # Of this rank, where others have other heads.
        groups = q.shape[-1] // sizes.key_head_dim
        dtype = v.dtype
        rates_H, offsets_H, shares_H = (
            self.select_heads(x).to(dtype) for x in (self.A_log, self.dt_bias, self.D)
        )
        steps_BTH = F.softplus(a.to(dtype) + offsets_H)
        if self.min_step:
            steps_BTH = steps_BTH.clamp(min=self.min_step)
        v_BTHV: Tensor = v.unflatten(-1, (-1, sizes.value_head_dim))
        y_BTGSV, state = apply_state_space_dual(
            q.unflatten(-1, (groups, -1)),
            k.unflatten(-1, (groups, -1)),
            (v_BTHV * steps_BTH[..., None]).unflatten(2, (groups, -1)),
            (-rates_H.exp() * steps_BTH).unflatten(-1, (groups, -1)),
            # A few new positions are a chunk of their own.
            chunk_length=min(sizes.chunk_length, new) if keeps_state else sizes.chunk_length,
            segments_BT=None if segments_BL is None else segments_BL[:, -new:],
            start=start,
            keeps_state=keeps_state,
        )
        y_BTHV = y_BTGSV.flatten(2, 3) + shares_H[:, None] * v_BTHV
        if self.o_norm is None:
            gated_BTH: Tensor = y_BTHV.flatten(2) * F.silu(gate.to(dtype))
            return gated_BTH.to(gate.dtype), state
        weight_HV: Tensor = self.o_norm.weight.unflatten(0, (-1, sizes.value_head_dim))
        normed = self.o_norm(
            y_BTHV.flatten(2).unflatten(-1, (groups, -1)),
            gate.unflatten(-1, (groups, -1)),
            self.select_heads(weight_HV).flatten().unflatten(0, (groups, -1)),
        )
        mixed_BTH: Tensor = normed.flatten(2)
        return mixed_BTH, state
