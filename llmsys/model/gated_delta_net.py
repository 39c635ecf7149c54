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
from llmsys.model.state_exchange import StateExchange

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
        # Where several ranks hold the positions of a row; given from outside.
        self.exchange: StateExchange | None = None
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
        exchange = self.exchange
        if exchange is not None and not exchange.is_sharded:
            exchange = None
        if exchange is not None:
            groups, heads = self.config.num_key_heads, self.config.num_value_heads
            projected = exchange.exchange_positions(projected, (groups, groups, *[heads] * 4))
        tail_BTC = self._fetch_tail(projected)
        if context.cache is not None:
            mixed_BTH = self._continue_rows(projected, context.cache, self.layer + context.step)
        elif torch.is_grad_enabled():
            mixed_BTH = cast(
                Tensor,
                checkpoint(
                    self._mix_rows,
                    *projected,
                    tail_BTC,
                    context.documents_BT,
                    use_reentrant=False,
                    preserve_rng_state=False,
                ),
            )
        else:
            mixed_BTH = self._mix_rows(*projected, tail_BTC, context.documents_BT)
        if exchange is not None:
            mixed_BTH = exchange.return_positions(mixed_BTH)
        y_BTD: Tensor = self.o_proj(mixed_BTH)
        return y_BTD

    def _fetch_tail(self, projected: list[Tensor]) -> Tensor:
        """Return the inputs of the convolution before the first position: zeros, or those of other
        ranks.
        """
        before = self.config.conv_kernel_dim - 1
        rows = projected[:3]
        if before and self.exchange is not None and self.exchange.is_in_ring:
            return self.exchange.fetch_tail(
                torch.cat([row[:, -before:] for row in rows], -1), before
            )
        return rows[0].new_zeros(len(rows[0]), before, sum(row.shape[-1] for row in rows))

    def _mix_rows(self, *inputs: Tensor | None) -> Tensor:
        """Return the outputs (B, T, S · V) of projections, which come before the inputs of the
        convolution before them, and document numbers of all positions.
        """
        *projected, tail_BTC, documents_BT = inputs
        assert tail_BTC is not None
        # One more than the convolution reads tells whether a state is of the same document.
        taps = self.config.conv_kernel_dim
        segments_BL = None
        if documents_BT is not None:
            segments_BL = F.pad(number_segments(documents_BT), (taps, 0), value=-1)
        start = None
        if self.exchange is not None and self.exchange.is_in_ring:
            if segments_BL is not None:
                segments_BL = self.exchange.select_neighbourhood(segments_BL, taps)
            start = RowStart(
                self.exchange.find_state, None if segments_BL is None else segments_BL[:, taps - 1]
            )
        return self._run_rule(
            cast(list[Tensor], projected),
            tail_BTC,
            None if segments_BL is None else segments_BL[:, 1:],
            start,
            keeps_state=False,
        )[0]

    def _continue_rows(self, projected: list[Tensor], cache: KeyValueCache, key: int) -> Tensor:
        """Return the outputs of positions that follow those of a cache, and keep the states after
        them.
        """
        new = projected[0].shape[1]
        taps = self.config.conv_kernel_dim
        device = projected[0].device
        # Slots before the first one, empty slots on the left and tokens are three segments. One
        # more slot than the convolution reads tells whether the state is of the same.
        slots_L = torch.arange(cache.length - taps, cache.length + new, device=device)
        is_empty_BL = slots_L < cache.padding_B.to(device)[:, None]
        segments_BL = number_segments(torch.where(slots_L < 0, -2, torch.where(is_empty_BL, -1, 0)))
        start = None
        tail_BTC = self._fetch_tail(projected)
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
        # Of this rank, where others have other heads.
        groups = q.shape[-1] // config.key_head_dim
        conv_weight, rates, offsets = self._select_own_weights()
        # In float32 at least, as the states.
        dtype = torch.promote_types(q.dtype, torch.float32)
        inputs_BLC = torch.cat([tail_BTC, torch.cat([q, k, v], dim=-1)], dim=1).to(dtype)
        joined_BTC = F.silu(
            apply_causal_convolution(inputs_BLC, conv_weight.to(dtype), segments_BL)
        )
        q, k, v = joined_BTC.split([one.shape[-1] for one in (q, k, v)], dim=-1)
        q, k = (normalize_heads(x.unflatten(-1, (groups, -1))) for x in (q, k))
        log_decay_BTH = -rates.to(dtype).exp() * F.softplus(a.to(dtype) + offsets.to(dtype))
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

    def _select_own_weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the convolution, the logarithms of rates and the offsets of this rank's heads."""
        weights = self.conv_weight, self.A_log, self.dt_bias
        if self.exchange is None or not self.exchange.is_sharded:
            return weights
        config = self.config
        keys = self.exchange.get_head_slice(config.num_key_heads)
        values = self.exchange.get_head_slice(config.num_value_heads)
        parts = zip(
            self.conv_weight.split(
                [config.key_channels, config.key_channels, config.value_channels]
            ),
            (config.key_head_dim, config.key_head_dim, config.value_head_dim),
            (keys, keys, values),
            strict=True,
        )
        own = [part.unflatten(0, (-1, width))[heads].flatten(0, 1) for part, width, heads in parts]
        return torch.cat(own), self.A_log[values], self.dt_bias[values]
