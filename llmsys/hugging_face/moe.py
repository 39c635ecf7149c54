"""Readers and writers of MoE decoders: mixtral, qwen2_moe, qwen3_moe, olmoe, phimoe, gpt_oss."""

from typing import Any

from llmsys.hugging_face.config_json import ConfigJsonReader
from llmsys.hugging_face.llama import read_llama_decoder, write_llama_decoder, write_windows
from llmsys.hugging_face.shared_fields import (
    Values,
    build_window_values,
    get_activation_name,
    read_attention_bias,
    read_gated_kind,
    read_layer_types,
    require_full_attention,
    write_layer_types,
)

NOISE = "router input jitter in training, is ignored"


def read_moe_section(
    fields: ConfigJsonReader, count: tuple[str, ...], width: str, **more: Any
) -> Values:
    """Read a `moe:` section of gated experts with a batch-wise balance loss."""
    balance = {"kind": "auxiliary_loss", "weight": fields.read_float("router_aux_loss_coef")}
    return {
        "num_experts": fields.read_int(*count),
        "num_experts_per_tok": fields.read_int("num_experts_per_tok"),
        "moe_intermediate_size": fields.read_int(width),
        "expert": {"kind": read_gated_kind(fields, "hidden_act")},
        "balance": balance,
        **more,
    }


def read_mixtral(fields: ConfigJsonReader) -> Values:
    """Read Mixtral: experts in every layer, softmax over the selected two."""
    fields.add_note("router_jitter_noise", NOISE)
    values = read_llama_decoder(fields, "Mixtral", theta=1e6) | {
        "attention": {"kind": "multi_head"}
    }
    values |= build_window_values(
        fields.read_optional_int("sliding_window"), ("sliding_attention",)
    )
    return values | {
        "moe": read_moe_section(fields, ("num_local_experts", "num_experts"), "intermediate_size")
    }


def read_qwen2_moe(fields: ConfigJsonReader) -> Values:
    """Read Qwen2-MoE: a gated shared expert; optional windows in every other early layer."""
    layers, first = fields.read_int("num_hidden_layers"), fields.read_int("max_window_layers")
    slides = fields.read_bool("use_sliding_window")
    otherwise = [
        "sliding_attention" if slides and i % 2 == 0 and i < first else "full_attention"
        for i in range(layers)
    ]
    width = fields.read_optional_int("sliding_window") if slides else None
    fields.ignore_keys("sliding_window")
    kinds = read_layer_types(fields, layers, otherwise)
    if "sliding_attention" in kinds and width is None:
        fields.add_violation(
            "use_sliding_window",
            "layer_types has sliding_attention. Set use_sliding_window to true.",
        )
    bias = fields.read_bool("qkv_bias")
    values = read_llama_decoder(fields, "Qwen2Moe") | build_window_values(width, kinds)
    values["attention"] = {"kind": "multi_head", "qkv_bias": bias}
    shared = fields.read_int("shared_expert_intermediate_size")
    return values | _read_sparse_layers(fields, shared_intermediate_size=shared, shared_gate=True)


def read_qwen3_moe(fields: ConfigJsonReader) -> Values:
    """Read Qwen3-MoE: Qwen3's attention; optional windows in every layer."""
    fields.require_value("qkv_bias", False, None, why="attention_bias says it")
    fields.require_value("use_qk_norm", True, None, why="queries and keys have norms")
    fields.require_value(
        "shared_expert_intermediate_size", 0, None, why="qwen3_moe has no shared experts"
    )
    fields.ignore_keys("max_window_layers")
    width = (
        fields.read_optional_int("sliding_window")
        if fields.read_bool("use_sliding_window")
        else None
    )
    fields.ignore_keys("sliding_window")
    values = read_llama_decoder(fields, "Qwen3Moe") | build_window_values(
        width, ("sliding_attention",)
    )
    return (
        values
        | {"attention": read_attention_bias(fields) | {"qk_norm": "head"}}
        | _read_sparse_layers(fields)
    )


