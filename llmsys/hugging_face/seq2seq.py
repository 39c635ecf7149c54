"""Readers and writers of encoder-decoders: bart and marian (LayerNorm and biases), T5, T5 1.1,
Flan-T5.
"""

from llmsys.hugging_face.config_json import ConfigJsonReader
from llmsys.hugging_face.gpt import build_attention_section
from llmsys.hugging_face.shared_fields import (
    ACTIVATIONS,
    GATED,
    Values,
    check_common_keys,
    get_activation_name,
    read_activation,
    read_architecture,
)


def read_t5(fields: ConfigJsonReader) -> Values:
    """Read T5 and T5 1.1: relative positions, no biases, unscaled scores.

    `tie_word_embeddings: false` (T5 1.1, Flan-T5) gives the head its own matrix, as in the
    published weights, and unscaled logits. `scale_decoder_outputs` overrides the scaling only.
    """
    check_encoder_decoder_keys(fields)
    read_architecture(fields, {"T5ForConditionalGeneration": "lm", "T5WithLMHeadModel": "lm"}, "lm")
    tied = (
        fields.read_bool("tie_word_embeddings") if "tie_word_embeddings" in fields.values else True
    )
    scaled = (
        fields.read_bool("scale_decoder_outputs")
        if "scale_decoder_outputs" in fields.values
        else tied
    )
    fields.ignore_keys("tie_word_embeddings", "scale_decoder_outputs")
    fields.defaults = fields.defaults | {"n_positions": 512}
    layers = fields.read_int("num_layers", "num_hidden_layers")
    rate, size = fields.read_float("dropout_rate"), fields.read_positive_float("initializer_factor")
    buckets, furthest = (
        fields.read_int("relative_attention_num_buckets"),
        fields.read_int("relative_attention_max_distance"),
    )
    start = fields.read_optional_int("decoder_start_token_id")
    places = ("embedding", "residual", "attention", "activation", "final")
    return {
        "family": "encoder_decoder",
        "vocab_size": fields.read_int("vocab_size"),
        "hidden_size": fields.read_int("d_model", "hidden_size"),
        "intermediate_size": fields.read_int("d_ff"),
        "num_hidden_layers": fields.read_optional_int("num_decoder_layers") or layers,
        "num_attention_heads": fields.read_int("num_heads", "num_attention_heads"),
        "head_dim": fields.read_int("d_kv", "head_dim"),
        "max_position_embeddings": fields.read_int("n_positions"),
        "tie_word_embeddings": tied,
        "norm": {"kind": "rmsnorm", "eps": fields.read_positive_float("layer_norm_epsilon")},
        "position": {"kind": "relative_bias", "buckets": buckets, "max_distance": furthest},
        "attention": {"kind": "multi_head", "scale": 1.0},
        "feed_forward": {"kind": _read_feed_forward_kind(fields)},
        "embedding": {"initializer_range": size},
        "head": {"kind": "lm", "scale": "inverse_sqrt_hidden_size" if scaled else 1.0},
        "dropout": dict.fromkeys(places, rate),
        "encoder": {
            "num_hidden_layers": layers,
            "decoder_start_token_id": start
            if start is not None
            else fields.read_optional_int("pad_token_id") or 0,
        },
    }


def _read_feed_forward_kind(fields: ConfigJsonReader) -> str:
    plain = list(ACTIVATIONS)
    gated = [f"gated-{name}" for name, ours in ACTIVATIONS.items() if ours in GATED]
    word = fields.read_choice("feed_forward_proj", [*plain, *gated])
    is_gated, name = word.startswith("gated-"), word.removeprefix("gated-")
    if word == "gated-gelu":  # T5 1.1's, which has always meant the tanh form
        name = "gelu_new"
    fields.require_value(
        "is_gated_act", is_gated, None, why="feed_forward_proj has the opposite value"
    )
    fields.require_value("dense_act_fn", name, None, why="feed_forward_proj has another activation")
    return GATED[ACTIVATIONS[name]] if is_gated else ACTIVATIONS[name]


