"""What a ModelConfig refuses: values that are legal one by one but cannot be built together.

Each rule names the field, the rule and the nearest value that would do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from llmsys.config.rule import Broken, divisors, listed, nearest, nearest_multiples

if TYPE_CHECKING:
    from llmsys.config.model import ModelConfig

HEADS_OF = {
    "decoder": ("lm",),
    "encoder": ("mlm", "classification", "features", "permutation"),
    "encoder_decoder": ("lm",),
}


def model_problems(model: ModelConfig) -> Iterator[Broken]:
    """Every broken rule of this model."""
    yield from _shape_problems(model)
    yield from _position_problems(model)
    yield from _family_problems(model)
    yield from _window_problems(model)
    yield from _expert_problems(model)


def _shape_problems(model: ModelConfig) -> Iterator[Broken]:
    heads, pairs = model.num_attention_heads, model.num_key_value_heads
    latent = model.attention.kind == "latent"
    if "head_dim" not in model.model_fields_set and model.hidden_size % heads and not latent:
        width, legal = model.hidden_size, divisors(model.hidden_size)
        near = [max(n for n in legal if n < heads), *[n for n in legal if n > heads][:1]]
        yield Broken(
            "num_attention_heads",
            f"{heads} does not divide hidden_size={width}. Use {listed(near)}, "
            f"or hidden_size={listed(nearest_multiples(width, heads))}, or set head_dim.",
        )
    if heads % pairs:
        yield Broken(
            "num_key_value_heads",
            f"{pairs} does not divide num_attention_heads={heads}. Use {nearest(pairs, divisors(heads))}.",
        )
    elif latent and pairs != heads:
        yield Broken("num_key_value_heads", f"latent attention has a key for each of the {heads} heads. Leave it out.")
    dense = model.num_dense_layers + (model.family == "encoder_decoder")
    if dense and not model.intermediate_size:
        yield Broken(
            "intermediate_size",
            f"{model.num_dense_layers} dense layers need a width above 0. "
            f"Set it, for example to {4 * model.hidden_size}.",
        )


def rotated_channels(model: ModelConfig) -> int:
    """Channels of a head that are rotated; 0 without rope."""
    if model.position.kind != "rope":
        return 0
    if model.attention.kind == "latent":
        return model.attention.qk_rope_head_dim
    return int(model.head_dim * model.position.fraction)


def _position_problems(model: ModelConfig) -> Iterator[Broken]:
    position = model.position
    if position.kind == "rope" and (rotated := rotated_channels(model)) % 2:
        if model.attention.kind == "latent":
            yield Broken("attention.qk_rope_head_dim", f"{rotated} is odd, and rope rotates pairs. Use {rotated + 1}.")
        elif position.fraction == 1:
            yield Broken(
                "head_dim",
                f"{rotated} is odd, and rope rotates pairs of channels. Use {rotated + 1}, or position.kind=none.",
            )
        else:
            yield Broken(
                "position.fraction",
                f"{position.fraction} of {model.head_dim} channels are {rotated}, and rope rotates pairs. "
                f"Use {(rotated + 1) / model.head_dim}.",
            )
    if model.attention.kind == "latent" and position.kind not in ("rope", "none"):
        yield Broken("position.kind", f"latent attention keeps channels for rope, not for {position.kind}. Use rope.")
    if position.kind == "rope" and position.scaling.kind == "longrope":
        waves = rotated_channels(model) // 2
        for name in ("short_factor", "long_factor"):
            if (given := len(getattr(position.scaling, name))) != waves:
                yield Broken(f"position.scaling.{name}", f"{given} divisors for {waves} waves. Give {waves}.")
    if position.kind == "sinusoidal" and model.hidden_size % 2:
        yield Broken(
            "hidden_size", f"{model.hidden_size} is odd, and sines come with cosines. Use {model.hidden_size + 1}."
        )


def _family_problems(model: ModelConfig) -> Iterator[Broken]:
    legal = HEADS_OF[model.family]
    if model.head.kind not in legal:
        yield Broken("head.kind", f"{model.head.kind} does not belong to family={model.family}. Use {listed(legal)}.")
    if model.head.kind == "mlm" and model.head.next_sentence and not model.head.pooler:
        yield Broken("head.next_sentence", "it reads the pooler, which is missing. Set head.pooler=true.")
    if model.encoder is not None and model.family != "encoder_decoder":
        yield Broken("encoder", f"family={model.family} has no second stack. Leave it out, or use encoder_decoder.")
    if model.embedding.source_vocab_size is not None and model.family != "encoder_decoder":
        yield Broken("embedding.source_vocab_size", f"family={model.family} has no source. Leave it out.")
    if model.encoder is not None and (own := model.encoder.num_attention_heads) and model.hidden_size % own:
        near = nearest(own, divisors(model.hidden_size))
        yield Broken(
            "encoder.num_attention_heads", f"{own} does not divide hidden_size={model.hidden_size}. Use {near}."
        )
    if model.multi_token_prediction is not None and model.family != "decoder":
        yield Broken("multi_token_prediction", f"family={model.family} predicts no next token. Use null.")
    if model.multi_token_prediction is not None and model.residual.kind not in ("pre", "sandwich", "output"):
        yield Broken("multi_token_prediction", f"it needs residual.kind=pre, not {model.residual.kind}. Use null.")


def _window_problems(model: ModelConfig) -> Iterator[Broken]:
    if "sliding_attention" in model.layer_types and model.sliding_window is None:
        yield Broken(
            "sliding_window", "layer_types has sliding_attention, and its width is missing. Set it, e.g. to 4096."
        )
    if len(model.layer_types) > model.num_hidden_layers:
        yield Broken(
            "layer_types",
            f"{len(model.layer_types)} kinds for num_hidden_layers={model.num_hidden_layers}. "
            f"Give {model.num_hidden_layers}, or a shorter list that repeats.",
        )


def _expert_problems(model: ModelConfig) -> Iterator[Broken]:
    if model.moe is None:
        return
    last = model.num_hidden_layers - 1
    if not model.num_moe_layers and model.moe.first_dense_layers > last:
        yield Broken(
            "moe.first_dense_layers",
            f"{model.moe.first_dense_layers} leaves none of the {last + 1} layers to the experts. "
            f"Use at most {last}, or set moe to null.",
        )
    elif not model.num_moe_layers:
        if model.moe.every > last + 1:
            layers = f"{model.moe.every} is more than num_hidden_layers={last + 1}"
            yield Broken(
                "moe.every", f"{layers}, and no layer has experts. Use at most {last + 1}, or set moe to null."
            )
        else:
            yield Broken("moe.dense_layers", "no layer is left to the experts. Use fewer, or set moe to null.")
    for layer in model.moe.dense_layers:
        if not 0 <= layer <= last:
            yield Broken("moe.dense_layers", f"there is no layer {layer}. Use numbers from 0 to {last}.")
