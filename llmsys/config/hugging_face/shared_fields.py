"""What many model types have in common: activations, kinds of layers, the class in `architectures`, the plain decoder.

Reading turns the fields of a config.json into the values of a ModelConfig; writing turns those values back.
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
    """Our name of a plain activation."""
    return ACTIVATIONS[fields.read_choice(name, ACTIVATIONS)]


def read_gated_kind(fields: ConfigJsonReader, name: str) -> str:
    """The kind of a gated feed-forward."""
    return GATED[ACTIVATIONS[fields.read_choice(name, [key for key, ours in ACTIVATIONS.items() if ours in GATED])]]


def get_activation_name(kind: str) -> str:
    """Hugging Face's name of a feed-forward kind's activation; the kind itself where there is none."""
    return _PLAIN_NAMES.get(kind) or _GATED_NAMES.get(kind, kind)


def read_architecture(fields: ConfigJsonReader, legal: dict[str, str], default: str) -> str:
    """What the class in `architectures` is for, by `legal`; without one, `default`."""
    names = fields.read_str_list("architectures")
    if not names:
        return default
    if len(names) == 1 and names[0] in legal:
        return legal[names[0]]
    fields.add_violation("architectures", f"{', '.join(names)} cannot be built. Known: {', '.join(legal)}.")
    return default


def check_decoder_class(fields: ConfigJsonReader, stem: str, tied: bool, *more: str) -> None:
    """A decoder needs its language-modelling class; the bare model is as good where the embedding is the head."""
    bare = f"{stem}Model"
    found = read_architecture(fields, dict.fromkeys((f"{stem}ForCausalLM", *more), "lm") | {bare: "bare"}, "lm")
    if found == "bare" and not tied:
        fields.add_violation(
            "architectures",
            f"{bare} has no head, and tie_word_embeddings is false. Use {stem}ForCausalLM, whose head is counted too.",
        )


def check_common_keys(fields: ConfigJsonReader, *, encoder_decoder: bool = False) -> None:
    """Keys that every model type may carry, and that can be built at one value only."""
    fields.require_value("is_encoder_decoder", encoder_decoder, why="it contradicts the model type")
    fields.require_value("add_cross_attention", False, None, why="a decoder with cross attention has no encoder here")
    fields.require_value("cross_attention_hidden_size", None, why="cross attention has the decoder's width")
    fields.require_value("tie_encoder_decoder", False, None, why="the two stacks have weights of their own")
    fields.require_value("pruned_heads", {}, None, why="every layer has all its heads")
    storage = "the format of stored weights is left out; shapes, counts and operations are those of the full weights"
    fields.add_note("quantization_config", storage)
    fields.add_note("compression_config", storage)


def find_shortest_period(entries: list[Any]) -> tuple[Any, ...]:
    """The shortest beginning that gives the whole list when it is repeated."""
    for length in range(1, len(entries) + 1):
        if all(one == entries[i % length] for i, one in enumerate(entries)):
            return tuple(entries[:length])
    return ()


def read_layer_types(fields: ConfigJsonReader, layers: int, otherwise: list[str]) -> tuple[str, ...]:
    """`layer_types` as the shortest repeating list; `otherwise` is what a file without them means."""
    kinds = fields.read_str_list("layer_types") or otherwise
    for kind in sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        fields.add_violation("layer_types", f"{kind!r} is not understood. Known: full_attention and sliding_attention.")
    if len(kinds) != layers:
        fields.add_violation("layer_types", f"has {len(kinds)} entries for {layers} layers. Give one for each.")
    return find_shortest_period(kinds)


def build_window_values(window: int | None, kinds: tuple[str, ...]) -> Values:
    """`sliding_window` and `layer_types`, as short as they can be said."""
    if window is None or "sliding_attention" not in kinds:
        return {}
    return {"sliding_window": window} | ({"layer_types": kinds} if "full_attention" in kinds else {})


def require_full_attention(fields: ConfigJsonReader) -> None:
    """Model types without windows still meet the keys of those that have them."""
    fields.require_value("sliding_window", None, why="this model type has no windows")
    fields.require_value("use_sliding_window", False, None, why="this model type has no windows")
    if set(fields.read_str_list("layer_types")) - {"full_attention"}:
        fields.add_violation("layer_types", "this model type has full attention only. Remove it.")


def read_shape(fields: ConfigJsonReader) -> Values:
    """Sizes under the names that Llama and its relatives share with us."""
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
    """The norm of Llama and its relatives."""
    return {"kind": "rmsnorm", "eps": fields.read_positive_float("rms_norm_eps"), **more}


def read_attention_bias(fields: ConfigJsonReader) -> Values:
    """One switch for the biases of queries, keys, values and output."""
    bias = fields.read_bool("attention_bias")
    return {"kind": "multi_head", "qkv_bias": bias, "output_bias": bias}


def read_attention_dropout(fields: ConfigJsonReader) -> Values:
    """The only dropout of Llama and its relatives."""
    return {"attention": fields.read_float("attention_dropout")}


def write_shape(model: Values) -> Values:
    """The inverse of `read_shape`, with the norm's eps and attention's dropout."""
    names = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "max_position_embeddings", "initializer_range", "tie_word_embeddings",
    )  # fmt: skip
    shape = {name: model[name] for name in names}
    return shape | {"rms_norm_eps": model["norm"]["eps"], "attention_dropout": model["dropout"]["attention"]}


def write_layer_types(model: Values) -> list[str]:
    """One kind for each layer."""
    kinds = model["layer_types"] or ["full_attention" if model["sliding_window"] is None else "sliding_attention"]
    return [kinds[layer % len(kinds)] for layer in range(model["num_hidden_layers"])]
