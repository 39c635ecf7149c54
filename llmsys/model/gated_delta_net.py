"""The mixer of `model.linear_attention.kind=gated_delta`: projections, a short causal convolution,
the gated delta rule, and a gated norm of its outputs (Yang 2024, arXiv:2412.06464, section 3.4;
Qwen3-Next).
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llmsys.config.linear_attention import GatedDeltaConfig
from llmsys.config.model import ModelConfig
from llmsys.model.forward_context import ForwardContext
from llmsys.model.gated_delta_rule import (
    RowStart,
    apply_causal_convolution,
    apply_gated_delta_rule,
    normalize_heads,
    number_segments,
)
from llmsys.model.kv_cache import KeyValueCache

# B rows, T positions, D width, G key heads, S value heads of a key head, K channels of a key, V of
# a value, C channels of the convolution

NORM_EPS = 1e-6


class GatedRmsNorm(nn.Module):
    """RMSNorm of each head, times silu of a gate."""

    def __init__(self, width: int) -> None:
        """Build the weight, which begins at 1.

        Args:
            width: Channels of a head.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalize the last dim in float32 at least, and gate it.

        Args:
            x: heads, (..., channels).
            gate: of the same shape.

        Returns:
            Same shape and dtype as the gate.
        """
        normed = F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), NORM_EPS)
        return (normed * F.silu(gate.to(x.dtype))).to(gate.dtype)


class GatedDeltaNet(nn.Module):
    """Linear attention by the gated delta rule; `num_value_heads` / `num_key_heads` states share
    queries and keys.

    Between the projections nothing is saved for the backward pass, which computes it again.
    """

    def __init__(self, config: ModelConfig, attention: GatedDeltaConfig, layer: int) -> None:
        """Build the projections on the current default device.

        Args:
            config: Width of the model.
            attention: Heads, convolution and chunks.
            layer: Index of the layer, from 0; the key of its states in a cache.
        """
        super().__init__()
        self.layer = layer
        self.config = attention
        hidden, heads = config.hidden_size, attention.num_value_heads
        keys, values = attention.key_channels, attention.value_channels
        self.q_proj = nn.Linear(hidden, keys, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, values, bias=False)
        self.g_proj = nn.Linear(hidden, values, bias=False)
        self.b_proj = nn.Linear(hidden, heads, bias=False)
        self.a_proj = nn.Linear(hidden, heads, bias=False)
        shape = (attention.conv_channels, attention.conv_kernel_dim)
        self.conv_weight = nn.Parameter(torch.randn(shape) * 0.02)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.ones(heads))
        self.o_norm = GatedRmsNorm(attention.value_head_dim)
        self.o_proj = nn.Linear(values, hidden, bias=False)

    def forward(self, x_BTD: Tensor, context: ForwardContext) -> Tensor:
        """Mix positions.

        Args:
            x_BTD: states of all positions, normed.
            context: documents, and the cache in generation.

        Returns:
            (B, T, D) in the dtype of the input.
        """
        projected = [
            proj(x_BTD)
            for proj in (
                self.q_proj,
                self.k_proj,
                self.v_proj,
                self.g_proj,
                self.b_proj,
                self.a_proj,
            )
        ]
        if context.cache is not None:
            mixed_BTH = self._continue_rows(projected, context.cache, self.layer + context.step)
        elif torch.is_grad_enabled():
            mixed_BTH = cast(
                Tensor,
                checkpoint(
                    self._mix_rows,
                    *projected,
                    context.documents_BT,
                    use_reentrant=False,
                    preserve_rng_state=False,
                ),
            )
        else:
            mixed_BTH = self._mix_rows(*projected, context.documents_BT)
        y_BTD: Tensor = self.o_proj(mixed_BTH)
        return y_BTD

    def _mix_rows(self, *inputs: Tensor | None) -> Tensor:
        """Return the outputs (B, T, S · V) of projections, which come before document numbers."""
        *projected, documents_BT = inputs
        rows = cast(list[Tensor], projected)
        before = self.config.conv_kernel_dim - 1
        tail_BTC = rows[0].new_zeros(len(rows[0]), before, self.config.conv_channels)
        segments_BT = None
        if documents_BT is not None:
            segments_BT = F.pad(number_segments(documents_BT), (before, 0), value=-1)
        return self._run_rule(rows, tail_BTC, segments_BT, None, keeps_state=False)[0]

    def _continue_rows(self, projected: list[Tensor], cache: KeyValueCache, key: int) -> Tensor:
        """Return the outputs of positions that follow those of a cache, and keep the states after
        them.
        """
        rows, new = projected[0].shape[:2]
        taps, channels = self.config.conv_kernel_dim, self.config.conv_channels
        device = projected[0].device
        # Slots before the first one, empty slots on the left and tokens are three segments. One
        # more slot than the convolution reads tells whether the state is of the same.
        slots_L = torch.arange(cache.length - taps, cache.length + new, device=device)
        is_empty_BL = slots_L < cache.padding_B.to(device)[:, None]
        segments_BL = number_segments(torch.where(slots_L < 0, -2, torch.where(is_empty_BL, -1, 0)))
        start = None
        tail_BTC = projected[0].new_zeros(rows, taps - 1, channels)
        if cache.length:
            tail_BTC, state = cache.layer_states[key]
            start = RowStart(state, segments_BL[:, taps - 1])
        y_BTH, last = self._run_rule(
            projected, tail_BTC, segments_BL[:, 1:], start, keeps_state=True
        )
        assert last is not None
        inputs_BLC = torch.cat([tail_BTC, torch.cat(projected[:3], dim=-1)], dim=1)
        cache.layer_states[key] = (inputs_BLC[:, new:], last)
        return y_BTH

    def _run_rule(
        self,
        projected: list[Tensor],
        tail_BTC: Tensor,
        segments_BL: Tensor | None,
        start: RowStart | None,
        *,
        keeps_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Run all between the projections.

        Args:
            projected: queries, keys, values, gates, shares and decays as they are projected.
            tail_BTC: inputs of the convolution before the first position.
            segments_BL: segments of these and of the positions; None: one segment.
            start: what the states continue from.
            keeps_state: return the last state.
        """
        q, k, v, gate, b, a = projected
        config, new = self.config, q.shape[1]
        groups = config.num_key_heads
        # In float32 at least, as the states.
        dtype = torch.promote_types(q.dtype, torch.float32)
        inputs_BLC = torch.cat([tail_BTC, torch.cat([q, k, v], dim=-1)], dim=1).to(dtype)
        joined_BTC = F.silu(
            apply_causal_convolution(inputs_BLC, self.conv_weight.to(dtype), segments_BL)
        )
        keys, values = config.key_channels, config.value_channels
        q, k, v = joined_BTC.split([keys, keys, values], dim=-1)
        q, k = (normalize_heads(x.unflatten(-1, (groups, -1))) for x in (q, k))
        log_decay_BTH = -self.A_log.to(dtype).exp() * F.softplus(
            a.to(dtype) + self.dt_bias.to(dtype)
        )
        y_BTGSV, state = apply_gated_delta_rule(
            q,
            k,
            v.unflatten(-1, (groups, -1, config.value_head_dim)),
            log_decay_BTH.unflatten(-1, (groups, -1)),
            b.to(dtype).sigmoid().unflatten(-1, (groups, -1)),
            # A few new positions are a chunk of their own.
            chunk_length=min(config.chunk_length, new) if keeps_state else config.chunk_length,
            segments_BT=None if segments_BL is None else segments_BL[:, -new:],
            start=start,
            keeps_state=keeps_state,
        )
        normed = self.o_norm(y_BTGSV, gate.unflatten(-1, (groups, -1, config.value_head_dim)))
        mixed_BTH: Tensor = normed.flatten(2)
        return mixed_BTH, state
