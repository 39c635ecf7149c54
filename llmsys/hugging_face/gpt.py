"""Readers and writers of decoders with LayerNorm and biases: gpt2, gpt_neox, opt, bloom, falcon."""

from typing import Any

from llmsys.hugging_face.config_json import ConfigJsonReader
from llmsys.hugging_face.shared_fields import (
    Values,
    check_common_keys,
    check_decoder_class,
    get_activation_name,
    read_activation,
    read_rope,
    require_full_attention,
    write_rope,
)


def read_bloom(fields: ConfigJsonReader) -> Values:
    """Read BLOOM: ALiBi, a norm after the embedding, biases everywhere. `seq_length` adds no
    parameters.
    """
    fields.ignore_keys(
        "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi"
    )
    fields.ignore_keys("skip_bias_add", "pretraining_tp")
    fields.require_value("slow_but_exact", False, why="it changes the order of summation")
    fields.require_value(
        "skip_bias_add_qkv", False, None, why="queries, keys and values have biases"
    )
    fields.require_value("n_inner", None, why="the feed-forward is four times as wide as the model")
    fields.require_value(
        "apply_residual_connection_post_layernorm",
        False,
        why="the residual is taken before the norm",
    )
    fields.defaults = fields.defaults | {"seq_length": 2048}
    values = read_sizes(
        fields, "Bloom",
        hidden_size=("hidden_size", "n_embed"), num_hidden_layers=("n_layer", "num_hidden_layers"),
        num_attention_heads=("n_head", "num_attention_heads"),
        max_position_embeddings=("seq_length",),
    )  # fmt: skip
    dropout = {
        "residual": fields.read_float("hidden_dropout"),
        "attention": fields.read_float("attention_dropout"),
    }
    return values | {
        "intermediate_size": 4 * values["hidden_size"],
        "initializer_range": fields.read_float("initializer_range"),
        "norm": read_layer_norm(fields, "layer_norm_epsilon"),
        "position": {"kind": "alibi"},
        "attention": build_attention_section(True),
        "feed_forward": {"kind": "gelu_tanh", "bias": True},
        "embedding": {"norm": True},
        "dropout": dropout,
    }


def read_falcon(fields: ConfigJsonReader) -> Values:
    """Read Falcon 7B (one key-value head, one norm), 40B and 180B (groups, two norms), RW
    (ALiBi, sequential).
    """
    require_full_attention(fields)
    fields.ignore_keys("ff_factor")
    fields.require_value(
        "apply_residual_connection_post_layernorm",
        False,
        why="the residual is taken before the norm",
    )
    values = read_sizes(
        fields, "Falcon",
        hidden_size=("hidden_size", "n_embed"), num_hidden_layers=("num_hidden_layers", "n_layer"),
        num_attention_heads=("num_attention_heads", "n_head"),
        max_position_embeddings=("max_position_embeddings",),
    )  # fmt: skip
    position = read_rope(fields)
    if fields.read_bool("alibi"):  # the bias is divided as the scores are
        width = values["hidden_size"] // (values["num_attention_heads"] or 1)
        position = {"kind": "alibi", "factor": max(1, width) ** -0.5}
    bias = fields.read_bool("bias")
    return values | {
        "num_key_value_heads": _read_key_value_heads(fields, values["num_attention_heads"]),
        "intermediate_size": fields.read_optional_int("ffn_hidden_size")
        or 4 * values["hidden_size"],
        "initializer_range": fields.read_float("initializer_range"),
        "norm": read_layer_norm(fields, "layer_norm_epsilon"),
        "residual": _read_residual(fields),
        "position": position,
        "attention": build_attention_section(bias),
        "feed_forward": {"kind": read_activation(fields, "activation"), "bias": bias},
        "dropout": {
            "residual": fields.read_float("hidden_dropout"),
            "attention": fields.read_float("attention_dropout"),
        },
    }


def _read_key_value_heads(fields: ConfigJsonReader, heads: int) -> int:
    pairs = fields.read_optional_int("num_kv_heads", "n_head_kv")
    one = fields.read_bool("multi_query")
    if fields.read_bool("new_decoder_architecture"):
        return pairs or heads
    if not one and pairs not in (None, heads):
        fields.add_violation(
            "num_kv_heads",
            f"{pairs} groups need new_decoder_architecture. Use {heads}, or set it to true.",
        )
    return 1 if one else heads


def _read_residual(fields: ConfigJsonReader) -> Values:
    new, norms = (
        fields.read_bool("new_decoder_architecture"),
        fields.read_optional_int("num_ln_in_parallel_attn"),
    )
    if not fields.read_bool("parallel_attn"):
        if new:
            fields.add_violation(
                "parallel_attn", "false contradicts new_decoder_architecture. Set it to true."
            )
        return {"kind": "pre"}
    if norms not in (None, 1, 2) or (norms == 2 and not new):
        fields.add_violation("num_ln_in_parallel_attn", f"{norms} cannot be built here. Use 1.")
    return {"kind": "parallel", "norms": 2 if new and norms in (None, 2) else 1}


