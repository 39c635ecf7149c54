"""Readers and writers of Gemma 2 and the text model of Gemma 3: sandwich norms, alternating windows."""

from llmsys.config.hugging_face.config_json import ConfigJsonReader
from llmsys.config.hugging_face.rope import read_rope, read_scaling, write_rope
from llmsys.config.hugging_face.shared_fields import (
    Values,
    build_window_values,
    check_common_keys,
    check_decoder_class,
    get_activation_name,
    read_attention_bias,
    read_attention_dropout,
    read_gated_kind,
    read_layer_types,
    read_rms_norm,
    read_shape,
    write_layer_types,
    write_shape,
)


def read_gemma2(fields: ConfigJsonReader) -> Values:
    """Read Gemma 2: sliding windows in layers 0, 2, 4, …, and soft caps on scores and logits."""
    values = _read_gemma_decoder(fields, "Gemma2", 2)
    fields.require_value(
        "sliding_window_size", values.get("sliding_window"), None, why="sliding_window has another value"
    )
    return values | {"position": read_rope(fields)}


def read_gemma3(fields: ConfigJsonReader) -> Values:
    """Read Gemma 3: full attention with its own RoPE base in every sixth layer, and query-key norms."""
    fields.defaults = fields.defaults | {"sliding_window_pattern": 6}
    pattern = fields.read_int("sliding_window_pattern", "_sliding_window_pattern") or 1
    values = _read_gemma_decoder(fields, "Gemma3", pattern)
    values["attention"]["qk_norm"] = "head"
    return values | {"position": _read_dual_rope(fields)}


def _read_gemma_decoder(fields: ConfigJsonReader, stem: str, pattern: int) -> Values:
    check_common_keys(fields)
    fields.ignore_keys("hidden_act")  # hidden_activation is what counts
    fields.require_value("use_bidirectional_attention", False, None, why="a decoder is causal")
    values = read_shape(fields)
    check_decoder_class(fields, stem, values["tie_word_embeddings"])
    layers, scalar = values["num_hidden_layers"], fields.read_positive_float("query_pre_attn_scalar")
    otherwise = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    attention = read_attention_bias(fields) | {"logit_softcap": fields.read_optional_float("attn_logit_softcapping")}
    attention["scale"] = None if scalar == values.get("head_dim") else scalar**-0.5
    layer_types = read_layer_types(fields, layers, otherwise)
    return values | build_window_values(fields.read_optional_int("sliding_window"), layer_types) | {
        "intermediate_size": fields.read_int("intermediate_size"),
        "norm": read_rms_norm(fields, unit_offset=True),
        "residual": {"kind": "sandwich"},
        "attention": attention,
        "feed_forward": {"kind": read_gated_kind(fields, "hidden_activation")},
        "embedding": {"scale": "sqrt_hidden_size"},
        "head": {"kind": "lm", "softcap": fields.read_optional_float("final_logit_softcapping")},
        "dropout": read_attention_dropout(fields),
    }  # fmt: skip


def _read_dual_rope(fields: ConfigJsonReader) -> Values:
    """Read the RoPE base and scaling of full layers, and the base of sliding layers, which cannot be scaled."""
    nested = fields.read_section("rope_parameters", {})
    full, sliding = nested.read_section("full_attention", {}), nested.read_section("sliding_attention", {})
    old = fields.read_section("rope_scaling", {})
    if full.values and old.values:
        fields.add_violation("rope_scaling", "is given beside rope_parameters. Keep rope_parameters.")
    theta = full.read_optional_float("rope_theta") or fields.read_optional_float("rope_theta") or 1e6
    local = sliding.read_optional_float("rope_theta") or fields.read_optional_float("rope_local_base_freq") or 1e4
    sliding.require_value("rope_type", "default", why="sliding-window layers have no rope scaling")
    scaling = read_scaling(old if old.values else full, fields)
    for inner in (full, sliding):
        nested.merge_section(inner)
    for outer in (nested, old):
        fields.merge_section(outer)
    return {"kind": "rope", "theta": theta, "sliding_theta": local, "scaling": scaling}


def _write_gemma_decoder(model: Values) -> Values:
    scale, width = model["attention"]["scale"], model["head_dim"]
    scalar = width if scale is None else scale**-2
    return write_shape(model) | {
        "intermediate_size": model["intermediate_size"],
        "hidden_activation": get_activation_name(model["feed_forward"]["kind"]),
        "attention_bias": model["attention"]["qkv_bias"],
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar,
        "attn_logit_softcapping": model["attention"]["logit_softcap"],
        "final_logit_softcapping": model["head"]["softcap"],
        "sliding_window": model["sliding_window"],
        "layer_types": write_layer_types(model),
    }


def write_gemma2(model: Values) -> Values:
    """Write the fields of `read_gemma2`."""
    return _write_gemma_decoder(model) | {"rope_parameters": write_rope(model["position"])}


def write_gemma3(model: Values) -> Values:
    """Write the fields of `read_gemma3`."""
    sliding = {"rope_type": "default", "rope_theta": model["position"]["sliding_theta"]}
    both = {"full_attention": write_rope(model["position"]), "sliding_attention": sliding}
    return _write_gemma_decoder(model) | {"rope_parameters": both}
