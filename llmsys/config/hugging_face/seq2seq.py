"""Readers and writers of encoder-decoders with LayerNorm and biases: bart, marian."""

from llmsys.config.hugging_face.config_json import ConfigJsonReader
from llmsys.config.hugging_face.gpt import build_attention_section
from llmsys.config.hugging_face.shared_fields import (
    Values,
    check_common_keys,
    get_activation_name,
    read_activation,
    read_architecture,
)


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
    fields.ignore_keys("save_step", "replacing_rate", "student_encoder_layers", "student_decoder_layers")
    fields.require_value("tie_word_embeddings", True, why="embedding and head are one matrix")
    fields.require_value("static_position_embeddings", False, why="BART's positions are trained")
    fields.require_value("normalize_embedding", True, why="BART has a norm after the embedding")
    fields.require_value("extra_pos_embeddings", 2, why="BART's positions start at row 2")
    values = _read_stacks(fields) | {"vocab_size": fields.read_int("vocab_size"), "tie_word_embeddings": True}
    values["embedding"]["norm"] = True
    return values | {"position": {"kind": "learned", "offset": 2}}


def read_marian(fields: ConfigJsonReader) -> Values:
    """Read Marian and the original Transformer: sinusoidal positions; shared or separate vocabularies."""
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
            "tie_word_embeddings", "false contradicts share_encoder_decoder_embeddings. Set it to true."
        )
    elif target != vocabulary:
        fields.add_violation(
            "decoder_vocab_size", f"{target} is not vocab_size={vocabulary}, and they share one matrix."
        )
    return values | {"position": {"kind": "sinusoidal", "arrangement": "halves"}}


def _read_stacks(fields: ConfigJsonReader) -> Values:
    """Read the fields that BART and Marian share: post-norm, biases everywhere, a fixed bias on the logits."""
    check_encoder_decoder_keys(fields)
    fields.require_value("normalize_before", False, why="norms are applied after each branch")
    fields.require_value("add_final_layer_norm", False, why="there is no norm after the last layer")
    fields.require_value("add_bias_logits", False, why="the bias on the logits is fixed")
    sides = {side: {part: fields.read_int(f"{side}_{part}") for part in ("layers", "ffn_dim")} for side in _SIDES}
    heads = {side: fields.read_int(f"{side}_attention_heads") for side in _SIDES}
    _check_aliases(fields)
    rate = fields.read_float("dropout")
    encoder = {
        "num_hidden_layers": sides["encoder"]["layers"],
        "intermediate_size": sides["encoder"]["ffn_dim"],
        "num_attention_heads": heads["encoder"],
        "decoder_start_token_id": fields.read_int("decoder_start_token_id"),
    }
    for name, same in (("intermediate_size", sides["decoder"]["ffn_dim"]), ("num_attention_heads", heads["decoder"])):
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
        "embedding": {"scale": "sqrt_hidden_size"} if fields.read_bool("scale_embedding") else {"scale": 1.0},
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
    return _write_stacks(model) | words | padding | {"share_encoder_decoder_embeddings": source is None}
