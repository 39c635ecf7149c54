"""Transformer-XL's segments with memory (Dai 2019, arXiv:1901.02860, 3.2), all segments of a row at
once.

The authors run one segment after another and keep the hidden states of every layer. Those states
are the ones that a pass over the whole row computes, so a mask shows the memory and a second
projection cuts its gradient.

Invariants:
- A position sees states of at most `memory_length` positions before its segment, and their gradient
  ends there: the projections of keys and values learn from the memory, the layers below do not.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from llmsys.config.model import ModelConfig
from llmsys.config.position import TransformerXlPositionConfig
from llmsys.config.segment_memory import SegmentMemoryAttentionConfig
from llmsys.model.attention_mask import AttentionMask
from llmsys.model.forward_context import ForwardContext
from llmsys.model.relative_attention import RelativeAttention, add_bias
from llmsys.model.scaled_dot_product import compute_attention

# B rows, T positions, D width, H query heads, G key-value heads, K width of a head,
# N = B · segments of L queries, M memory positions, S = M + L keys of a segment

# Document of what fills the last segment, which sees itself alone, and of what is before a row,
# which nothing sees.
FILL = -1 << 40
OUTSIDE = (-1 << 40) - 1


class SegmentMemoryAttention(RelativeAttention):
    """Relative attention within a segment and to the memory before it."""

    def __init__(
        self, config: ModelConfig, attention: SegmentMemoryAttentionConfig, layer: int
    ) -> None:
        assert isinstance(config.position, TransformerXlPositionConfig), "the config asks for it"
        super().__init__(config, attention.projections, config.position, layer)
        self.attention = attention

    def forward(self, x_BTD: Tensor, context: ForwardContext) -> Tensor:
        """Mix positions.

        Args:
            x_BTD: states of all positions, normed.
            context: masks, rotation and cache that all layers share.

        Returns:
            (B, T, D) in the dtype of the input.
        """
        q_BTHK = self._project_queries(x_BTD)
        k_BTGK, v_BTGK = self._project_keys_values(x_BTD)
        if context.cache is not None:
            _, k_BSGK, v_BSGK = context.rotate_and_cache(
                self.layer_type, self.layer, False, q_BTHK, k_BTGK, v_BTGK
            )
            mask = self._build_cached_mask(context.cache.padding_B, q_BTHK.shape[1], k_BSGK)
            y_BTHK = self._compute_output(q_BTHK, k_BSGK, v_BSGK, mask, context)
        else:
            y_BTHK = self._compute_segment_outputs(x_BTD, q_BTHK, k_BTGK, v_BTGK, context)
        mixed_BTD: Tensor = self.o_proj(y_BTHK.flatten(2))
        return mixed_BTD

    def _compute_segment_outputs(
        self, x_BTD: Tensor, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, context: ForwardContext
    ) -> Tensor:
        rows, length = q_BTHK.shape[:2]
        blocks, queries, memory = self.attention.fold_row(length)
        fill = blocks * queries - length
        q_NLHK, k_NLGK, v_NLGK = (
            _fold(_pad(x, 0, fill), queries) for x in (q_BTHK, k_BTGK, v_BTGK)
        )
        if memory:
            # The memory's states get no gradient, the projections do (Dai 2019, 3.2: SG). Without
            # one, nothing to cut.
            cut = (
                self._project_keys_values(x_BTD.detach())
                if torch.is_grad_enabled()
                else (k_BTGK, v_BTGK)
            )
            k_NLGK, v_NLGK = (
                torch.cat([_list_memories(x, memory, queries, blocks), own], dim=1)
                for x, own in zip(cut, (k_NLGK, v_NLGK), strict=True)
            )
        mask = self._build_segment_mask(context.documents_BT, x_BTD, blocks, queries, memory)
        y_NLHK = self._compute_output(q_NLHK, k_NLGK, v_NLGK, mask, context)
        return y_NLHK.reshape(rows, -1, *y_NLHK.shape[2:])[:, :length]

    def _build_segment_mask(
        self, documents_BT: Tensor | None, x_BTD: Tensor, blocks: int, queries: int, memory: int
    ) -> AttentionMask:
        """Return the visible keys of every segment, (N, 1, L, S): earlier ones of the own
        document.
        """
        if documents_BT is None:
            documents_BT = torch.zeros(1, x_BTD.shape[1], dtype=torch.int64, device=x_BTD.device)
        padded_BT = F.pad(documents_BT, (0, blocks * queries - x_BTD.shape[1]), value=FILL)
        own_NL = padded_BT.reshape(-1, queries)
        keys_NS = (
            F.pad(padded_BT, (memory, 0), value=OUTSIDE)
            .unfold(1, memory + queries, queries)
            .flatten(0, 1)
        )
        earlier_LS = torch.ones(
            queries, memory + queries, dtype=torch.bool, device=x_BTD.device
        ).tril(memory)
        visible_NLS = (own_NL[:, :, None] == keys_NS[:, None]) & earlier_LS
        # Without documents all rows have one mask.
        return AttentionMask(
            visible_B1TS=visible_NLS.repeat(len(x_BTD) // len(documents_BT), 1, 1)[:, None]
        )

    def _build_cached_mask(self, padding_B: Tensor, new: int, k_BSGK: Tensor) -> AttentionMask:
        """Return the visible keys of the last `new` positions. Segments count from the first
        position of each row.
        """
        keys_S = torch.arange(k_BSGK.shape[1], device=k_BSGK.device)
        queries_T = keys_S[-new:, None]
        start_B11 = padding_B.to(k_BSGK.device)[:, None, None]
        places_BT1 = queries_T - start_B11
        segments_BT1 = places_BT1 - places_BT1 % self.attention.segment_length
        visible_BTS = (
            keys_S - start_B11 >= (segments_BT1 - self.attention.memory_length).clamp(min=0)
        ) & (keys_S <= queries_T)
        # A padded query sees itself: a row without any key would be 0/0.
        return AttentionMask(visible_B1TS=(visible_BTS | (keys_S == queries_T))[:, None])

    def _compute_output(
        self,
        q_BTHK: Tensor,
        k_BSGK: Tensor,
        v_BSGK: Tensor,
        mask: AttentionMask,
        context: ForwardContext,
    ) -> Tensor:
        bias_BHTS = self.scale * self._compute_distance_scores(q_BTHK, context)
        return compute_attention(
            add_bias(q_BTHK, self.content_bias),
            k_BSGK,
            v_BSGK,
            mask.add_bias(bias_BHTS),
            scale=self.scale,
            dropout=self.dropout if self.training else 0.0,
        )


def _pad(x_BTGK: Tensor, before: int, after: int) -> Tensor:
    return F.pad(x_BTGK, (0, 0, 0, 0, before, after)) if before or after else x_BTGK


def _fold(x_BTGK: Tensor, queries: int) -> Tensor:
    folded_NLGK: Tensor = x_BTGK.unflatten(1, (-1, queries))
    return folded_NLGK.flatten(0, 1)


def _list_memories(x_BTGK: Tensor, memory: int, queries: int, blocks: int) -> Tensor:
    """Return the `memory` positions before every segment, (N, M, G, K); zeros where they are
    before the row.
    """
    # Nothing is before the first segment, and the last one is no memory.
    padded = _pad(x_BTGK[:, : (blocks - 1) * queries], memory, 0)
    return padded.unfold(1, memory, queries).movedim(-1, 2).flatten(0, 1)
