"""Transformer-XL's relative attention (Dai 2019, arXiv:1901.02860, 3.3): scores of content and
distance.

score(i, j) = (q_i + u) · k_j + (q_i + v) · W r(i - j), with sinusoids r of the distance and trained
vectors u and v per head. XLNet (Yang 2019, 2.5) adds (q_i + s) · e, where e encodes whether i and j
are of the same segment. Its second stream (query_stream.py) has its own queries, and the keys
and values of the first.
"""

import torch
from torch import Tensor, nn

from llmsys.config.attention import MultiHeadAttentionConfig
from llmsys.config.model import ModelConfig
from llmsys.config.position import TransformerXlPositionConfig
from llmsys.model.attention_mask import AttentionMask
from llmsys.model.forward_context import ForwardContext
from llmsys.model.multi_head_attention import MultiHeadAttention
from llmsys.model.query_stream import append_places

# B rows, T query positions, S key positions, D width, H query heads, G key-value heads, K width of
# a head, R = S + T - 1 distances, from S - 1 down to 1 - T


class RelativeAttention(MultiHeadAttention):
    """Self-attention with scores of content, distance and segment."""

    def __init__(
        self,
        config: ModelConfig,
        attention: MultiHeadAttentionConfig,
        position: TransformerXlPositionConfig,
        layer: int,
    ) -> None:
        super().__init__(config, attention, layer)
        heads = (self.heads, self.head_dim)
        segments = position.segments
        self.position_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(heads)) if position.biases else None
        self.position_bias = nn.Parameter(torch.zeros(heads)) if position.biases else None
        self.segment_bias = nn.Parameter(torch.zeros(heads)) if segments else None
        self.segment_embed = (
            nn.Parameter(torch.zeros(segments, *heads).normal_(std=0.02)) if segments else None
        )

    def forward(self, x_BTD: Tensor, context: ForwardContext) -> Tensor:
        """Mix positions.

        Args:
            x_BTD: states of all positions, normed.
            context: masks, rotation and cache that all layers share.

        Returns:
            (B, T, D) in the dtype of the input.
        """
        # Contiguous: otherwise both projections would copy it.
        content_BTD = x_BTD[:, : x_BTD.shape[1] - context.num_predicted].contiguous()
        q_BTHK = self._project_queries(x_BTD)
        k_BTGK, v_BTGK = self._project_keys_values(content_BTD)
        _, k_BSGK, v_BSGK = context.rotate_and_cache(
            self.layer_type, self.layer, False, q_BTHK, k_BTGK, v_BTGK
        )
        bias_BHTS = self._compute_distance_scores(q_BTHK, context) + self._compute_segment_scores(
            q_BTHK, k_BSGK.shape[1], context
        )
        mask = context.masks[self.layer_type]
        assert isinstance(mask, AttentionMask), (
            "choose_attention_kernel gives distance scores a table"
        )
        # The kernel scales products of queries and keys, but not a bias.
        mask = mask.add_bias(self.scale * bias_BHTS)
        return self._compute_attention_output(
            x_BTD, add_bias(q_BTHK, self.content_bias), k_BSGK, v_BSGK, mask, self.sinks
        )

    def _compute_distance_scores(self, q_BTHK: Tensor, context: ForwardContext) -> Tensor:
        """Return (q + v) · W r of every pair, (B, H, T, S): one product with all distances, then
        a gather.
        """
        assert context.distances_RD is not None
        r_RHK = self.position_proj(context.distances_RD).unflatten(-1, (self.heads, -1))
        scores_BHTR = torch.einsum("bthk,rhk->bhtr", add_bias(q_BTHK, self.position_bias), r_RHK)
        queries = q_BTHK.shape[1] - context.num_predicted
        keys = r_RHK.shape[0] - queries + 1
        # Query t is at position S - T + t, so key s is S - T + t - s back, which is row T - 1 - t +
        # s.
        rows_TS = (
            torch.arange(keys, device=q_BTHK.device)
            + torch.arange(queries - 1, -1, -1, device=q_BTHK.device)[:, None]
        )
        if context.predicted_BP is None:
            return scores_BHTR.gather(-1, rows_TS.expand(*scores_BHTR.shape[:2], -1, -1))
        rows_BTS = append_places(rows_TS, context.predicted_BP)
        return scores_BHTR.gather(-1, rows_BTS[:, None].expand(-1, self.heads, -1, -1))

    def _compute_segment_scores(self, q_BTHK: Tensor, keys: int, context: ForwardContext) -> Tensor:
        """Return (q + s) · e, with row 0 of e for the same segment and the last row for another
        one.
        """
        if self.segment_embed is None:
            return q_BTHK.new_zeros(())
        scores_BHTE = torch.einsum(
            "bthk,ehk->bhte", add_bias(q_BTHK, self.segment_bias), self.segment_embed
        )
        if context.segments is None:
            # Without segments all tokens are of the same one.
            return scores_BHTE[..., :1]
        own_BT, all_BS = context.segments
        differ_BTS = (own_BT[:, :, None] != all_BS[:, None, :]).long() * (scores_BHTE.shape[-1] - 1)
        return scores_BHTE.gather(-1, differ_BTS[:, None].expand(-1, self.heads, -1, keys))


def add_bias(q_BTHK: Tensor, bias_HK: Tensor | None) -> Tensor:
    """Add the trained vector of each head to the queries of some scores (Dai 2019, 3.3: u and v).

    Args:
        q_BTHK: Queries.
        bias_HK: The vector of each head. None: there is none.

    Returns:
        (B, T, H, K).
    """
    return q_BTHK if bias_HK is None else q_BTHK + bias_HK
