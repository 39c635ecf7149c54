"""Readers and writers of Llama and its dense relatives: llama, mistral, qwen2, qwen3, smollm3,
olmo2, Gemma.

Gemma 2 and the text model of Gemma 3 have sandwich norms and alternating windows.
"""

from llmsys.hugging_face.config_json import ConfigJsonReader
from llmsys.hugging_face.shared_fields import (
    Values,
    build_window_values,
    check_common_keys,
    check_decoder_class,
    find_shortest_period,
    get_activation_name,
    read_attention_bias,
    read_attention_dropout,
    read_gated_kind,
    read_layer_types,
    read_rms_norm,
    read_rope,
    read_scaling,
    read_shape,
    require_full_attention,
    write_layer_types,
    write_rope,
    write_shape,
)


def read_gemma2(fields: ConfigJsonReader) -> Values:
    """Read Gemma 2: sliding windows in layers 0, 2, 4, …, and soft caps on scores and logits."""
    values = _read_gemma_decoder(fields, "Gemma2", 2)
    fields.require_value(
        "sliding_window_size",
        values.get("sliding_window"),
        None,
        why="sliding_window has another value",
    )
    return values | {"position": read_rope(fields)}


def read_gemma3(fields: ConfigJsonReader) -> Values:
    """Read Gemma 3: full attention with its own RoPE base in every sixth layer, and query-key
    norms.
    """
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
    layers, scalar = (
        values["num_hidden_layers"],
        fields.read_positive_float("query_pre_attn_scalar"),
    )
    otherwise = [
        "sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)
    ]
    attention = read_attention_bias(fields) | {
        "logit_softcap": fields.read_optional_float("attn_logit_softcapping")
    }
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
    """Read the RoPE base and scaling of full layers, and the base of sliding layers, which
    cannot be scaled.
    """
    nested = fields.read_section("rope_parameters", {})
    full, sliding = (
        nested.read_section("full_attention", {}),
        nested.read_section("sliding_attention", {}),
    )
    old = fields.read_section("rope_scaling", {})
    if full.values and old.values:
        fields.add_violation(
            "rope_scaling", "is given together with rope_parameters. Keep rope_parameters."
        )
    theta = (
        full.read_optional_float("rope_theta") or fields.read_optional_float("rope_theta") or 1e6
    )
    local = (
        sliding.read_optional_float("rope_theta")
        or fields.read_optional_float("rope_local_base_freq")
        or 1e4
    )
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


def read_llama_decoder(
    fields: ConfigJsonReader,
    stem: str,
    *classes: str,
    theta: float = 10000.0,
    fraction: float | None = None,
) -> Values:
    """Read the fields that all relatives of Llama share: sizes, RMSNorm before each branch, and
    RoPE.

    Args:
        stem: prefix of the class names, such as `Llama`.
        classes: further names of the class with the language-model head.
        theta: default RoPE base of the model type.
        fraction: default share of rotated channels; None: all channels are rotated.
    """
    check_common_keys(fields)
    values = read_shape(fields)
    check_decoder_class(fields, stem, values["tie_word_embeddings"], *classes)
    return values | {
        "norm": read_rms_norm(fields),
        "residual": {"kind": "pre"},
        "position": read_rope(fields, theta=theta, fraction=fraction),
        "dropout": read_attention_dropout(fields),
    }


def read_gated_feed_forward(fields: ConfigJsonReader, bias: bool = False) -> Values:
    """Read a dense gated feed-forward and its width."""
    kind = read_gated_kind(fields, "hidden_act")
    return {
        "intermediate_size": fields.read_int("intermediate_size"),
        "feed_forward": {"kind": kind, "bias": bias},
    }


def read_llama(fields: ConfigJsonReader) -> Values:
    """Read Llama 1 to 3 and models that use its class (DeepSeek 67B, Yi, …)."""
    require_full_attention(fields)
    # records; max_position_embeddings is what counts
    fields.ignore_keys("max_sequence_length", "is_llama_config")
    fields.require_value(
        "rope_interleaved", False, None, why="rotated channel pairs are half a head apart"
    )
    fields.require_value("pretraining_tp", 1, None, why="it only splits matmuls into slices")
    values = read_llama_decoder(fields, "Llama", "LLaMAForCausalLM") | read_gated_feed_forward(
        fields, fields.read_bool("mlp_bias")
    )
    return values | {"attention": read_attention_bias(fields)}


def read_mistral(fields: ConfigJsonReader) -> Values:
    """Read Mistral: Llama with a sliding window in every layer."""
    values = (
        read_llama_decoder(fields, "Mistral")
        | read_gated_feed_forward(fields)
        | {"attention": {"kind": "multi_head"}}
    )
    return values | build_window_values(
        fields.read_optional_int("sliding_window"), ("sliding_attention",)
    )


def read_qwen2(fields: ConfigJsonReader) -> Values:
    """Read Qwen2: biases on queries, keys and values; optional windows from layer
    `max_window_layers`.
    """
    fields.require_value("use_mrope", False, None, why="positions have one axis")
    values = read_llama_decoder(fields, "Qwen2") | read_gated_feed_forward(fields)
    return (
        values | read_late_windows(fields) | {"attention": {"kind": "multi_head", "qkv_bias": True}}
    )


