"""Attention over long sequences: Longformer's windows and global tokens, Linformer's mixed keys and
values.

Time and memory grow with the length, not with its square. Scores are computed by the kernels of all
attention.

Invariants:
- Documents and padding are read here, from the context; no tensor of positions × positions is made.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.long_attention import LinformerAttentionConfig, LongformerAttentionConfig
from llmsys.config.model import ModelConfig
from llmsys.model.attention_mask import EVERYTHING, AttentionMask
from llmsys.model.forward_context import ForwardContext
from llmsys.model.multi_head_attention import AttentionProjections
from llmsys.model.scaled_dot_product import compute_attention

# B rows, T positions, D width, H heads, G key-value heads, K width of a head, N mixed keys, E
# global tokens, C blocks of R queries, M = 3 R + E keys of a block, in a decoder 2 R

# Document of what fills the last block, which sees itself alone. Nothing sees OUTSIDE - 1, before
# and after a row.
OUTSIDE = -1 << 40


class LongformerAttention(AttentionProjections):
    """A window around every position, and leading positions that see and are seen by all
    (Beltagy 2020, 3).
    """

    def __init__(
        self, config: ModelConfig, attention: LongformerAttentionConfig, layer: int
    ) -> None:
        super().__init__(config, attention.projections, layer)
        self.layer_type = config.get_layer_type(layer)
        self.is_causal = config.family == "decoder"
        self.radius = attention.get_radius(layer)
        self.num_global_tokens = attention.num_global_tokens
        self.heads_by_dilation: dict[int, list[int]] = {}
        # Heads of one dilation are one call.
        for head, dilation in enumerate(attention.list_dilations(self.heads)):
            self.heads_by_dilation.setdefault(dilation, []).append(head)
        if self.num_global_tokens:
            width = self.heads * self.head_dim
            self.global_q_proj = nn.Linear(config.hidden_size, width, bias=attention.qkv_bias)
            self.global_k_proj = nn.Linear(config.hidden_size, width, bias=attention.qkv_bias)
            self.global_v_proj = nn.Linear(config.hidden_size, width, bias=attention.qkv_bias)

    def forward(self, x_BTD: Tensor, context: ForwardContext) -> Tensor:
        """Mix positions.

        Args:
            x_BTD: states of all positions, normed.
            context: masks, rotation and cache that all layers share.

        Returns:
            (B, T, D) in the dtype of the input.
        """
        q_BTHK = self._project_queries(x_BTD)
        k_BTHK, v_BTHK = self._project_keys_values(x_BTD)
        documents_BT = context.documents_BT
        compute: Callable[..., Tensor] = partial(self._compute_window_output, documents_BT)
        if context.cache is not None:
            _, k_BTHK, v_BTHK = context.rotate_and_cache(
                self.layer_type, self.layer, False, q_BTHK, k_BTHK, v_BTHK
            )
            compute = partial(self._compute_cached_output, context.cache.padding_B)
        if len(self.heads_by_dilation) == 1:
            [dilation] = self.heads_by_dilation
            y_BTHK = compute(q_BTHK, k_BTHK, v_BTHK, dilation)
        else:
            # Stacked: an index of heads would be copied to the device, and the host would wait.
            parts = [x_BTHK.unbind(2) for x_BTHK in (q_BTHK, k_BTHK, v_BTHK)]
            outputs: dict[int, Tensor] = {}
            for dilation, heads in self.heads_by_dilation.items():
                own = [torch.stack([part[head] for head in heads], dim=2) for part in parts]
                outputs |= zip(heads, compute(*own, dilation).unbind(2), strict=True)
            y_BTHK = torch.stack([outputs[head] for head in range(len(outputs))], dim=2)
        if self.num_global_tokens:
            global_BEHK = self._compute_global_output(x_BTD, documents_BT)
            # Leading positions attend through their own projections; what their window gave is
            # dropped.
            y_BTHK = torch.cat([global_BEHK, y_BTHK[:, global_BEHK.shape[1] :]], dim=1)
        mixed_BTD: Tensor = self.o_proj(y_BTHK.flatten(2))
        return mixed_BTD

    def _compute_global_output(self, x_BTD: Tensor, documents_BT: Tensor | None) -> Tensor:
        """Return what the leading positions see: every position of their document, by
        their own projections.
        """
        first_BED = x_BTD[:, : self.num_global_tokens]
        mask = EVERYTHING
        if documents_BT is not None:
            visible_BET = documents_BT[:, : first_BED.shape[1], None] == documents_BT[:, None]
            mask = AttentionMask(visible_B1TS=visible_BET[:, None])
        q_BEHK = self._split_heads(self.global_q_proj(first_BED))
        k_BTHK, v_BTHK = (
            self._split_heads(proj(x_BTD)) for proj in (self.global_k_proj, self.global_v_proj)
        )
        return self._compute_output(q_BEHK, k_BTHK, v_BTHK, mask)

    def _compute_cached_output(
        self, padding_B: Tensor, q_BTHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, dilation: int
    ) -> Tensor:
        """Return what the newest positions see in their windows of all positions so far."""
        keys_S = torch.arange(k_BSHK.shape[1], device=q_BTHK.device)
        behind_TS = keys_S[-q_BTHK.shape[1] :, None] - keys_S
        inside_TS = (
            (behind_TS >= 0) & (behind_TS <= self.radius * dilation) & (behind_TS % dilation == 0)
        )
        # A padded query sees itself: a row without any key would be 0/0.
        visible_BTS = inside_TS & (keys_S >= padding_B.to(keys_S.device)[:, None])[:, None] | (
            behind_TS == 0
        )
        return self._compute_output(
            q_BTHK, k_BSHK, v_BSHK, AttentionMask(visible_B1TS=visible_BTS[:, None])
        )

    def _compute_window_output(
        self,
        documents_BT: Tensor | None,
        q_BTHK: Tensor,
        k_BTHK: Tensor,
        v_BTHK: Tensor,
        dilation: int,
    ) -> Tensor:
        """Return what every position sees in its window and of the global tokens, for heads of one
        dilation.

        Positions of equal remainder by the dilation are neighbours. Blocks of R queries see three
        blocks of keys, in a decoder the first two.
        """
        rows, length = q_BTHK.shape[:2]
        # Up to whole blocks in each of the sequences of equal remainder.
        fill = -length % (self.radius * dilation)
        tokens = min(self.num_global_tokens, length)
        if documents_BT is None:
            documents_BT = torch.zeros(1, length, dtype=torch.int64, device=q_BTHK.device)
        visible_CRM = self._build_window_mask(documents_BT, fill, dilation, tokens)
        queries_CRHK = (
            _fold(_pad(q_BTHK, fill), dilation).unflatten(1, (-1, self.radius)).flatten(0, 1)
        )
        blocks = len(queries_CRHK) // rows
        keys_CMHK, values_CMHK = (
            torch.cat(
                [
                    self._list_neighbours(_fold(_pad(x, fill), dilation)),
                    _repeat(x[:, :tokens], blocks),
                ],
                dim=1,
            )
            for x in (k_BTHK, v_BTHK)
        )
        visible_CRM = visible_CRM.repeat(len(queries_CRHK) // len(visible_CRM), 1, 1)
        y_CRHK = self._compute_output(
            queries_CRHK, keys_CMHK, values_CMHK, AttentionMask(visible_B1TS=visible_CRM[:, None])
        )
        folded = y_CRHK.reshape(rows, dilation, -1, *y_CRHK.shape[2:])
        return folded.transpose(1, 2).flatten(1, 2)[:, :length]

    def _build_window_mask(
        self, documents_BT: Tensor, fill: int, dilation: int, tokens: int
    ) -> Tensor:
        """Return the visible keys of every block, bool (C, R, M)."""
        length = documents_BT.shape[1]
        device = documents_BT.device
        padded_BT = F.pad(documents_BT, (0, fill), value=OUTSIDE)
        own_BT = _fold(padded_BT[..., None], dilation).squeeze(-1)
        places_T = _fold(
            torch.arange(length + fill, device=device)[None, :, None], dilation
        ).squeeze(-1)
        queries_CR = own_BT.reshape(-1, self.radius)
        keys_CM = self._list_neighbours(own_BT[..., None], OUTSIDE - 1).squeeze(-1)
        # Global tokens are separate keys, so a window leaves them out.
        is_local_CM = self._list_neighbours(places_T[..., None], -1).squeeze(-1) >= tokens
        is_local_CM = is_local_CM.repeat(len(documents_BT), 1)
        distance_RM = (
            torch.arange(keys_CM.shape[1], device=device)
            - torch.arange(self.radius, device=device)[:, None]
        )
        # The blocks of keys begin one block, thus `radius` positions, before the queries.
        distance_RM = distance_RM - self.radius
        inside_RM = (distance_RM >= -self.radius) & (
            distance_RM <= (0 if self.is_causal else self.radius)
        )
        window_CRM = (queries_CR[:, :, None] == keys_CM[:, None]) & is_local_CM[:, None] & inside_RM
        global_CE = _repeat(documents_BT[:, :tokens], len(queries_CR) // len(documents_BT))
        return torch.cat([window_CRM, queries_CR[:, :, None] == global_CE[:, None]], dim=-1)

    def _list_neighbours(self, x_BTX: Tensor, filler: int = 0) -> Tensor:
        """Return each block of R positions with the block before it, and in an encoder the one
        after, (C, M, …).
        """
        after = 0 if self.is_causal else self.radius
        sides = [0, 0] * (x_BTX.dim() - 2) + [self.radius, after]
        windows = F.pad(x_BTX, sides, value=filler).unfold(1, 2 * self.radius + after, self.radius)
        return windows.movedim(-1, 2).flatten(0, 1)

    def _compute_output(
        self, q_BTHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, mask: AttentionMask
    ) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return compute_attention(q_BTHK, k_BSHK, v_BSHK, mask, scale=self.scale, dropout=dropout)


def _pad(x_BTHK: Tensor, fill: int) -> Tensor:
    return F.pad(x_BTHK, (0, 0, 0, 0, 0, fill)) if fill else x_BTHK


def _fold(x_BTX: Tensor, dilation: int) -> Tensor:
    """Return positions of equal remainder as rows, (B · dilation, T / dilation, …)."""
    return (
        x_BTX if dilation == 1 else x_BTX.unflatten(1, (-1, dilation)).transpose(1, 2).flatten(0, 1)
    )


def _repeat(x_BEX: Tensor, times: int) -> Tensor:
    return x_BEX.repeat_interleave(times, dim=0)


class LengthProjection(nn.Module):
    """Trained weights of every position in N mixtures, (rows, positions)."""

    def __init__(self, rows: int, positions: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, positions).normal_(std=rows**-0.5))

    def forward(self, length: int) -> Tensor:
        """Return the weights of the first positions, a copy: engines free the parameter while
        layers still use it.
        """
        return self.weight[:, :length].clone()


class LinformerAttention(AttentionProjections):
    """softmax(q (E k)ᵀ / sqrt(K)) F v, where E and F mix all positions into N (Wang 2020,
    equation 7).
    """

    def __init__(
        self, config: ModelConfig, attention: LinformerAttentionConfig, layer: int
    ) -> None:
        super().__init__(config, attention.projections, layer)
        self.attention = attention
        self.layer_type = config.get_layer_type(layer)
        self.rotates = config.uses_rope(layer)
        rows = attention.count_mixture_rows(config.num_key_value_heads)
        for name in attention.mixtures:
            self.add_module(name, LengthProjection(rows, config.max_position_embeddings))

    def forward(self, x_BTD: Tensor, context: ForwardContext) -> Tensor:
        """Mix positions; same shape and dtype as the input. Padding, where documents are
        negative, has no weight.
        """
        q_BTHK = self._project_queries(x_BTD)
        k_BTGK, v_BTGK = self._project_keys_values(x_BTD)
        q_BTHK, k_BTGK, v_BTGK = context.rotate_and_cache(
            self.layer_type, self.layer, self.rotates, q_BTHK, k_BTGK, v_BTGK
        )
        if context.real_BT is not None:
            k_BTGK, v_BTGK = (
                x * context.real_BT[..., None, None].to(x.dtype) for x in (k_BTGK, v_BTGK)
            )
        length = x_BTD.shape[1]
        if self.attention.mixtures:
            mixtures = [self.get_submodule(name)(length) for name in self.attention.mixtures]
        else:
            assert context.length_projection_NT is not None
            mixtures = [context.length_projection_NT]
        # A single mixture serves keys and values.
        k_BNGK = self._mix(k_BTGK, mixtures[0])
        v_BNGK = self._mix(v_BTGK, mixtures[-1])
        return self._compute_attention_output(x_BTD, q_BTHK, k_BNGK, v_BNGK, EVERYTHING)

    def _mix(self, x_BTGK: Tensor, mixture: Tensor) -> Tensor:
        """Return N weighted sums over the positions, (B, N, G, K)."""
        if self.attention.sharing == "none":
            mixture_GNT = mixture.unflatten(0, (x_BTGK.shape[2], -1))
            return torch.einsum("gnt,btgk->bngk", mixture_GNT, x_BTGK)
        return torch.einsum("nt,btgk->bngk", mixture, x_BTGK)


def build_shared_length_projection(config: ModelConfig) -> LengthProjection | None:
    """Build the mixture that all layers of a stack share; None where there is none."""
    attention = config.attention
    if not isinstance(attention, LinformerAttentionConfig) or attention.sharing != "layers":
        return None
    return LengthProjection(attention.projected_length, config.max_position_embeddings)
