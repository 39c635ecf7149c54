"""Gemma 2 and the text model of Gemma 3: norms around every branch, scaled embeddings, alternating windows."""

from llmsys.config.hugging_face.fields import Fields
from llmsys.config.hugging_face.parts import (
    Values,
    activation_name,
    attention_bias,
    attention_dropout,
    read_common,
    read_decoder_class,
    read_gated,
    read_layer_types,
    read_shape,
    rms,
    windows,
    write_layer_types,
    write_shape,
)
from llmsys.config.hugging_face.rope import read_rope, read_scaling, write_rope


def read_gemma2(fields: Fields) -> Values:
    """Every other layer slides, the first one too; scores and logits are capped."""
    values = _gemma(fields, "Gemma2", 2)
    fields.only("sliding_window_size", values.get("sliding_window"), None, why="sliding_window says another width")
    return values | {"position": read_rope(fields)}


def read_gemma3(fields: Fields) -> Values:
    """Every sixth layer is full and rotates by a base of its own; norms on queries and keys."""
    fields.defaults = fields.defaults | {"sliding_window_pattern": 6}
    pattern = fields.whole("sliding_window_pattern", "_sliding_window_pattern") or 1
    values = _gemma(fields, "Gemma3", pattern)
    values["attention"]["qk_norm"] = "head"
    return values | {"position": _two_bases(fields)}


def _gemma(fields: Fields, stem: str, pattern: int) -> Values:
    read_common(fields)
    fields.skip("hidden_act")  # hidden_activation is what counts
    fields.only("use_bidirectional_attention", False, None, why="a decoder looks back only")
    values = read_shape(fields)
    read_decoder_class(fields, stem, values["tie_word_embeddings"])
    layers, scalar = values["num_hidden_layers"], fields.positive("query_pre_attn_scalar")
    otherwise = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    attention = attention_bias(fields) | {"logit_softcap": fields.number_or_none("attn_logit_softcapping")}
    attention["scale"] = None if scalar == values.get("head_dim") else scalar**-0.5
    return values | windows(fields.whole_or_none("sliding_window"), read_layer_types(fields, layers, otherwise)) | {
        "intermediate_size": fields.whole("intermediate_size"),
        "norm": rms(fields, unit_offset=True),
        "residual": {"kind": "sandwich"},
        "attention": attention,
        "feed_forward": {"kind": read_gated(fields, "hidden_activation")},
        "embedding": {"scale": "sqrt_hidden_size"},
        "head": {"kind": "lm", "softcap": fields.number_or_none("final_logit_softcapping")},
        "dropout": attention_dropout(fields),
    }  # fmt: skip


def _two_bases(fields: Fields) -> Values:
    """One base for full layers, which may be stretched, and one for sliding layers, which may not."""
    nested = fields.section("rope_parameters", {})
    full, sliding = nested.section("full_attention", {}), nested.section("sliding_attention", {})
    old = fields.section("rope_scaling", {})
    if full.values and old.values:
        fields.refuse("rope_scaling", "is given beside rope_parameters. Keep rope_parameters.")
    theta = full.number_or_none("rope_theta") or fields.number_or_none("rope_theta") or 1e6
    local = sliding.number_or_none("rope_theta") or fields.number_or_none("rope_local_base_freq") or 1e4
    sliding.only("rope_type", "default", why="sliding layers are not stretched")
    scaling = read_scaling(old if old.values else full, fields)
    for inner in (full, sliding):
        nested.join(inner)
    for outer in (nested, old):
        fields.join(outer)
    return {"kind": "rope", "theta": theta, "sliding_theta": local, "scaling": scaling}


def _write_gemma(model: Values) -> Values:
    scale, width = model["attention"]["scale"], model["head_dim"]
    scalar = width if scale is None else scale**-2
    return write_shape(model) | {
        "intermediate_size": model["intermediate_size"],
        "hidden_activation": activation_name(model["feed_forward"]["kind"]),
        "attention_bias": model["attention"]["qkv_bias"],
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar,
        "attn_logit_softcapping": model["attention"]["logit_softcap"],
        "final_logit_softcapping": model["head"]["softcap"],
        "sliding_window": model["sliding_window"],
        "layer_types": write_layer_types(model),
    }


def write_gemma2(model: Values) -> Values:
    """As `read_gemma2` reads it."""
    return _write_gemma(model) | {"rope_parameters": write_rope(model["position"])}


def write_gemma3(model: Values) -> Values:
    """As `read_gemma3` reads it."""
    sliding = {"rope_type": "default", "rope_theta": model["position"]["sliding_theta"]}
    both = {"full_attention": write_rope(model["position"]), "sliding_attention": sliding}
    return _write_gemma(model) | {"rope_parameters": both}