def _read_sparse_layers(fields: ConfigJsonReader, **more: Any) -> Values:
    """Read experts in every `decoder_sparse_step`-th layer except those in `mlp_only_layers`."""
    layers, every = fields.read_int("num_hidden_layers"), fields.read_int("decoder_sparse_step")
    dense = tuple(layer for layer in fields.read_int_list("mlp_only_layers") if 0 <= layer < layers)
    chosen = {
        "every": every,
        "dense_layers": dense,
        "norm_topk_prob": fields.read_bool("norm_topk_prob"),
    }
    moe = read_moe_section(
        fields, ("num_experts", "num_local_experts"), "moe_intermediate_size", **chosen, **more
    )
    sparse = [
        layer for layer in range(layers) if (layer + 1) % max(every, 1) == 0 and layer not in dense
    ]
    feed_forward = {"kind": read_gated_kind(fields, "hidden_act")}
    return {
        "intermediate_size": fields.read_int("intermediate_size"),
        "feed_forward": feed_forward,
        "moe": moe if sparse else None,
    }


def read_olmoe(fields: ConfigJsonReader) -> Values:
    """Read OLMoE: norms over all query and all key channels; router weights are not renormalized
    by default.
    """
    require_full_attention(fields)
    values = read_llama_decoder(fields, "Olmoe")
    clip = fields.read_optional_float("clip_qkv")
    values["attention"] = read_attention_bias(fields) | {"qk_norm": "full", "clip": clip}
    chosen = fields.read_bool("norm_topk_prob")
    names = ("num_experts", "num_local_experts")
    return values | {
        "moe": read_moe_section(fields, names, "intermediate_size", norm_topk_prob=chosen)
    }


def read_phimoe(fields: ConfigJsonReader) -> Values:
    """Read Phi-3.5-MoE: LayerNorm despite `rms_norm_eps`, two experts by sparsemixer, a bias on
    the logits.
    """
    fields.add_note("input_jitter_noise", NOISE)
    fields.require_value("hidden_dropout", 0, why="the published code has no dropout there")
    values = read_llama_decoder(fields, "Phimoe", "PhiMoEForCausalLM", theta=1e6)
    values |= build_window_values(
        fields.read_optional_int("sliding_window"), ("sliding_attention",)
    )
    values["norm"] = {"kind": "layernorm", "eps": fields.read_positive_float("rms_norm_eps")}
    values["head"] = {
        "kind": "lm",
        "bias": "trained" if fields.read_bool("lm_head_bias") else "none",
    }
    values["attention"] = read_attention_bias(fields)
    mixer = {"score": "sparsemixer", "jitter": fields.read_float("router_jitter_noise")}
    return values | {
        "moe": read_moe_section(
            fields, ("num_local_experts", "num_experts"), "intermediate_size", **mixer
        )
    }


def read_gpt_oss(fields: ConfigJsonReader) -> Values:
    """Read gpt-oss: windows in every other layer, attention sinks, clamped experts with biases."""
    fields.ignore_keys("initial_context_length")
    fields.require_value("hidden_act", "silu", why="its experts compute a clamped SwiGLU")
    layers = fields.read_int("num_hidden_layers")
    otherwise = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    if not fields.has_value("rope_parameters") and not fields.has_value("rope_scaling"):
        yarn = {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        }
        fields.values = fields.values | {"rope_parameters": yarn}
    values = read_llama_decoder(fields, "GptOss", theta=150000.0)
    values |= build_window_values(
        fields.read_optional_int("sliding_window"), read_layer_types(fields, layers, otherwise)
    )
    values["attention"] = read_attention_bias(fields) | {"sinks": True}
    limits = {
        "alpha": fields.read_positive_float("swiglu_alpha"),
        "limit": fields.read_positive_float("swiglu_limit"),
    }
    moe = read_moe_section(
        fields, ("num_local_experts", "num_experts"), "intermediate_size", router_bias=True
    )
    moe["num_experts_per_tok"] = fields.read_int("num_experts_per_tok", "experts_per_token")
    return values | {"moe": moe | {"expert": {"kind": "clamped_swiglu", "bias": True, **limits}}}


