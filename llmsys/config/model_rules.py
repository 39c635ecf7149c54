"""What a ModelConfig refuses: values that are legal one by one but cannot be built together.

Each rule names the field, the rule and the nearest value that would do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from llmsys.config.rule import Violation, list_divisors, format_choices, find_nearest, find_nearest_multiples

if TYPE_CHECKING:
    from llmsys.config.model import ModelConfig

HEADS_OF = {
    "decoder": ("lm",),
    "encoder": ("mlm", "classification", "features", "permutation"),
    "encoder_decoder": ("lm",),
}


def find_model_violations(model: ModelConfig) -> Iterator[Violation]:
    """Every broken rule of this model."""
    yield from _find_shape_violations(model)
    yield from _find_position_violations(model)
    yield from _find_family_violations(model)
    yield from _find_window_violations(model)
    yield from _find_expert_violations(model)


def _find_shape_violations(model: ModelConfig) -> Iterator[Violation]:
    heads, pairs = model.num_attention_heads, model.num_key_value_heads
    latent = model.attention.kind == "latent"
    if "head_dim" not in model.model_fields_set and model.hidden_size % heads and not latent:
        width, legal = model.hidden_size, list_divisors(model.hidden_size)
        near = [max(n for n in legal if n < heads), *[n for n in legal if n > heads][:1]]
        yield Violation(
            "num_attention_heads",
            f"{heads} does not divide hidden_size={width}. Use {format_choices(near)}, "
            f"or hidden_size={format_choices(find_nearest_multiples(width, heads))}, or set head_dim.",
        )
    if heads % pairs:
        yield Violation(
            "num_key_value_heads",
            f"{pairs} does not divide num_attention_heads={heads}. Use {find_nearest(pairs, list_divisors(heads))}.",
        )
    elif latent and pairs != heads:
        yield Violation("num_key_value_heads", f"latent attention has a key for each of the {heads} heads. Leave it out.")
    dense = model.num_dense_layers + (model.family == "encoder_decoder")
    if dense and not model.intermediate_size:
        yield Violation(
            "intermediate_size",
            f"{model.num_dense_layers} dense layers need a width above 0. "
            f"Set it, for example to {4 * model.hidden_size}.",
        )


def count_rotary_channels(model: ModelConfig) -> int:
    """Channels of a head that are rotated; 0 without rope."""
    if model.position.kind != "rope":
        return 0
    if model.attention.kind == "latent":
        return model.attention.qk_rope_head_dim
    return int(model.head_dim * model.position.fraction)


def _find_position_violations(model: ModelConfig) -> Iterator[Violation]:
    position = model.position
    if position.kind == "rope" and (rotated := count_rotary_channels(model)) % 2:
        if model.attention.kind == "latent":
            yield Violation("attention.qk_rope_head_dim", f"{rotated} is odd, and rope rotates pairs. Use {rotated + 1}.")
        elif position.fraction == 1:
            yield Violation(
                "head_dim",
                f"{rotated} is odd, and rope rotates pairs of channels. Use {rotated + 1}, or position.kind=none.",
            )
        else:
            yield Violation(
                "position.fraction",
                f"{position.fraction} of {model.head_dim} channels are {rotated}, and rope rotates pairs. "
                f"Use {(rotated + 1) / model.head_dim}.",
            )
    if model.attention.kind == "latent" and position.kind not in ("rope", "none"):
        yield Violation("position.kind", f"latent attention keeps channels for rope, not for {position.kind}. Use rope.")
    if position.kind == "rope" and position.scaling.kind == "longrope":
        waves = count_rotary_channels(model) // 2
        for name in ("short_factor", "long_factor"):
            if (given := len(getattr(position.scaling, name))) != waves:
                yield Violation(f"position.scaling.{name}", f"{given} divisors for {waves} waves. Give {waves}.")
    if position.kind == "sinusoidal" and model.hidden_size % 2:
        yield Violation(
            "hidden_size", f"{model.hidden_size} is odd, and sines come with cosines. Use {model.hidden_size + 1}."
        )


def _find_family_violations(model: ModelConfig) -> Iterator[Violation]:
    legal = HEADS_OF[model.family]
    if model.head.kind not in legal:
        yield Violation("head.kind", f"{model.head.kind} does not belong to family={model.family}. Use {format_choices(legal)}.")
    if model.head.kind == "mlm" and model.head.next_sentence and not model.head.pooler:
        yield Violation("head.next_sentence", "it reads the pooler, which is missing. Set head.pooler=true.")
    if model.encoder is not None and model.family != "encoder_decoder":
        yield Violation("encoder", f"family={model.family} has no second stack. Leave it out, or use encoder_decoder.")
    if model.embedding.source_vocab_size is not None and model.family != "encoder_decoder":
        yield Violation("embedding.source_vocab_size", f"family={model.family} has no source. Leave it out.")
    if model.encoder is not None and (own := model.encoder.num_attention_heads) and model.hidden_size % own:
        near = find_nearest(own, list_divisors(model.hidden_size))
        yield Violation(
            "encoder.num_attention_heads", f"{own} does not divide hidden_size={model.hidden_size}. Use {near}."
        )
    if model.multi_token_prediction is not None and model.family != "decoder":
        yield Violation("multi_token_prediction", f"family={model.family} predicts no next token. Use null.")
    if model.multi_token_prediction is not None and model.residual.kind not in ("pre", "sandwich", "output"):
        yield Violation("multi_token_prediction", f"it needs residual.kind=pre, not {model.residual.kind}. Use null.")


def _find_window_violations(model: ModelConfig) -> Iterator[Violation]:
    if "sliding_attention" in model.layer_types and model.sliding_window is None:
        yield Violation(
            "sliding_window", "layer_types has sliding_attention, and its width is missing. Set it, e.g. to 4096."
        )
    if len(model.layer_types) > model.num_hidden_layers:
        yield Violation(
            "layer_types",
            f"{len(model.layer_types)} kinds for num_hidden_layers={model.num_hidden_layers}. "
            f"Give {model.num_hidden_layers}, or a shorter list that repeats.",
        )


def _find_expert_violations(model: ModelConfig) -> Iterator[Violation]:
    if model.moe is None:
        return
    last = model.num_hidden_layers - 1
    if not model.num_moe_layers and model.moe.first_dense_layers > last:
        yield Violation(
            "moe.first_dense_layers",
            f"{model.moe.first_dense_layers} leaves none of the {last + 1} layers to the experts. "
            f"Use at most {last}, or set moe to null.",
        )
    elif not model.num_moe_layers:
        if model.moe.every > last + 1:
            layers = f"{model.moe.every} is more than num_hidden_layers={last + 1}"
            yield Violation(
                "moe.every", f"{layers}, and no layer has experts. Use at most {last + 1}, or set moe to null."
            )
        else:
            yield Violation("moe.dense_layers", "no layer is left to the experts. Use fewer, or set moe to null.")
    for layer in model.moe.dense_layers:
        if not 0 <= layer <= last:
            yield Violation("moe.dense_layers", f"there is no layer {layer}. Use numbers from 0 to {last}.")
