"""Decoders with a mixture of experts and ordinary attention: mixtral, qwen2_moe, qwen3_moe, olmoe, phimoe, gpt_oss."""

from typing import Any

from llmsys.config.hugging_face.fields import Fields
from llmsys.config.hugging_face.llama import decoder, write_decoder, write_windows
from llmsys.config.hugging_face.parts import (
    Values,
    activation_name,
    attention_bias,
    only_full,
    read_gated,
    read_layer_types,
    windows,
    write_layer_types,
)

NOISE = "noise on the router's input in training, is left out"


def experts(fields: Fields, count: tuple[str, ...], width: str, **more: Any) -> Values:
    """A `moe:` section of gated experts, balanced by a loss over the batch."""
    balance = {"kind": "auxiliary_loss", "weight": fields.number("router_aux_loss_coef")}
    return {
        "num_experts": fields.whole(*count),
        "num_experts_per_tok": fields.whole("num_experts_per_tok"),
        "moe_intermediate_size": fields.whole(width),
        "expert": {"kind": read_gated(fields, "hidden_act")},
        "balance": balance,
        **more,
    }


def read_mixtral(fields: Fields) -> Values:
    """Experts in every layer; a softmax over the chosen two."""
    fields.note("router_jitter_noise", NOISE)
    values = decoder(fields, "Mixtral", theta=1e6) | {"attention": {"kind": "multi_head"}}
    values |= windows(fields.whole_or_none("sliding_window"), ("sliding_attention",))
    return values | {"moe": experts(fields, ("num_local_experts", "num_experts"), "intermediate_size")}


def read_qwen2_moe(fields: Fields) -> Values:
    """A shared layer behind a gate of its own; windows, if they are on, in every other early layer."""
    layers, first = fields.whole("num_hidden_layers"), fields.whole("max_window_layers")
    slides = fields.flag("use_sliding_window")
    otherwise = [
        "sliding_attention" if slides and i % 2 == 0 and i < first else "full_attention" for i in range(layers)
    ]
    width = fields.whole_or_none("sliding_window") if slides else None
    fields.skip("sliding_window")
    kinds = read_layer_types(fields, layers, otherwise)
    if "sliding_attention" in kinds and width is None:
        fields.refuse("use_sliding_window", "layer_types has sliding_attention. Set use_sliding_window to true.")
    bias = fields.flag("qkv_bias")
    values = decoder(fields, "Qwen2Moe") | windows(width, kinds)
    values["attention"] = {"kind": "multi_head", "qkv_bias": bias}
    shared = fields.whole("shared_expert_intermediate_size")
    return values | _sparse(fields, shared_intermediate_size=shared, shared_gate=True)


def read_qwen3_moe(fields: Fields) -> Values:
    """Qwen3's attention; windows, if they are on, in every layer."""
    fields.only("qkv_bias", False, None, why="attention_bias says it")
    fields.only("use_qk_norm", True, None, why="queries and keys have norms")
    fields.only("shared_expert_intermediate_size", 0, None, why="qwen3_moe has no shared experts")
    fields.skip("max_window_layers")
    width = fields.whole_or_none("sliding_window") if fields.flag("use_sliding_window") else None
    fields.skip("sliding_window")
    values = decoder(fields, "Qwen3Moe") | windows(width, ("sliding_attention",))
    return values | {"attention": attention_bias(fields) | {"qk_norm": "head"}} | _sparse(fields)


def _sparse(fields: Fields, **more: Any) -> Values:
    """Experts in every decoder_sparse_step-th layer that mlp_only_layers does not keep dense."""
    layers, every = fields.whole("num_hidden_layers"), fields.whole("decoder_sparse_step")
    dense = tuple(layer for layer in fields.wholes("mlp_only_layers") if 0 <= layer < layers)
    chosen = {"every": every, "dense_layers": dense, "norm_topk_prob": fields.flag("norm_topk_prob")}
    moe = experts(fields, ("num_experts", "num_local_experts"), "moe_intermediate_size", **chosen, **more)
    sparse = [layer for layer in range(layers) if (layer + 1) % max(every, 1) == 0 and layer not in dense]
    feed_forward = {"kind": read_gated(fields, "hidden_act")}
    return {
        "intermediate_size": fields.whole("intermediate_size"),
        "feed_forward": feed_forward,
        "moe": moe if sparse else None,
    }


def read_olmoe(fields: Fields) -> Values:
    """Norms over all queries and all keys; the chosen weights stay as the softmax over all gives them."""
    only_full(fields)
    values = decoder(fields, "Olmoe")
    clip = fields.number_or_none("clip_qkv")
    values["attention"] = attention_bias(fields) | {"qk_norm": "full", "clip": clip}
    chosen = fields.flag("norm_topk_prob")
    names = ("num_experts", "num_local_experts")
    return values | {"moe": experts(fields, names, "intermediate_size", norm_topk_prob=chosen)}