def write_experts(model: Values) -> Values:
    """Write the keys that all MoE model types share."""
    moe = model["moe"]
    return {
        "num_experts_per_tok": moe["num_experts_per_tok"],
        "hidden_act": get_activation_name(moe["expert"]["kind"]),
        "router_aux_loss_coef": moe["balance"].get("weight", 0.0),
        "output_router_logits": False,
    }


def _write_moe_decoder(model: Values, count: str) -> Values:
    moe = model["moe"]
    sizes = {count: moe["num_experts"], "intermediate_size": moe["moe_intermediate_size"]}
    return write_llama_decoder(model) | write_experts(model) | sizes


def write_mixtral(model: Values) -> Values:
    """Write the fields of `read_mixtral`."""
    return _write_moe_decoder(model, "num_local_experts") | {
        "sliding_window": model["sliding_window"]
    }


def _write_sparse_layers(model: Values) -> Values:
    moe = model["moe"]
    if moe is None:
        return write_llama_decoder(model) | {
            "mlp_only_layers": list(range(model["num_hidden_layers"]))
        }
    return write_llama_decoder(model) | write_experts(model) | {
        "num_experts": moe["num_experts"],
        "moe_intermediate_size": moe["moe_intermediate_size"],
        "decoder_sparse_step": moe["every"],
        "mlp_only_layers": sorted({*range(moe["first_dense_layers"]), *moe["dense_layers"]}),
        "norm_topk_prob": moe["norm_topk_prob"],
    }  # fmt: skip


def write_qwen2_moe(model: Values) -> Values:
    """Write the fields of `read_qwen2_moe`."""
    values = (
        _write_sparse_layers(model)
        | write_windows(model)
        | {"qkv_bias": model["attention"]["qkv_bias"]}
    )
    if model["moe"] is not None:
        values["shared_expert_intermediate_size"] = model["moe"]["shared_intermediate_size"]
    return values


def write_qwen3_moe(model: Values) -> Values:
    """Write the fields of `read_qwen3_moe`."""
    window = {
        "use_sliding_window": model["sliding_window"] is not None,
        "sliding_window": model["sliding_window"],
    }
    return _write_sparse_layers(model) | window | {"attention_bias": model["attention"]["qkv_bias"]}


def write_olmoe(model: Values) -> Values:
    """Write the fields of `read_olmoe`."""
    attention = {
        "attention_bias": model["attention"]["qkv_bias"],
        "clip_qkv": model["attention"]["clip"],
    }
    return (
        _write_moe_decoder(model, "num_experts")
        | attention
        | {"norm_topk_prob": model["moe"]["norm_topk_prob"]}
    )


def write_phimoe(model: Values) -> Values:
    """Write the fields of `read_phimoe`."""
    return _write_moe_decoder(model, "num_local_experts") | {
        "sliding_window": model["sliding_window"],
        "router_jitter_noise": model["moe"]["jitter"],
        "attention_bias": model["attention"]["qkv_bias"],
        "lm_head_bias": model["head"]["bias"] == "trained",
    }


def write_gpt_oss(model: Values) -> Values:
    """Write the fields of `read_gpt_oss`."""
    expert = model["moe"]["expert"]
    return _write_moe_decoder(model, "num_local_experts") | {
        "hidden_act": "silu",
        "swiglu_alpha": expert["alpha"],
        "swiglu_limit": expert["limit"],
        "attention_bias": model["attention"]["qkv_bias"],
        "sliding_window": model["sliding_window"],
        "layer_types": write_layer_types(model),
    }
