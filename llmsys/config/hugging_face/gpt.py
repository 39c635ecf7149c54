"""Decoders with LayerNorm and biases: gpt2, gpt_neox, opt."""

from typing import Any

from llmsys.config.hugging_face.fields import Fields
from llmsys.config.hugging_face.parts import (
    Values,
    activation_name,
    read_activation,
    read_common,
    read_decoder_class,
)
from llmsys.config.hugging_face.rope import read_rope, write_rope


def shape(fields: Fields, stem: str, *classes: str, **names: tuple[str, ...]) -> Values:
    """Sizes under each family's own names, and its class."""
    read_common(fields)
    tied = fields.flag("tie_word_embeddings")
    read_decoder_class(fields, stem, tied, *classes)
    sizes = {ours: fields.whole(*theirs) for ours, theirs in names.items()}
    return {"vocab_size": fields.whole("vocab_size"), "tie_word_embeddings": tied, **sizes}


def layer_norm(fields: Fields, name: str) -> Values:
    """A LayerNorm with a bias."""
    return {"kind": "layernorm", "eps": fields.positive(name)}


def with_bias(bias: bool, **more: Any) -> Values:
    """Attention whose maps all have a bias, or none."""
    return {"kind": "multi_head", "qkv_bias": bias, "output_bias": bias, **more}


def read_gpt2(fields: Fields) -> Values:
    """GPT-2 and GPT-3: learned positions, tanh GELU, biases everywhere."""
    fields.skip("n_ctx", "n_special", "predict_special_tokens", "is_decoder")
    fields.only("scale_attn_by_inverse_layer_idx", False, why="all layers scale their scores alike")
    fields.only("reorder_and_upcast_attn", False, why="scores are computed in the run's precision")
    values = shape(
        fields, "GPT2", "GPT2LMHeadModel",
        hidden_size=("n_embd", "hidden_size"), num_hidden_layers=("n_layer", "num_hidden_layers"),
        num_attention_heads=("n_head", "num_attention_heads"),
        max_position_embeddings=("n_positions", "max_position_embeddings"),
    )  # fmt: skip
    places = {"embedding": "embd_pdrop", "residual": "resid_pdrop", "attention": "attn_pdrop"}
    return values | {
        "intermediate_size": fields.whole_or_none("n_inner") or 4 * values["hidden_size"],
        "initializer_range": fields.number("initializer_range"),
        "norm": layer_norm(fields, "layer_norm_epsilon"),
        "position": {"kind": "learned"},
        "attention": with_bias(True, scale=None if fields.flag("scale_attn_weights") else 1.0),
        "feed_forward": {"kind": read_activation(fields, "activation_function"), "bias": True},
        "dropout": {place: fields.number(name) for place, name in places.items()},
    }


def read_gpt_neox(fields: Fields) -> Values:
    """GPT-NeoX and Pythia: both branches look at the same input, each through a norm of its own."""
    fields.skip("is_decoder", "num_steps")
    for name in ("attention_probs_dropout_prob", "hidden_dropout_prob"):
        fields.only(name, 0, why="the dropouts of GPT-NeoX are attention_dropout and hidden_dropout")
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "intermediate_size")
    values = shape(fields, "GPTNeoX", **{name: (name,) for name in names})
    parallel = fields.flag("use_parallel_residual")
    hidden = fields.number("hidden_dropout")
    theta, fraction = ("rotary_emb_base", "rope_theta"), ("rotary_pct", "partial_rotary_factor")
    return values | {
        "initializer_range": fields.number("initializer_range"),
        "norm": layer_norm(fields, "layer_norm_eps"),
        "residual": {"kind": "parallel", "norms": 2} if parallel else {"kind": "pre"},
        "position": read_rope(fields, fraction=0.25, theta_names=theta, fraction_names=fraction),
        "attention": with_bias(fields.flag("attention_bias")),
        "feed_forward": {"kind": read_activation(fields, "hidden_act"), "bias": True},
        "dropout": {"embedding": hidden, "residual": hidden, "attention": fields.number("attention_dropout")},
    }


def read_opt(fields: Fields) -> Values:
    """OPT: learned positions that begin at row 2; ReLU."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    values = shape(fields, "OPT", intermediate_size=("ffn_dim",), **{name: (name,) for name in names})
    fields.only("word_embed_proj_dim", values["hidden_size"], None, why="the embedding has the width of the model")
    fields.only("_remove_final_layer_norm", False, why="a norm stands before the head")
    fields.only("layer_norm_elementwise_affine", True, why="norms have weights")
    fields.only("learned_embeddings", True, why="positions are trained")
    fields.only("scale_embeddings", False, why="embeddings are not scaled")
    fields.only("layerdrop", 0, why="no layer is skipped in training")
    fields.only("activation_dropout", 0, why="nothing drops inside the feed-forward")
    bias = fields.flag("enable_bias")
    return values | {
        "initializer_range": fields.number("init_std"),
        "norm": {"kind": "layernorm"},
        "residual": {"kind": "pre" if fields.flag("do_layer_norm_before") else "post"},
        "position": {"kind": "learned", "offset": 2},
        "attention": with_bias(bias),
        "feed_forward": {"kind": read_activation(fields, "activation_function"), "bias": bias},
        "dropout": {"residual": fields.number("dropout"), "attention": fields.number("attention_dropout")},
    }


def write_gpt2(model: Values) -> Values:
    """As `read_gpt2` reads it."""
    return {
        "vocab_size": model["vocab_size"],
        "n_positions": model["max_position_embeddings"],
        "n_embd": model["hidden_size"],
        "n_layer": model["num_hidden_layers"],
        "n_head": model["num_attention_heads"],
        "n_inner": model["intermediate_size"],
        "activation_function": activation_name(model["feed_forward"]["kind"]),
        "resid_pdrop": model["dropout"]["residual"],
        "embd_pdrop": model["dropout"]["embedding"],
        "attn_pdrop": model["dropout"]["attention"],
        "layer_norm_epsilon": model["norm"]["eps"],
        "scale_attn_weights": model["attention"]["scale"] is None,
        "initializer_range": model["initializer_range"],
        "tie_word_embeddings": model["tie_word_embeddings"],
    }


SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings")


def write_gpt_neox(model: Values) -> Values:
    """As `read_gpt_neox` reads it."""
    rope = write_rope(model["position"]) | {"partial_rotary_factor": model["position"]["fraction"]}
    names = (*SIZES, "intermediate_size", "max_position_embeddings", "initializer_range")
    return {name: model[name] for name in names} | {
        "hidden_act": activation_name(model["feed_forward"]["kind"]),
        "attention_dropout": model["dropout"]["attention"],
        "hidden_dropout": model["dropout"]["residual"],
        "layer_norm_eps": model["norm"]["eps"],
        "use_parallel_residual": model["residual"]["kind"] == "parallel",
        "rope_parameters": rope,
        "attention_bias": model["attention"]["qkv_bias"],
    }


def write_opt(model: Values) -> Values:
    """As `read_opt` reads it."""
    return {name: model[name] for name in (*SIZES, "max_position_embeddings")} | {
        "ffn_dim": model["intermediate_size"],
        "word_embed_proj_dim": model["hidden_size"],
        "do_layer_norm_before": model["residual"]["kind"] == "pre",
        "dropout": model["dropout"]["residual"],
        "attention_dropout": model["dropout"]["attention"],
        "activation_function": activation_name(model["feed_forward"]["kind"]),
        "init_std": model["initializer_range"],
        "enable_bias": model["attention"]["qkv_bias"],
    }
