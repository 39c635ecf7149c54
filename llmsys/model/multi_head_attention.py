"""Multi-head self-attention and cross-attention.

Fewer key-value heads than query heads make it grouped-query (GQA) or multi-query attention (MQA).
"""

import torch
from torch import Tensor, nn

from llmsys.config.attention import MultiHeadAttentionConfig
from llmsys.config.model import ModelConfig
from llmsys.config.parametrization_factors import compute_score_factor
from llmsys.model.attention_logits import LogitRecorder
from llmsys.model.attention_mask import LayerMask
from llmsys.model.embedding import TokenEmbedding
from llmsys.model.forward_context import ForwardContext
from llmsys.model.normalization import build_norm
from llmsys.model.scaled_dot_product import compute_attention

# B rows, T query positions, S key positions, D width, H query heads, G key-value heads, K width of
# a head


class AttentionProjections(nn.Module):
    """The four projections with their norms, and the settings of the scores."""

    def __init__(
        self, config: ModelConfig, attention: MultiHeadAttentionConfig, layer: int
    ) -> None:
        """Build the projections on the current default device.

        Args:
            config: Heads, width and dropout of the model.
            attention: Biases, norms, scale and caps of the scores.
            layer: Index of the layer, from 0; the key of its entries in a cache.
        """
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.heads = config.num_attention_heads
        has_own_scale = attention.scale is not None
        self.scale = config.head_dim**-0.5 if attention.scale is None else attention.scale
        self.scale *= compute_score_factor(config, config.head_dim, has_own_scale=has_own_scale)
        self.softcap = attention.logit_softcap
        self.clip = attention.clip
        self.dropout = config.dropout.attention
        hidden = config.hidden_size
        groups = config.num_key_value_heads
        self.q_proj = nn.Linear(hidden, self.heads * self.head_dim, bias=attention.qkv_bias)
        self.k_proj = nn.Linear(hidden, groups * self.head_dim, bias=attention.qkv_bias)
        self.v_proj = nn.Linear(hidden, groups * self.head_dim, bias=attention.qkv_bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=attention.output_bias)
        self.has_output_gate = attention.output_gate
        if self.has_output_gate:
            self.g_proj = nn.Linear(hidden, self.heads * self.head_dim, bias=attention.qkv_bias)
        self.norms = attention.qk_norm
        if self.norms != "none":
            full = self.norms == "full"
            self.q_norm = build_norm(config, self.heads * self.head_dim if full else self.head_dim)
            self.k_norm = build_norm(config, groups * self.head_dim if full else self.head_dim)

    def _project_queries(self, x_BTD: Tensor) -> Tensor:
        return self._split_heads(self.q_proj(x_BTD), self.q_norm if self.norms != "none" else None)

    def _project_keys_values(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        k_BSGK = self._split_heads(
            self.k_proj(x_BSD), self.k_norm if self.norms != "none" else None
        )
        return k_BSGK, self._split_heads(self.v_proj(x_BSD))

    def _split_heads(self, x_BTW: Tensor, norm: nn.Module | None = None) -> Tensor:
        """Split the last dim into heads, normed all at once (OLMo 2) or each on its own (Qwen3)."""
        if norm is not None and self.norms == "full":
            x_BTW = norm(x_BTW)
        x_BTHK: Tensor = x_BTW.unflatten(-1, (-1, self.head_dim))
        if norm is not None and self.norms == "head":
            x_BTHK = norm(x_BTHK)
        return x_BTHK if self.clip is None else x_BTHK.clamp(-self.clip, self.clip)

    def _compute_attention_output(
        self,
        x_BTD: Tensor,
        q_BTHK: Tensor,
        k_BSGK: Tensor,
        v_BSGK: Tensor,
        mask: LayerMask,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        y_BTHK = compute_attention(
            q_BTHK,
            k_BSGK,
            v_BSGK,
            mask,
            scale=self.scale,
            softcap=self.softcap,
            sinks_H=sinks_H,
            dropout=dropout,
        )
        y_BTW = y_BTHK.flatten(2)
        if self.has_output_gate:
            y_BTW = y_BTW * self.g_proj(x_BTD).sigmoid()
        mixed: Tensor = self.o_proj(y_BTW)
        return mixed


class MultiHeadAttention(AttentionProjections):
    """softmax(q kᵀ / sqrt(K)) v over one sequence; H / G query heads share a key-value head
    (Ainslie 2023).
    """

    def __init__(
        self, config: ModelConfig, attention: MultiHeadAttentionConfig, layer: int
    ) -> None:
        """Build the projections on the current default device.

        Args:
            config: Heads, width and dropout of the model.
            attention: Biases, norms, scale and caps of the scores, and sinks.
            layer: Index of the layer, from 0. It decides on window and rotation, and is the key of
                its entries in a cache.
        """
        super().__init__(config, attention, layer)
        self.layer_type = config.get_layer_type(layer)
        self.rotates = config.uses_rope(layer)
        self.sinks = nn.Parameter(torch.zeros(self.heads)) if attention.sinks else None
        self.logit_recorder: LogitRecorder | None = None
        self.value_embedding: TokenEmbedding | None = None
        if layer in config.embedding.value_layers:
            width = config.num_key_value_heads * config.head_dim
            self.value_embedding = TokenEmbedding(config.vocab_size, width)
            self.value_scale = nn.Parameter(torch.ones(1))

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
        if self.value_embedding is not None:
            e_BTW = self.value_scale * self.value_embedding(context.tokens_BT)
            v_BTGK = v_BTGK + e_BTW.unflatten(-1, (-1, self.head_dim))
        q_BTHK, k_BSGK, v_BSGK = context.rotate_and_cache(
            self.layer_type, self.layer, self.rotates, q_BTHK, k_BTGK, v_BTGK
        )
        if self.logit_recorder is not None and self.training:
            self.logit_recorder.record(q_BTHK, k_BSGK, self.scale, context.heads)
        sinks_H = None if self.sinks is None else self.sinks[context.heads]
        return self._compute_attention_output(
            x_BTD, q_BTHK, k_BSGK, v_BSGK, context.masks[self.layer_type], sinks_H
        )


class CrossAttention(AttentionProjections):
    """Queries from the decoder, keys and values from the encoder's last hidden states (Vaswani
    2017, 3.2.3).

    Without rotary embedding and sinks, which belong to positions of one sequence.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, config.attention.cross_attention, layer)

    def forward(self, x_BTD: Tensor, context: ForwardContext) -> Tensor:
        """Attend to the states of the encoder.

        Args:
            x_BTD: states of the decoder, normed.
            context: `memory` has the states of the encoder; with a cache their keys and values are
                computed once.

        Returns:
            (B, T, D) in the dtype of the input.
        """
        memory = context.memory
        assert memory is not None
        if context.cache is None:
            k_BSGK, v_BSGK = self._project_keys_values(memory.hidden_BSD)
        else:
            k_BSGK, v_BSGK = context.cache.get_or_compute_source_keys_values(
                self.layer, lambda: self._project_keys_values(memory.hidden_BSD)
            )
        return self._compute_attention_output(
            x_BTD, self._project_queries(x_BTD), k_BSGK, v_BSGK, context.cross_mask
        )