def read_phimoe(fields: Fields) -> Values:
    """Phi-3.5-MoE: LayerNorm in spite of the name of its eps, two experts by sparsemixer, a bias on the logits."""
    fields.note("input_jitter_noise", NOISE)
    fields.only("hidden_dropout", 0, why="the published code never drops there")
    values = decoder(fields, "Phimoe", "PhiMoEForCausalLM", theta=1e6)
    values |= windows(fields.whole_or_none("sliding_window"), ("sliding_attention",))
    values["norm"] = {"kind": "layernorm", "eps": fields.positive("rms_norm_eps")}
    values["head"] = {"kind": "lm", "bias": "trained" if fields.flag("lm_head_bias") else "none"}
    values["attention"] = attention_bias(fields)
    mixer = {"score": "sparsemixer", "jitter": fields.number("router_jitter_noise")}
    return values | {"moe": experts(fields, ("num_local_experts", "num_experts"), "intermediate_size", **mixer)}


def read_gpt_oss(fields: Fields) -> Values:
    """Windows in every other layer, attention sinks, clamped experts with biases."""
    fields.skip("initial_context_length")
    fields.only("hidden_act", "silu", why="its experts compute a clamped SwiGLU")
    layers = fields.whole("num_hidden_layers")
    otherwise = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    if not fields.given("rope_parameters") and not fields.given("rope_scaling"):
        yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
        fields.values = fields.values | {"rope_parameters": yarn}
    values = decoder(fields, "GptOss", theta=150000.0)
    values |= windows(fields.whole_or_none("sliding_window"), read_layer_types(fields, layers, otherwise))
    values["attention"] = attention_bias(fields) | {"sinks": True}
    limits = {"alpha": fields.positive("swiglu_alpha"), "limit": fields.positive("swiglu_limit")}
    moe = experts(fields, ("num_local_experts", "num_experts"), "intermediate_size", router_bias=True)
    moe["num_experts_per_tok"] = fields.whole("num_experts_per_tok", "experts_per_token")
    return values | {"moe": moe | {"expert": {"kind": "clamped_swiglu", "bias": True, **limits}}}


def write_experts(model: Values) -> Values:
    """The keys that all mixtures share."""
    moe = model["moe"]
    return {
        "num_experts_per_tok": moe["num_experts_per_tok"],
        "hidden_act": activation_name(moe["expert"]["kind"]),
        "router_aux_loss_coef": moe["balance"].get("weight", 0.0),
        "output_router_logits": False,
    }


def _write_all_layers(model: Values, count: str) -> Values:
    moe = model["moe"]
    sizes = {count: moe["num_experts"], "intermediate_size": moe["moe_intermediate_size"]}
    return write_decoder(model) | write_experts(model) | sizes


def write_mixtral(model: Values) -> Values:
    """As `read_mixtral` reads it."""
    return _write_all_layers(model, "num_local_experts") | {"sliding_window": model["sliding_window"]}


def _write_sparse(model: Values) -> Values:
    moe = model["moe"]
    if moe is None:
        return write_decoder(model) | {"mlp_only_layers": list(range(model["num_hidden_layers"]))}
    return write_decoder(model) | write_experts(model) | {
        "num_experts": moe["num_experts"],
        "moe_intermediate_size": moe["moe_intermediate_size"],
        "decoder_sparse_step": moe["every"],
        "mlp_only_layers": sorted({*range(moe["first_dense_layers"]), *moe["dense_layers"]}),
        "norm_topk_prob": moe["norm_topk_prob"],
    }  # fmt: skip


def write_qwen2_moe(model: Values) -> Values:
    """As `read_qwen2_moe` reads it."""
    values = _write_sparse(model) | write_windows(model) | {"qkv_bias": model["attention"]["qkv_bias"]}
    if model["moe"] is not None:
        values["shared_expert_intermediate_size"] = model["moe"]["shared_intermediate_size"]
    return values


def write_qwen3_moe(model: Values) -> Values:
    """As `read_qwen3_moe` reads it."""
    window = {"use_sliding_window": model["sliding_window"] is not None, "sliding_window": model["sliding_window"]}
    return _write_sparse(model) | window | {"attention_bias": model["attention"]["qkv_bias"]}


def write_olmoe(model: Values) -> Values:
    """As `read_olmoe` reads it."""
    attention = {"attention_bias": model["attention"]["qkv_bias"], "clip_qkv": model["attention"]["clip"]}
    return _write_all_layers(model, "num_experts") | attention | {"norm_topk_prob": model["moe"]["norm_topk_prob"]}


def write_phimoe(model: Values) -> Values:
    """As `read_phimoe` reads it."""
    return _write_all_layers(model, "num_local_experts") | {
        "sliding_window": model["sliding_window"],
        "router_jitter_noise": model["moe"]["jitter"],
        "attention_bias": model["attention"]["qkv_bias"],
        "lm_head_bias": model["head"]["bias"] == "trained",
    }


def write_gpt_oss(model: Values) -> Values:
    """As `read_gpt_oss` reads it."""
    expert = model["moe"]["expert"]
    return _write_all_layers(model, "num_local_experts") | {
        "hidden_act": "silu",
        "swiglu_alpha": expert["alpha"],
        "swiglu_limit": expert["limit"],
        "attention_bias": model["attention"]["qkv_bias"],
        "sliding_window": model["sliding_window"],
        "layer_types": write_layer_types(model),
    }