def write_t5(model: Values) -> Values:
    """Write the fields of `read_t5`."""
    kind = model["feed_forward"]["kind"]
    words = {"geglu_tanh": "gated-gelu", "geglu": "gated-gelu_python", "swiglu": "gated-silu"}
    return {
        "vocab_size": model["vocab_size"],
        "d_model": model["hidden_size"],
        "d_kv": model["head_dim"],
        "d_ff": model["intermediate_size"],
        "num_layers": model["encoder"]["num_hidden_layers"],
        "num_decoder_layers": model["num_hidden_layers"],
        "num_heads": model["num_attention_heads"],
        "n_positions": model["max_position_embeddings"],
        "relative_attention_num_buckets": model["position"]["buckets"],
        "relative_attention_max_distance": model["position"]["max_distance"],
        "dropout_rate": model["dropout"]["residual"],
        "layer_norm_epsilon": model["norm"]["eps"],
        "initializer_factor": model["embedding"]["initializer_range"],
        "feed_forward_proj": words.get(kind) or get_activation_name(kind),
        "is_encoder_decoder": True,
        "pad_token_id": 0,
        "decoder_start_token_id": model["encoder"]["decoder_start_token_id"],
        "tie_word_embeddings": model["tie_word_embeddings"],
        "scale_decoder_outputs": model["head"]["scale"] != 1.0,
    }


def check_encoder_decoder_keys(fields: ConfigJsonReader) -> None:
    """Check the keys of encoder-decoders that are supported at one value only."""
    check_common_keys(fields, encoder_decoder=True)
    fields.require_value("is_decoder", False, None, why="both stacks are built")
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        fields.require_value(name, 0, None, why="LayerDrop is not supported")


def read_bart(fields: ConfigJsonReader) -> Values:
    """Read BART: learned positions that start at row 2, and a norm after the embedding."""
    read_architecture(fields, {"BartForConditionalGeneration": "lm", "BartModel": "lm"}, "lm")
    # Records of distillation.
    fields.ignore_keys(
        "save_step", "replacing_rate", "student_encoder_layers", "student_decoder_layers"
    )
    fields.require_value("tie_word_embeddings", True, why="embedding and head are one matrix")
    fields.require_value("static_position_embeddings", False, why="BART's positions are trained")
    fields.require_value("normalize_embedding", True, why="BART has a norm after the embedding")
    fields.require_value("extra_pos_embeddings", 2, why="BART's positions start at row 2")
    values = _read_stacks(fields) | {
        "vocab_size": fields.read_int("vocab_size"),
        "tie_word_embeddings": True,
    }
    values["embedding"]["norm"] = True
    return values | {"position": {"kind": "learned", "offset": 2}}


def read_marian(fields: ConfigJsonReader) -> Values:
    """Read Marian and the original Transformer: sinusoidal positions; shared or separate
    vocabularies.
    """
    read_architecture(fields, {"MarianMTModel": "lm"}, "lm")
    fields.require_value("static_position_embeddings", True, why="Marian's positions are sinusoids")
    fields.require_value("normalize_embedding", False, why="Marian has no norm after the embedding")
    # pad_token_id + 1 in old files, but sinusoids start at position 0 regardless.
    fields.ignore_keys("extra_pos_embeddings")
    vocabulary, tied = fields.read_int("vocab_size"), fields.read_bool("tie_word_embeddings")
    target = fields.read_optional_int("decoder_vocab_size") or vocabulary
    values = _read_stacks(fields) | {"vocab_size": target, "tie_word_embeddings": tied}
    if not fields.read_bool("share_encoder_decoder_embeddings"):
        values["embedding"]["source_vocab_size"] = vocabulary
    elif not tied:
        fields.add_violation(
            "tie_word_embeddings",
            "false contradicts share_encoder_decoder_embeddings. Set it to true.",
        )
    elif target != vocabulary:
        fields.add_violation(
            "decoder_vocab_size",
            f"{target} is not vocab_size={vocabulary}, and they share one matrix.",
        )
    return values | {"position": {"kind": "sinusoidal", "arrangement": "halves"}}


