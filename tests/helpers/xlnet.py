"""transformers' XLNet with the weights of a model with Transformer-XL's positions, and gradients
to compare.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from llmsys.model.transformer import Transformer

THEIRS = {
    "embed.weight": "transformer.word_embedding.weight",
    "head.bias": "lm_loss.bias",
    "mask_embedding.weight": "transformer.mask_emb",
    "attention.q_proj.weight": "rel_attn.q",
    "attention.k_proj.weight": "rel_attn.k",
    "attention.v_proj.weight": "rel_attn.v",
    "attention.o_proj.weight": "rel_attn.o",
    "attention.position_proj.weight": "rel_attn.r",
    "attention.content_bias": "rel_attn.r_w_bias",
    "attention.position_bias": "rel_attn.r_r_bias",
    "attention.segment_bias": "rel_attn.r_s_bias",
    "attention.segment_embed": "rel_attn.seg_embed",
    "attention_norm": "rel_attn.layer_norm",
    "feed_forward.up_proj": "ff.layer_1",
    "feed_forward.down_proj": "ff.layer_2",
    "feed_forward_norm": "ff.layer_norm",
}


def build_xlnet(ours: Transformer, **changes: Any) -> Any:
    """Return their language model with the weights of ours, without dropout."""
    import transformers

    build_config: Any = transformers.XLNetConfig  # its keyword arguments are not typed
    values = ours.config
    theirs = transformers.XLNetLMHeadModel(
        build_config(
            vocab_size=values.vocab_size, d_model=values.hidden_size,
            n_layer=values.num_hidden_layers,
            n_head=values.num_attention_heads, d_inner=values.intermediate_size,
            ff_activation="gelu",
            layer_norm_eps=1e-12, dropout=0.0, untie_r=True, **changes,
        )
    )  # fmt: skip
    named = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            target = named[get_their_name(name)]
            target.copy_(
                parameter.T.reshape(target.shape) if is_turned(name) else parameter.view_as(target)
            )
    return theirs


def iter_gradients(ours: Transformer, theirs: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of every parameter, our gradient and theirs in our shape."""
    named = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        found = named[get_their_name(name)].grad
        assert parameter.grad is not None, name
        width = parameter.shape[-1]
        expected = found.reshape(width, -1).T if is_turned(name) else found.reshape(parameter.shape)
        yield name, parameter.grad, expected


def is_turned(name: str) -> bool:
    """Return whether their tensor has the input first: (D, H, K) instead of (H · K, D)."""
    return name.endswith(
        ("q_proj.weight", "k_proj.weight", "v_proj.weight", "position_proj.weight")
    )


def get_their_name(name: str) -> str:
    if not name.startswith("blocks."):
        return THEIRS[name]
    _, layer, rest = name.split(".", 2)
    if rest in THEIRS:
        return f"transformer.layer.{layer}.{THEIRS[rest]}"
    module, _, kind = rest.rpartition(".")
    return f"transformer.layer.{layer}.{THEIRS[module]}.{kind}"
