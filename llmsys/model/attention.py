"""Causal self-attention with grouped key-value heads (GQA), over any mask, with or without a cache."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.model import ModelConfig
from llmsys.model import cpu_attention
from llmsys.model.cache import KeyValueCache
from llmsys.model.rotary import Rotation

# B rows, T query positions, S key positions, D width, H query heads, G key-value heads, K width of a head


@dataclass(frozen=True)
class AttentionContext:
    """What all layers of one forward pass share. Not a tensor, so that no wrapper casts what is inside."""

    rotation: Rotation | None = None
    mask_B1TS: Tensor | None = None
    cache: KeyValueCache | None = None


class Attention(nn.Module):
    """softmax(q k^T / sqrt(K)) v with H query heads, each G-th part of them sharing keys and values (Ainslie 2023)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        query_width = config.num_attention_heads * config.head_dim
        key_value_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_value_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_value_width, bias=False)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor, context: AttentionContext) -> Tensor:
        """Mix positions; same shape and dtype as the input."""
        q_BTHK = self._heads(self.q_proj(x_BTD))
        k_BSGK = self._heads(self.k_proj(x_BTD))
        v_BSGK = self._heads(self.v_proj(x_BTD))
        if context.rotation is not None:
            q_BTHK, k_BSGK = context.rotation(q_BTHK), context.rotation(k_BSGK)
        if context.cache is not None:
            k_BSGK, v_BSGK = context.cache.extend(self.layer, k_BSGK, v_BSGK)
        y_BTHK = attend(q_BTHK, k_BSGK, v_BSGK, context.mask_B1TS)
        mixed: Tensor = self.o_proj(y_BTHK.flatten(2))
        return mixed

    def _heads(self, x_BTW: Tensor) -> Tensor:
        return x_BTW.view(*x_BTW.shape[:-1], -1, self.head_dim)


def attend(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, mask_B1TS: Tensor | None) -> Tensor:
    """Scaled dot-product attention, shape (B, T, H, K); no mask means causal, and then T = S."""
    if cpu_attention.suits(q_BTHK, k_BSGK):
        return cpu_attention.chunked_attention(q_BTHK, k_BSGK, v_BSGK, mask_B1TS)
    q_BHTK, k_BGSK, v_BGSK = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
    grouped = q_BHTK.shape[1] != k_BGSK.shape[1]
    y_BHTK = F.scaled_dot_product_attention(
        q_BHTK, k_BGSK, v_BGSK, attn_mask=mask_B1TS, is_causal=mask_B1TS is None, enable_gqa=grouped
    )
    return y_BHTK.transpose(1, 2)
