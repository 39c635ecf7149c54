"""Base of mixers with a state: projections, a short causal convolution, recomputation, a cache
for generation, and the exchange of positions between ranks.
"""

from abc import abstractmethod
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llmsys.config.linear_mixer import BaseLinearAttentionConfig
from llmsys.config.model import ModelConfig
from llmsys.model.forward_context import ForwardContext
from llmsys.model.kv_cache import KeyValueCache
from llmsys.model.state_chunks import RowStart, apply_causal_convolution, number_segments
from llmsys.model.state_exchange import StateExchange

# B rows, T positions, D width, H value heads, C channels of the convolution


class LinearMixer(nn.Module):
    """A mixer whose value heads have states; several share queries and keys.

    Between the projections nothing is saved for the backward pass, which computes it again.
    """

    # Names of the projections: queries, keys, values, gates, and a number for each value head.
    projections: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "g_proj", "a_proj")

    def __init__(
        self, config: ModelConfig, attention: BaseLinearAttentionConfig, layer: int
    ) -> None:
        """Build the projections on the current default device.

        Args:
            config: Width of the model.
            attention: Heads, convolution and chunks.
            layer: Index of the layer, from 0; the key of its states in a cache.
        """
        super().__init__()
        self.layer = layer
        self.sizes = attention
        # Where several ranks hold the positions of a row; given from outside.
        self.exchange: StateExchange | None = None
        heads = attention.num_value_heads
        for row in attention.iter_projections(config):
            *_, name, kind = row.name.split(".")
            if kind == "weight":
                out_features, in_features = row.shape
                self.add_module(name, nn.Linear(in_features, out_features, bias=False))
        shape = (attention.conv_channels, attention.conv_kernel_dim)
        self.conv_weight = nn.Parameter(torch.randn(shape) * 0.02)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.ones(heads))
        self.o_proj = nn.Linear(attention.value_channels, config.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor, context: ForwardContext) -> Tensor:
        """Mix positions.

        Args:
            x_BTD: states of all positions, normed.
            context: documents, and the cache in generation.

        Returns:
            (B, T, D) in the dtype of the input.
        """
        projected = self.project_positions(x_BTD)
        exchange = self.exchange
        if exchange is not None and not exchange.is_sharded:
            exchange = None
        if exchange is not None:
            groups, heads = self.sizes.num_key_heads, self.sizes.num_value_heads
            rest = len(projected) - 2
            projected = exchange.exchange_positions(projected, (groups, groups, *[heads] * rest))
        if context.cache is not None:
            mixed_BTH = self._continue_rows(projected, context.cache, self.layer + context.step)
        elif torch.is_grad_enabled():
            mixed_BTH = cast(
                Tensor,
                checkpoint(
                    self._mix_rows,
                    *projected,
                    self._fetch_tail(projected),
                    context.documents_BT,
                    use_reentrant=False,
                    preserve_rng_state=False,
                ),
            )
        else:
            tail_BTC = self._fetch_tail(projected)
            mixed_BTH = self._mix_rows(*projected, tail_BTC, context.documents_BT)
        if exchange is not None:
            mixed_BTH = exchange.return_positions(mixed_BTH)
        y_BTD: Tensor = self.o_proj(mixed_BTH)
        return y_BTD

    def project_positions(self, x_BTD: Tensor) -> list[Tensor]:
        """Return queries, keys, values, gates, and what else the rule needs of each value head, all
        ordered by head.

        Args:
            x_BTD: states of all positions, normed.
        """
        return [self.get_submodule(name)(x_BTD) for name in self.projections]

    @abstractmethod
    def run_rule(
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
            projected: the outputs of `project_positions`, of this rank's heads.
            tail_BTC: inputs of the convolution before the first position.
            segments_BL: segments of these and of the positions; None: one segment.
            start: what the states continue from.
            keeps_state: return the last state.

        Returns:
            (B, T, channels of the values), and the last state or None.
        """

    def apply_convolution(
        self, projected: list[Tensor], tail_BTC: Tensor, segments_BL: Tensor | None
    ) -> list[Tensor]:
        """Return queries, keys and values after the convolution and silu, in float32 at least, as
        the states.

        Args:
            projected: the outputs of `project_positions`, of this rank's heads.
            tail_BTC: inputs of the convolution before the first position.
            segments_BL: segments of these and of the positions; None: one segment.
        """
        parts = projected[:3]
        dtype = torch.promote_types(parts[0].dtype, torch.float32)
        inputs_BLC = torch.cat([tail_BTC, torch.cat(parts, dim=-1)], dim=1).to(dtype)
        weight_CW = self.select_channels(self.conv_weight).to(dtype)
        y_BTC = apply_causal_convolution(inputs_BLC, weight_CW, segments_BL)
        bias_C = getattr(self, "conv_bias", None)
        if bias_C is not None:
            y_BTC = y_BTC + self.select_channels(bias_C).to(dtype)
        return list(F.silu(y_BTC).split([one.shape[-1] for one in parts], dim=-1))

    def select_heads(self, x_H: Tensor) -> Tensor:
        """Return the entries of this rank's value heads.

        Args:
            x_H: one for each value head of the layer.
        """
        if self.exchange is None or not self.exchange.is_sharded:
            return x_H
        return x_H[self.exchange.get_head_slice(self.sizes.num_value_heads)]

    def select_channels(self, x_C: Tensor) -> Tensor:
        """Return the entries of this rank's channels of the convolution.

        Args:
            x_C: one for each channel of the layer, with or without dims after it.
        """
        if self.exchange is None or not self.exchange.is_sharded:
            return x_C
        sizes = self.sizes
        keys = self.exchange.get_head_slice(sizes.num_key_heads)
        values = self.exchange.get_head_slice(sizes.num_value_heads)
        parts = zip(
            x_C.split([sizes.key_channels, sizes.key_channels, sizes.value_channels]),
            (sizes.key_head_dim, sizes.key_head_dim, sizes.value_head_dim),
            (keys, keys, values),
            strict=True,
        )
        return torch.cat(
            [part.unflatten(0, (-1, width))[heads].flatten(0, 1) for part, width, heads in parts]
        )

    def _fetch_tail(self, projected: list[Tensor]) -> Tensor | None:
        """Return the inputs of the convolution that other ranks have before the first position;
        None where there are none.
        """
        before = self.sizes.conv_kernel_dim - 1
        if not before or self.exchange is None or not self.exchange.is_in_ring:
            return None
        last_BTC = torch.cat([row[:, -before:] for row in projected[:3]], -1)
        return self.exchange.fetch_tail(last_BTC, before)

    def _build_empty_tail(self, projected: list[Tensor]) -> Tensor:
        rows = projected[:3]
        before = self.sizes.conv_kernel_dim - 1
        return rows[0].new_zeros(len(rows[0]), before, sum(row.shape[-1] for row in rows))

    def _mix_rows(self, *inputs: Tensor | None) -> Tensor:
        """Return the outputs (B, T, H · V) of projections, which come before the inputs of the
        convolution before them, and document numbers of all positions.
        """
        *given, tail_BTC, documents_BT = inputs
        projected = cast(list[Tensor], given)
        # One more than the convolution reads tells whether a state is of the same document.
        taps = self.sizes.conv_kernel_dim
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
        return self.run_rule(
            projected,
            self._build_empty_tail(projected) if tail_BTC is None else tail_BTC,
            None if segments_BL is None else segments_BL[:, 1:],
            start,
            keeps_state=False,
        )[0]

    def _continue_rows(self, projected: list[Tensor], cache: KeyValueCache, key: int) -> Tensor:
        """Return the outputs of positions that follow those of a cache, and keep the states after
        them.
        """
        new = projected[0].shape[1]
        taps = self.sizes.conv_kernel_dim
        device = projected[0].device
        # Slots before the first one, empty slots on the left and tokens are three segments. One
        # more slot than the convolution reads tells whether the state is of the same.
        slots_L = torch.arange(cache.length - taps, cache.length + new, device=device)
        is_empty_BL = slots_L < cache.padding_B.to(device)[:, None]
        segments_BL = number_segments(torch.where(slots_L < 0, -2, torch.where(is_empty_BL, -1, 0)))
        start = None
        tail_BTC = self._build_empty_tail(projected)
        if cache.length:
            tail_BTC, state = cache.layer_states[key]
            start = RowStart(state, segments_BL[:, taps - 1])
        y_BTH, last = self.run_rule(
            projected, tail_BTC, segments_BL[:, 1:], start, keeps_state=True
        )
        assert last is not None
        inputs_BLC = torch.cat([tail_BTC, torch.cat(projected[:3], dim=-1)], dim=1)
        cache.layer_states[key] = (inputs_BLC[:, new:], last)
        return y_BTH