def write_bloom(model: Values) -> Values:
    """Write the fields of `read_bloom`."""
    return {
        "vocab_size": model["vocab_size"],
        "hidden_size": model["hidden_size"],
        "n_layer": model["num_hidden_layers"],
        "n_head": model["num_attention_heads"],
        "seq_length": model["max_position_embeddings"],
        "layer_norm_epsilon": model["norm"]["eps"],
        "initializer_range": model["initializer_range"],
        "hidden_dropout": model["dropout"]["residual"],
        "attention_dropout": model["dropout"]["attention"],
        "tie_word_embeddings": model["tie_word_embeddings"],
    }


def write_falcon(model: Values) -> Values:
    """Write the fields of `read_falcon`."""
    residual, heads, pairs = (
        model["residual"],
        model["num_attention_heads"],
        model["num_key_value_heads"],
    )
    new = residual.get("norms") == 2 or pairs not in (1, heads)
    values = {
        name: model[name] for name in (*SIZES, "max_position_embeddings", "initializer_range")
    } | {
        "num_kv_heads": pairs,
        "num_ln_in_parallel_attn": residual.get("norms") if new else None,
        "layer_norm_epsilon": model["norm"]["eps"],
        "hidden_dropout": model["dropout"]["residual"],
        "attention_dropout": model["dropout"]["attention"],
        "alibi": model["position"]["kind"] == "alibi",
        "new_decoder_architecture": new,
        "multi_query": pairs == 1,
        "parallel_attn": residual["kind"] == "parallel",
        "bias": model["attention"]["qkv_bias"],
        "ffn_hidden_size": model["intermediate_size"],
        "activation": get_activation_name(model["feed_forward"]["kind"]),
    }
    return values | ({} if values["alibi"] else {"rope_parameters": write_rope(model["position"])})


def read_sizes(
    fields: ConfigJsonReader, stem: str, *classes: str, **names: tuple[str, ...]
) -> Values:
    """Read the sizes under the key names of a model type, and check its class."""
    check_common_keys(fields)
    tied = fields.read_bool("tie_word_embeddings")
    check_decoder_class(fields, stem, tied, *classes)
    sizes = {ours: fields.read_int(*theirs) for ours, theirs in names.items()}
    return {"vocab_size": fields.read_int("vocab_size"), "tie_word_embeddings": tied, **sizes}


def read_layer_norm(fields: ConfigJsonReader, name: str) -> Values:
    """Read a LayerNorm section; `name` is the key of its eps."""
    return {"kind": "layernorm", "eps": fields.read_positive_float(name)}


def build_attention_section(bias: bool, **more: Any) -> Values:
    """Build an attention section whose projections all have a bias, or none."""
    return {"kind": "multi_head", "qkv_bias": bias, "output_bias": bias, **more}


def read_gpt2(fields: ConfigJsonReader) -> Values:
    """Read GPT-2: learned positions, tanh GELU, biases everywhere."""
    fields.ignore_keys("n_ctx", "n_special", "predict_special_tokens", "is_decoder")
    fields.require_value(
        "scale_attn_by_inverse_layer_idx", False, why="all layers use the same attention scale"
    )
    fields.require_value(
        "reorder_and_upcast_attn", False, why="scores are computed in the run's precision"
    )
    values = read_sizes(
        fields, "GPT2", "GPT2LMHeadModel",
        hidden_size=("n_embd", "hidden_size"), num_hidden_layers=("n_layer", "num_hidden_layers"),
        num_attention_heads=("n_head", "num_attention_heads"),
        max_position_embeddings=("n_positions", "max_position_embeddings"),
    )  # fmt: skip
    places = {"embedding": "embd_pdrop", "residual": "resid_pdrop", "attention": "attn_pdrop"}
    return values | {
        "intermediate_size": fields.read_optional_int("n_inner") or 4 * values["hidden_size"],
        "initializer_range": fields.read_float("initializer_range"),
        "norm": read_layer_norm(fields, "layer_norm_epsilon"),
        "position": {"kind": "learned"},
        "attention": build_attention_section(
            True, scale=None if fields.read_bool("scale_attn_weights") else 1.0
        ),
        "feed_forward": {"kind": read_activation(fields, "activation_function"), "bias": True},
        "dropout": {place: fields.read_float(name) for place, name in places.items()},
    }


