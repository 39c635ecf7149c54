"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, 2.1).

Keys and values are projected from one small latent vector. Queries and keys have channels without
rotation and rotated channels; the rotated key is shared by all heads. The cache holds the latent
and the rotated key, nothing per head.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from llmsys.config.attention import LatentAttentionConfig
from llmsys.config.model import ModelConfig
from llmsys.config.parametrization_factors import compute_score_factor
from llmsys.config.position import RopeConfig, YarnRopeScalingConfig
from llmsys.model.attention_logits import LogitRecorder
from llmsys.model.attention_mask import AttentionMask
from llmsys.model.forward_context import ForwardContext
from llmsys.model.lightning_indexer import LightningIndexer, expand_visible_keys
from llmsys.model.local_tensor import get_local_tensor
from llmsys.model.normalization import RMSNorm
from llmsys.model.rotary_embedding import compute_yarn_mscale
from llmsys.model.scaled_dot_product import compute_attention

# B rows, T query positions, S key positions, D width, H heads, C width of the latent, R rotated
# channels, N channels that are not, V width of a value


class _IndexedKeys(NamedTuple):
    """Scores of an indexer, (B, T, S), and the keys that attention sees."""

    scores_BTS: Tensor
    mask: AttentionMask


class MultiHeadLatentAttention(nn.Module):
    """q = [q_nope; rotated q_rope], k = [k_nope(latent); rotated k_rope], v = v(latent)."""

    def __init__(self, config: ModelConfig, attention: LatentAttentionConfig, layer: int) -> None:
        """Build the projections on the current default device.

        Args:
            config: Heads, width and dropout of the model.
            attention: Ranks of the latents and widths of a head's parts.
            layer: Index of the layer, from 0. It decides on rotation and mask, and is the key of
                its entries in a cache.
        """
        super().__init__()
        self.layer = layer
        self.layer_type = config.get_layer_type(layer)
        self.rotates = config.uses_rope(layer)
        self.heads = config.num_attention_heads
        self.dropout = config.dropout.attention
        self.nope = attention.qk_nope_head_dim
        self.rope = attention.qk_rope_head_dim
        self.latent = attention.kv_lora_rank
        self.value = attention.v_head_dim
        self.scale = compute_mla_scale(config, attention)
        width = config.hidden_size
        bias = attention.bias
        eps = attention.norm_eps
        queries = self.heads * (self.nope + self.rope)
        if attention.q_lora_rank is None:
            self.q_proj = nn.Linear(width, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, attention.q_lora_rank, bias=bias)
            self.q_a_norm = RMSNorm(attention.q_lora_rank, eps)
            self.q_b_proj = nn.Linear(attention.q_lora_rank, queries, bias=False)
        self.kv_a_proj = nn.Linear(width, self.latent + self.rope, bias=bias)
        self.kv_a_norm = RMSNorm(self.latent, eps)
        self.kv_b_proj = nn.Linear(self.latent, self.heads * (self.nope + self.value), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, width, bias=bias)
        self.has_query_latent = attention.q_lora_rank is not None
        self.indexer: LightningIndexer | None = None
        if attention.sparse is not None and attention.q_lora_rank is not None:
            self.indexer = LightningIndexer(config, attention.sparse, attention.q_lora_rank, layer)
        self.logit_recorder: LogitRecorder | None = None

    def forward(self, x_BTD: Tensor, context: ForwardContext) -> Tensor:
        """Mix positions.

        Args:
            x_BTD: states of all positions, normed.
            context: masks, rotation and cache that all layers share.

        Returns:
            (B, T, D) in the dtype of the input.
        """
        queries, query_latent_BTC = self._project_queries(x_BTD)
        q_BTHN, q_BTHR = queries.split([self.nope, self.rope], dim=-1)
        latent_BTC, k_BTR = self.kv_a_proj(x_BTD).split([self.latent, self.rope], dim=-1)
        q_BTHR, k_BS1R, latent_BSC = context.rotate_and_cache(
            self.layer_type,
            self.layer,
            self.rotates,
            q_BTHR,
            k_BTR.unsqueeze(2),
            self.kv_a_norm(latent_BTC),
        )
        # With a cache there are few queries and many keys: it is cheaper to project the queries
        # into the latent space.
        mix = (
            self._compute_expanded_attention
            if latent_BSC.shape[1] == q_BTHR.shape[1]
            else self._compute_absorbed_attention
        )
        index: _IndexedKeys | None = None
        if self.indexer is not None and (self.training or self.indexer.selects):
            index = self._choose_keys(self.indexer, x_BTD, query_latent_BTC, context)
        mixed: Tensor = self.o_proj(
            mix(q_BTHN, q_BTHR, latent_BSC, k_BS1R, context, index).flatten(2)
        )
        return mixed

    def _project_queries(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries of every head, and what they are projected from."""
        latent_BTC = self.q_a_norm(self.q_a_proj(x_BTD)) if self.has_query_latent else x_BTD
        q = self.q_b_proj(latent_BTC) if self.has_query_latent else self.q_proj(latent_BTC)
        return q.unflatten(-1, (-1, self.nope + self.rope)), latent_BTC

    def _choose_keys(
        self,
        indexer: LightningIndexer,
        x_BTD: Tensor,
        query_latent_BTC: Tensor,
        context: ForwardContext,
    ) -> _IndexedKeys:
        mask = context.masks[self.layer_type]
        assert isinstance(mask, AttentionMask), "choose_attention_kernel gives it a table"
        scores_BTS = indexer.compute_scores(x_BTD, query_latent_BTC, context)
        shown_BTS = indexer.select_keys(scores_BTS, expand_visible_keys(mask, scores_BTS))
        return _IndexedKeys(scores_BTS, AttentionMask(mask.causal, shown_BTS.unsqueeze(1)))

    def _compute_expanded_attention(
        self,
        q_BTHN: Tensor,
        q_BTHR: Tensor,
        latent_BSC: Tensor,
        k_BS1R: Tensor,
        context: ForwardContext,
        index: _IndexedKeys | None,
    ) -> Tensor:
        """Expand the keys and values of every head, as in training."""
        keys_values = self.kv_b_proj(latent_BSC).unflatten(-1, (-1, self.nope + self.value))
        k_BSHN, v_BSHV = keys_values.split([self.nope, self.value], dim=-1)
        k = torch.cat([k_BSHN, k_BS1R.expand(-1, -1, k_BSHN.shape[2], -1)], dim=-1)
        return self._compute_masked_attention(
            torch.cat([q_BTHN, q_BTHR], dim=-1), k, v_BSHV, context, index
        )

    def _compute_absorbed_attention(
        self,
        q_BTHN: Tensor,
        q_BTHR: Tensor,
        latent_BSC: Tensor,
        k_BS1R: Tensor,
        context: ForwardContext,
        index: _IndexedKeys | None,
    ) -> Tensor:
        """Attend to latents: q · (W_k latent) = (W_kᵀ q) · latent is multi-query attention
        (DeepSeek-V2, 2.1.2).
        """
        # Not through the module: the absorbed form multiplies with slices of the weight.
        weight = get_local_tensor(self.kv_b_proj.weight).unflatten(0, (-1, self.nope + self.value))
        keys_HNC, values_HVC = weight.split([self.nope, self.value], dim=1)
        q_BTHC = torch.einsum("bthn,hnc->bthc", q_BTHN, keys_HNC)
        latent_BS1C = latent_BSC.unsqueeze(2)
        k = torch.cat([latent_BS1C, k_BS1R], dim=-1)
        y_BTHC = self._compute_masked_attention(
            torch.cat([q_BTHC, q_BTHR], dim=-1), k, latent_BS1C, context, index
        )
        return torch.einsum("bthc,hvc->bthv", y_BTHC, values_HVC)

    def _compute_masked_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: ForwardContext,
        index: _IndexedKeys | None,
    ) -> Tensor:
        if self.logit_recorder is not None and self.training:
            self.logit_recorder.record(q, k, self.scale, context.heads)
        dropout = self.dropout if self.training else 0.0
        mask = context.masks[self.layer_type] if index is None else index.mask
        if self.training and self.indexer is not None and index is not None:
            self.indexer.record_loss(
                index.scores_BTS, q, k, index.mask, self.scale, context.real_BT
            )
        return compute_attention(q, k, v, mask, scale=self.scale, dropout=dropout)


def compute_mla_scale(config: ModelConfig, attention: LatentAttentionConfig) -> float:
    """Return the factor on the scores of latent attention.

    DeepSeek applies a part of YaRN's factor here, where it reaches the channels without rotation
    too.

    Args:
        config: The model; its position may scale by YaRN.
        attention: The latent attention.

    Returns:
        1 / sqrt(N + R), under YaRN with `mscale_all_dim` times its mscale squared.
    """
    width = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    if attention.scale is not None:
        return attention.scale * compute_score_factor(config, width, has_own_scale=True)
    scale = float(width**-0.5) * compute_score_factor(config, width)
    scaling = config.position.scaling if isinstance(config.position, RopeConfig) else None
    if isinstance(scaling, YarnRopeScalingConfig) and scaling.mscale_all_dim:
        scale *= compute_yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2
    return scale