def _read_stacks(fields: ConfigJsonReader) -> Values:
    """Read the fields that BART and Marian share: post-norm, biases everywhere, a fixed bias on
    the logits.
    """
    check_encoder_decoder_keys(fields)
    fields.require_value("normalize_before", False, why="norms are applied after each branch")
    fields.require_value("add_final_layer_norm", False, why="there is no norm after the last layer")
    fields.require_value("add_bias_logits", False, why="the bias on the logits is fixed")
    sides = {
        side: {part: fields.read_int(f"{side}_{part}") for part in ("layers", "ffn_dim")}
        for side in _SIDES
    }
    heads = {side: fields.read_int(f"{side}_attention_heads") for side in _SIDES}
    _check_aliases(fields)
    rate = fields.read_float("dropout")
    encoder = {
        "num_hidden_layers": sides["encoder"]["layers"],
        "intermediate_size": sides["encoder"]["ffn_dim"],
        "num_attention_heads": heads["encoder"],
        "decoder_start_token_id": fields.read_int("decoder_start_token_id"),
    }
    for name, same in (
        ("intermediate_size", sides["decoder"]["ffn_dim"]),
        ("num_attention_heads", heads["decoder"]),
    ):
        if encoder[name] == same:
            del encoder[name]
    return {
        "family": "encoder_decoder",
        "hidden_size": fields.read_int("d_model", "hidden_size"),
        "intermediate_size": sides["decoder"]["ffn_dim"],
        "num_hidden_layers": sides["decoder"]["layers"],
        "num_attention_heads": heads["decoder"],
        "max_position_embeddings": fields.read_int("max_position_embeddings"),
        "initializer_range": fields.read_float("init_std"),
        "norm": {"kind": "layernorm"},
        "residual": {"kind": "post"},
        "attention": build_attention_section(True),
        "feed_forward": {"kind": read_activation(fields, "activation_function"), "bias": True},
        "embedding": {"scale": "sqrt_hidden_size"}
        if fields.read_bool("scale_embedding")
        else {"scale": 1.0},
        "head": {"kind": "lm", "bias": "fixed"},
        "dropout": {
            "embedding": rate,
            "residual": rate,
            "attention": fields.read_float("attention_dropout"),
            "activation": fields.read_float("activation_dropout"),
        },
        "encoder": encoder,
    }


_SIDES = ("encoder", "decoder")


def _check_aliases(fields: ConfigJsonReader) -> None:
    """Check that the generic names of the encoder sizes agree with the `encoder_…` keys."""
    fields.read_int("encoder_layers", "num_hidden_layers")
    fields.read_int("encoder_attention_heads", "num_attention_heads")


def _write_stacks(model: Values) -> Values:
    encoder = model["encoder"]
    return {
        "d_model": model["hidden_size"],
        "encoder_layers": encoder["num_hidden_layers"],
        "encoder_ffn_dim": encoder["intermediate_size"] or model["intermediate_size"],
        "encoder_attention_heads": encoder["num_attention_heads"] or model["num_attention_heads"],
        "decoder_layers": model["num_hidden_layers"],
        "decoder_ffn_dim": model["intermediate_size"],
        "decoder_attention_heads": model["num_attention_heads"],
        "max_position_embeddings": model["max_position_embeddings"],
        "activation_function": get_activation_name(model["feed_forward"]["kind"]),
        "dropout": model["dropout"]["residual"],
        "attention_dropout": model["dropout"]["attention"],
        "activation_dropout": model["dropout"]["activation"],
        "init_std": model["initializer_range"],
        "scale_embedding": model["embedding"]["scale"] == "sqrt_hidden_size",
        "decoder_start_token_id": encoder["decoder_start_token_id"],
        "is_encoder_decoder": True,
        "tie_word_embeddings": model["tie_word_embeddings"],
    }


def write_bart(model: Values) -> Values:
    """Write the fields of `read_bart`."""
    return _write_stacks(model) | {"vocab_size": model["vocab_size"]}


def write_marian(model: Values) -> Values:
    """Write the fields of `read_marian`."""
    # MarianMTModel requires a padding token; the token that starts targets serves as one.
    source, target = model["embedding"]["source_vocab_size"], model["vocab_size"]
    words = {"vocab_size": source or target, "decoder_vocab_size": target}
    padding = {"pad_token_id": model["encoder"]["decoder_start_token_id"]}
    return (
        _write_stacks(model)
        | words
        | padding
        | {"share_encoder_decoder_embeddings": source is None}
    )
