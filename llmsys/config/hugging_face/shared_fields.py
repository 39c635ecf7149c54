"""Conversions shared by model types: activations, layer types, `architectures`, and the fields of plain decoders.

`read_…` functions convert config.json fields to ModelConfig values. `write_…` functions convert them back.
"""

from typing import Any

from llmsys.config.hugging_face.config_json import ConfigJsonReader

Values = dict[str, Any]

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",  # the same formula with its constant written out
    "gelu_accurate": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}
_PLAIN_NAMES = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu"}
_GATED_NAMES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh"}


def read_activation(fields: ConfigJsonReader, name: str) -> str:
    """Return the ModelConfig name of an activation."""
    return ACTIVATIONS[fields.read_choice(name, ACTIVATIONS)]


def read_gated_kind(fields: ConfigJsonReader, name: str) -> str:
    """Return the ModelConfig kind of a gated feed-forward."""
    return GATED[ACTIVATIONS[fields.read_choice(name, [key for key, ours in ACTIVATIONS.items() if ours in GATED])]]


def get_activation_name(kind: str) -> str:
    """Return Hugging Face's activation name of a feed-forward kind; the kind itself if there is none."""
    return _PLAIN_NAMES.get(kind) or _GATED_NAMES.get(kind, kind)


def read_architecture(fields: ConfigJsonReader, legal: dict[str, str], default: str) -> str:
    """Return the value in `legal` of the class in `architectures`; `default` if the file names no class."""
    names = fields.read_str_list("architectures")
    if not names:
        return default
    if len(names) == 1 and names[0] in legal:
        return legal[names[0]]
    fields.add_violation("architectures", f"{', '.join(names)} cannot be built. Known: {', '.join(legal)}.")
    return default


def check_decoder_class(fields: ConfigJsonReader, stem: str, tied: bool, *more: str) -> None:
    """Check that `architectures` has a language-model head. The bare model is accepted with tied embeddings."""
    bare = f"{stem}Model"
    found = read_architecture(fields, dict.fromkeys((f"{stem}ForCausalLM", *more), "lm") | {bare: "bare"}, "lm")
    if found == "bare" and not tied:
        fields.add_violation(
            "architectures",
            f"{bare} has no head, but tie_word_embeddings is false. Use {stem}ForCausalLM, which counts the head.",
        )


def check_common_keys(fields: ConfigJsonReader, *, encoder_decoder: bool = False) -> None:
    """Check the keys that every model type may have and that are supported at one value only."""
    fields.require_value("is_encoder_decoder", encoder_decoder, why="it contradicts the model type")
    fields.require_value("add_cross_attention", False, None, why="a decoder with cross attention needs an encoder")
    fields.require_value("cross_attention_hidden_size", None, why="cross attention has the decoder's width")
    fields.require_value("tie_encoder_decoder", False, None, why="encoder and decoder do not share weights")
    fields.require_value("pruned_heads", {}, None, why="every layer has all its heads")
    storage = "the storage format is ignored; shapes, parameters and FLOPs are those of unquantized weights"
    fields.add_note("quantization_config", storage)
    fields.add_note("compression_config", storage)


def find_shortest_period(entries: list[Any]) -> tuple[Any, ...]:
    """Return the shortest prefix that gives the full list when repeated."""
    for length in range(1, len(entries) + 1):
        if all(entry == entries[i % length] for i, entry in enumerate(entries)):
            return tuple(entries[:length])
    return ()


def read_layer_types(fields: ConfigJsonReader, layers: int, otherwise: list[str]) -> tuple[str, ...]:
    """Return `layer_types` as the shortest repeating tuple; `otherwise` is the default of the model type."""
    kinds = fields.read_str_list("layer_types") or otherwise
    for kind in sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        fields.add_violation("layer_types", f"{kind!r} is not supported. Known: full_attention and sliding_attention.")
    if len(kinds) != layers:
        fields.add_violation("layer_types", f"has {len(kinds)} entries for {layers} layers. Give one for each.")
    return find_shortest_period(kinds)


def build_window_values(window: int | None, kinds: tuple[str, ...]) -> Values:
    """Return `sliding_window` and `layer_types`, without values that equal the defaults."""
    if window is None or "sliding_attention" not in kinds:
        return {}
    return {"sliding_window": window} | ({"layer_types": kinds} if "full_attention" in kinds else {})


def require_full_attention(fields: ConfigJsonReader) -> None:
    """Check that the sliding-window keys are off. Files of other model types may have them."""
    fields.require_value("sliding_window", None, why="this model type has no sliding window")
    fields.require_value("use_sliding_window", False, None, why="this model type has no sliding window")
    if set(fields.read_str_list("layer_types")) - {"full_attention"}:
        fields.add_violation("layer_types", "this model type has full attention only. Remove it.")


def read_shape(fields: ConfigJsonReader) -> Values:
    """Read the sizes whose names ModelConfig shares with Llama and its relatives."""
    values: Values = {
        name: fields.read_int(name)
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    }
    values["max_position_embeddings"] = fields.read_int("max_position_embeddings")
    values["initializer_range"] = fields.read_float("initializer_range")
    values["tie_word_embeddings"] = fields.read_bool("tie_word_embeddings")
    pairs, width = fields.read_optional_int("num_key_value_heads"), fields.read_optional_int("head_dim")
    values |= {"num_key_value_heads": pairs} if pairs is not None else {}
    values |= {"head_dim": width} if width is not None else {}
    return values


def read_rms_norm(fields: ConfigJsonReader, **more: Any) -> Values:
    """Read the RMSNorm section of Llama and its relatives."""
    return {"kind": "rmsnorm", "eps": fields.read_positive_float("rms_norm_eps"), **more}


def read_attention_bias(fields: ConfigJsonReader) -> Values:
    """Read `attention_bias`, which covers the query, key, value and output projections."""
    bias = fields.read_bool("attention_bias")
    return {"kind": "multi_head", "qkv_bias": bias, "output_bias": bias}


def read_attention_dropout(fields: ConfigJsonReader) -> Values:
    """Read attention dropout, the only dropout of Llama and its relatives."""
    return {"attention": fields.read_float("attention_dropout")}


def write_shape(model: Values) -> Values:
    """Write the fields of `read_shape`, the norm's eps and attention dropout."""
    names = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "max_position_embeddings", "initializer_range", "tie_word_embeddings",
    )  # fmt: skip
    shape = {name: model[name] for name in names}
    return shape | {"rms_norm_eps": model["norm"]["eps"], "attention_dropout": model["dropout"]["attention"]}


def write_layer_types(model: Values) -> list[str]:
    """Write one layer type per layer."""
    kinds = model["layer_types"] or ["full_attention" if model["sliding_window"] is None else "sliding_attention"]
    return [kinds[layer % len(kinds)] for layer in range(model["num_hidden_layers"])]
