"""Readers and writers of bloom and falcon."""

from llmsys.config.hugging_face.config_json import ConfigJsonReader
from llmsys.config.hugging_face.gpt import SIZES, build_attention_section, read_layer_norm, read_sizes
from llmsys.config.hugging_face.rope import read_rope, write_rope
from llmsys.config.hugging_face.shared_fields import (
    Values,
    get_activation_name,
    read_activation,
    require_full_attention,
)


def read_bloom(fields: ConfigJsonReader) -> Values:
    """Read BLOOM: ALiBi, a norm after the embedding, biases everywhere. `seq_length` adds no parameters."""
    fields.ignore_keys("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi")
    fields.ignore_keys("skip_bias_add", "pretraining_tp")
    fields.require_value("slow_but_exact", False, why="it changes the order of summation")
    fields.require_value("skip_bias_add_qkv", False, None, why="queries, keys and values have biases")
    fields.require_value("n_inner", None, why="the feed-forward is four times as wide as the model")
    fields.require_value("apply_residual_connection_post_layernorm", False, why="the residual is taken before the norm")
    fields.defaults = fields.defaults | {"seq_length": 2048}
    values = read_sizes(
        fields, "Bloom",
        hidden_size=("hidden_size", "n_embed"), num_hidden_layers=("n_layer", "num_hidden_layers"),
        num_attention_heads=("n_head", "num_attention_heads"), max_position_embeddings=("seq_length",),
    )  # fmt: skip
    dropout = {"residual": fields.read_float("hidden_dropout"), "attention": fields.read_float("attention_dropout")}
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
    """Read Falcon 7B (one key-value head, one norm), 40B and 180B (groups, two norms), RW (ALiBi, sequential)."""
    require_full_attention(fields)
    fields.ignore_keys("ff_factor")
    fields.require_value("apply_residual_connection_post_layernorm", False, why="the residual is taken before the norm")
    values = read_sizes(
        fields, "Falcon",
        hidden_size=("hidden_size", "n_embed"), num_hidden_layers=("num_hidden_layers", "n_layer"),
        num_attention_heads=("num_attention_heads", "n_head"), max_position_embeddings=("max_position_embeddings",),
    )  # fmt: skip
    position = read_rope(fields)
    if fields.read_bool("alibi"):  # the bias is divided as the scores are
        width = values["hidden_size"] // (values["num_attention_heads"] or 1)
        position = {"kind": "alibi", "factor": max(1, width) ** -0.5}
    bias = fields.read_bool("bias")
    return values | {
        "num_key_value_heads": _read_key_value_heads(fields, values["num_attention_heads"]),
        "intermediate_size": fields.read_optional_int("ffn_hidden_size") or 4 * values["hidden_size"],
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
            "num_kv_heads", f"{pairs} groups need new_decoder_architecture. Use {heads}, or set it to true."
        )
    return 1 if one else heads


def _read_residual(fields: ConfigJsonReader) -> Values:
    new, norms = fields.read_bool("new_decoder_architecture"), fields.read_optional_int("num_ln_in_parallel_attn")
    if not fields.read_bool("parallel_attn"):
        if new:
            fields.add_violation("parallel_attn", "false contradicts new_decoder_architecture. Set it to true.")
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
    residual, heads, pairs = model["residual"], model["num_attention_heads"], model["num_key_value_heads"]
    new = residual.get("norms") == 2 or pairs not in (1, heads)
    values = {name: model[name] for name in (*SIZES, "max_position_embeddings", "initializer_range")} | {
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