def read_gpt_neox(fields: ConfigJsonReader) -> Values:
    """Read GPT-NeoX and Pythia: parallel branches with one norm each."""
    fields.ignore_keys("is_decoder", "num_steps")
    for name in ("attention_probs_dropout_prob", "hidden_dropout_prob"):
        fields.require_value(
            name, 0, why="the dropouts of GPT-NeoX are attention_dropout and hidden_dropout"
        )
    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "intermediate_size",
    )
    values = read_sizes(fields, "GPTNeoX", **{name: (name,) for name in names})
    parallel = fields.read_bool("use_parallel_residual")
    hidden = fields.read_float("hidden_dropout")
    theta, fraction = ("rotary_emb_base", "rope_theta"), ("rotary_pct", "partial_rotary_factor")
    return values | {
        "initializer_range": fields.read_float("initializer_range"),
        "norm": read_layer_norm(fields, "layer_norm_eps"),
        "residual": {"kind": "parallel", "norms": 2} if parallel else {"kind": "pre"},
        "position": read_rope(fields, fraction=0.25, theta_names=theta, fraction_names=fraction),
        "attention": build_attention_section(fields.read_bool("attention_bias")),
        "feed_forward": {"kind": read_activation(fields, "hidden_act"), "bias": True},
        "dropout": {
            "embedding": hidden,
            "residual": hidden,
            "attention": fields.read_float("attention_dropout"),
        },
    }


def read_opt(fields: ConfigJsonReader) -> Values:
    """Read OPT: learned positions that start at row 2, and ReLU."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    values = read_sizes(
        fields, "OPT", intermediate_size=("ffn_dim",), **{name: (name,) for name in names}
    )
    fields.require_value(
        "word_embed_proj_dim",
        values["hidden_size"],
        None,
        why="the embedding has the width of the model",
    )
    fields.require_value("_remove_final_layer_norm", False, why="the final norm is always present")
    fields.require_value("layer_norm_elementwise_affine", True, why="norms have weights")
    fields.require_value("learned_embeddings", True, why="positions are trained")
    fields.require_value("scale_embeddings", False, why="embeddings are not scaled")
    fields.require_value("layerdrop", 0, why="LayerDrop is not supported")
    fields.require_value("activation_dropout", 0, why="there is no dropout inside the feed-forward")
    bias = fields.read_bool("enable_bias")
    return values | {
        "initializer_range": fields.read_float("init_std"),
        "norm": {"kind": "layernorm"},
        "residual": {"kind": "pre" if fields.read_bool("do_layer_norm_before") else "post"},
        "position": {"kind": "learned", "offset": 2},
        "attention": build_attention_section(bias),
        "feed_forward": {"kind": read_activation(fields, "activation_function"), "bias": bias},
        "dropout": {
            "residual": fields.read_float("dropout"),
            "attention": fields.read_float("attention_dropout"),
        },
    }


def write_gpt2(model: Values) -> Values:
    """Write the fields of `read_gpt2`."""
    return {
        "vocab_size": model["vocab_size"],
        "n_positions": model["max_position_embeddings"],
        "n_embd": model["hidden_size"],
        "n_layer": model["num_hidden_layers"],
        "n_head": model["num_attention_heads"],
        "n_inner": model["intermediate_size"],
        "activation_function": get_activation_name(model["feed_forward"]["kind"]),
        "resid_pdrop": model["dropout"]["residual"],
        "embd_pdrop": model["dropout"]["embedding"],
        "attn_pdrop": model["dropout"]["attention"],
        "layer_norm_epsilon": model["norm"]["eps"],
        "scale_attn_weights": model["attention"]["scale"] is None,
        "initializer_range": model["initializer_range"],
        "tie_word_embeddings": model["tie_word_embeddings"],
    }


SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "tie_word_embeddings",
)


def write_gpt_neox(model: Values) -> Values:
    """Write the fields of `read_gpt_neox`."""
    rope = write_rope(model["position"]) | {"partial_rotary_factor": model["position"]["fraction"]}
    names = (*SIZES, "intermediate_size", "max_position_embeddings", "initializer_range")
    return {name: model[name] for name in names} | {
        "hidden_act": get_activation_name(model["feed_forward"]["kind"]),
        "attention_dropout": model["dropout"]["attention"],
        "hidden_dropout": model["dropout"]["residual"],
        "layer_norm_eps": model["norm"]["eps"],
        "use_parallel_residual": model["residual"]["kind"] == "parallel",
        "rope_parameters": rope,
        "attention_bias": model["attention"]["qkv_bias"],
    }


def write_opt(model: Values) -> Values:
    """Write the fields of `read_opt`."""
    return {name: model[name] for name in (*SIZES, "max_position_embeddings")} | {
        "ffn_dim": model["intermediate_size"],
        "word_embed_proj_dim": model["hidden_size"],
        "do_layer_norm_before": model["residual"]["kind"] == "pre",
        "dropout": model["dropout"]["residual"],
        "attention_dropout": model["dropout"]["attention"],
        "activation_function": get_activation_name(model["feed_forward"]["kind"]),
        "init_std": model["initializer_range"],
        "enable_bias": model["attention"]["qkv_bias"],
    }