def read_qwen3(fields: ConfigJsonReader) -> Values:
    """Read Qwen3: norms on the queries and keys of each head instead of Qwen2's biases."""
    values = read_llama_decoder(fields, "Qwen3") | read_gated_feed_forward(fields)
    return (
        values
        | read_late_windows(fields)
        | {"attention": read_attention_bias(fields) | {"qk_norm": "head"}}
    )


def read_late_windows(fields: ConfigJsonReader) -> Values:
    """Read windows in the layers from `max_window_layers`; the width is ignored unless
    `use_sliding_window`.
    """
    layers, first = fields.read_int("num_hidden_layers"), fields.read_int("max_window_layers")
    width = (
        fields.read_optional_int("sliding_window")
        if fields.read_bool("use_sliding_window")
        else None
    )
    if not fields.read_bool("use_sliding_window"):
        fields.ignore_keys("sliding_window")
    full = min(first, layers) if width is not None else layers
    kinds = read_layer_types(
        fields, layers, ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    )
    if "sliding_attention" in kinds and width is None:
        fields.add_violation(
            "use_sliding_window",
            "layer_types has sliding_attention. Set use_sliding_window to true.",
        )
    return build_window_values(width, kinds)


def read_smollm3(fields: ConfigJsonReader) -> Values:
    """Read SmolLM3: Llama without RoPE in every fourth layer. `no_rope_layers` is 1 for layers
    with RoPE.
    """
    fields.ignore_keys("pretraining_tp", "max_window_layers")
    layers, interval = (
        fields.read_int("num_hidden_layers"),
        int(fields.read_positive_float("no_rope_layer_interval")),
    )
    rotates = fields.read_int_list("no_rope_layers") or [
        int((layer + 1) % interval != 0) for layer in range(layers)
    ]
    if len(rotates) != layers:
        fields.add_violation(
            "no_rope_layers", f"has {len(rotates)} entries for {layers} layers. Give one for each."
        )
    width = (
        fields.read_optional_int("sliding_window")
        if fields.read_bool("use_sliding_window")
        else None
    )
    fields.ignore_keys("sliding_window")
    slides = [width is not None and not rotated for rotated in rotates]
    kinds = read_layer_types(
        fields, layers, ["sliding_attention" if one else "full_attention" for one in slides]
    )
    values = (
        read_llama_decoder(fields, "SmolLM3", theta=2e6)
        | read_gated_feed_forward(fields, fields.read_bool("mlp_bias"))
        | build_window_values(width, kinds)
    )
    values["position"]["layers"] = find_shortest_period([bool(one) for one in rotates]) or (True,)
    return values | {"attention": read_attention_bias(fields)}


def read_olmo2(fields: ConfigJsonReader) -> Values:
    """Read OLMo 2: norms after each branch, and over all query and all key channels."""
    require_full_attention(fields)
    values = (
        read_llama_decoder(fields, "Olmo2")
        | read_gated_feed_forward(fields)
        | {"residual": {"kind": "output"}}
    )
    return values | {"attention": read_attention_bias(fields) | {"qk_norm": "full"}}


def write_llama_decoder(model: Values) -> Values:
    """Write the fields of `read_llama_decoder` and `read_gated_feed_forward`."""
    return write_shape(model) | {
        "intermediate_size": model["intermediate_size"],
        "hidden_act": get_activation_name(model["feed_forward"]["kind"]),
        "rope_parameters": write_rope(model["position"]),
    }


def write_llama(model: Values) -> Values:
    """Write the fields of `read_llama`."""
    biases = {
        "attention_bias": model["attention"]["qkv_bias"],
        "mlp_bias": model["feed_forward"]["bias"],
    }
    return write_llama_decoder(model) | biases


def write_mistral(model: Values) -> Values:
    """Write the fields of `read_mistral`."""
    return write_llama_decoder(model) | {"sliding_window": model["sliding_window"]}


def write_windows(model: Values) -> Values:
    """Write the window keys of Qwen, with one layer type per layer."""
    kinds = write_layer_types(model)
    first = kinds.index("sliding_attention") if "sliding_attention" in kinds else len(kinds)
    window = model["sliding_window"]
    windowed = {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": first,
    }
    return windowed | {"layer_types": kinds}


def write_qwen2(model: Values) -> Values:
    """Write the fields of `read_qwen2`."""
    return write_llama_decoder(model) | write_windows(model)


def write_qwen3(model: Values) -> Values:
    """Write the fields of `read_qwen3`."""
    return (
        write_llama_decoder(model)
        | write_windows(model)
        | {"attention_bias": model["attention"]["qkv_bias"]}
    )


def write_smollm3(model: Values) -> Values:
    """Write the fields of `read_smollm3`."""
    rotates = model["position"]["layers"]
    layers = [int(rotates[layer % len(rotates)]) for layer in range(model["num_hidden_layers"])]
    window = {
        "use_sliding_window": model["sliding_window"] is not None,
        "sliding_window": model["sliding_window"],
    }
    return (
        write_llama(model)
        | window
        | {"no_rope_layers": layers, "layer_types": write_layer_types(model)}
    )


def write_olmo2(model: Values) -> Values:
    """Write the fields of `read_olmo2`."""
    return write_llama_decoder(model) | {"attention_bias": model["attention"]["qkv_bias"]}
