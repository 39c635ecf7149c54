"""Conversions shared by model types: RoPE, activations, layer types and `architectures`.

`read_…` functions convert config.json fields to ModelConfig values. `write_…` functions convert
them back.

RoPE parameters have old keys (`rope_theta`, `rope_scaling`) and new ones (`rope_parameters`).
"""

import math
from typing import Any

from llmsys.hugging_face.config_json import ConfigJsonReader

Values = dict[str, Any]

KINDS = {
    "default": "none",
    "linear": "linear",
    "dynamic": "ntk",
    "yarn": "yarn",
    "llama3": "llama3",
}
KINDS |= {"longrope": "longrope"}


def read_rope(
    fields: ConfigJsonReader,
    *,
    theta: float = 10000.0,
    fraction: float | None = None,
    theta_names: tuple[str, ...] = ("rope_theta",),
    fraction_names: tuple[str, ...] = ("partial_rotary_factor",),
) -> Values:
    """Read the `position:` section.

    The names are the keys outside `rope_parameters`; inside, the keys are the same for all model
    types. `fraction` is the default share of rotated channels; None: the model type rotates all.
    """
    inner = _read_rope_parameters(fields)
    outer = fields.read_optional_float(*theta_names)
    values: Values = {
        "kind": "rope",
        "theta": _select_first(inner.read_optional_float("rope_theta"), outer, theta),
    }
    if fraction is None:
        inner.require_value(
            "partial_rotary_factor", 1, None, why="this model type rotates all channels"
        )
        for name in fraction_names:
            fields.require_value(name, 1, None, why="this model type rotates all channels")
    else:
        outer_share = fields.read_optional_float(*fraction_names)
        values["fraction"] = _select_first(
            inner.read_optional_float("partial_rotary_factor"), outer_share, fraction
        )
    values["scaling"] = read_scaling(inner, fields)
    fields.merge_section(inner)
    return values


def _select_first(*values: float | None) -> float:
    """Return the first value that is not None."""
    # 0 counts as a value; ModelConfig's own constraints reject it.
    return next(value for value in values if value is not None)


def _read_rope_parameters(fields: ConfigJsonReader) -> ConfigJsonReader:
    if fields.has_value("rope_scaling") and fields.has_value("rope_parameters"):
        fields.add_violation(
            "rope_scaling", "is given together with rope_parameters. Keep rope_parameters."
        )
    old = fields.read_section("rope_scaling", {})
    new = fields.read_section("rope_parameters", {})
    return new if new.values else old


def read_scaling(inner: ConfigJsonReader, fields: ConfigJsonReader) -> Values:
    """Read the `scaling:` section from RoPE parameters; `fields` is the surrounding config.json."""
    inner.defaults = {"rope_type": "default"}
    name = inner.read_str("rope_type", "type")
    if name not in KINDS:
        inner.add_violation("rope_type", f"{name!r} is not supported. Known: {', '.join(KINDS)}.")
        return {"kind": "none"}
    kind = KINDS[name]
    if kind == "none":
        return {"kind": kind}
    if kind == "linear":
        return {"kind": kind, "factor": inner.read_positive_float("factor")}
    longest = fields.read_int("max_position_embeddings")
    # max_position_embeddings is the length before, and this base follows the sequence beyond it
    if kind == "ntk":
        return {
            "kind": kind,
            "factor": inner.read_positive_float("factor"),
            "original_max_position_embeddings": longest,
        }
    # Phi keeps the old length outside the mapping, and there it comes first.
    old_length = fields.read_optional_int("original_max_position_embeddings")
    inside = inner.read_optional_int("original_max_position_embeddings")
    length = old_length or inside or longest
    values: Values = {"kind": kind, "original_max_position_embeddings": length}
    if kind == "longrope":
        return values | _read_longrope(inner, length)
    values["factor"] = inner.read_positive_float("factor")
    if kind == "llama3":
        return values | {
            name: inner.read_positive_float(name)
            for name in ("low_freq_factor", "high_freq_factor")
        }
    return values | _read_yarn(inner)


def _read_yarn(inner: ConfigJsonReader) -> Values:
    inner.defaults = inner.defaults | {"truncate": True}
    inner.ignore_keys("finetuned")  # says how the weights came about
    values: Values = {
        "beta_fast": inner.read_optional_float("beta_fast") or 32.0,
        "beta_slow": inner.read_optional_float("beta_slow") or 1.0,
        "attention_factor": inner.read_optional_float("attention_factor"),
        "truncate": inner.read_bool("truncate"),
    }
    mscale, mscale_all_dim = (
        inner.read_optional_float("mscale"),
        inner.read_optional_float("mscale_all_dim"),
    )
    if mscale and mscale_all_dim:  # one alone says nothing about cosines and sines
        values |= {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
    return values


def _read_longrope(inner: ConfigJsonReader, old_length: int) -> Values:
    values: Values = {name: inner.read_float_list(name) for name in ("short_factor", "long_factor")}
    factor, whole = (
        inner.read_optional_float("factor"),
        inner.read_optional_float("attention_factor"),
    )
    if whole is None and factor is not None:
        whole = (
            1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(max(2, old_length)))
        )
    for name in ("short_mscale", "long_mscale"):
        own = inner.read_optional_float(name)
        values[name] = whole if own is None else own
    return values


def compute_yarn_score_scale(position: Values, rotary: Any, channels: int) -> float | None:
    """Return DeepSeek's scale of the scores, 1 / sqrt(channels) · m², with YaRN's m; None without
    `mscale_all_dim`.

    Args:
        position: the `position:` section.
        rotary: the RoPE parameters of the file, which may have `mscale_all_dim` without `mscale`.
        channels: channels of a query.

    Returns:
        The scale, or None.
    """
    stretch = rotary.get("mscale_all_dim") if isinstance(rotary, dict) else None
    if (
        position["scaling"]["kind"] == "none"
        or not isinstance(stretch, int | float)
        or not stretch
        or channels < 1
    ):
        return None
    factor = float(position["scaling"].get("factor", 1.0))
    sharper = 1.0 if factor <= 1 else 0.1 * float(stretch) * math.log(factor) + 1.0
    return float(channels**-0.5) * sharper * sharper


def write_rope(position: Values) -> Values:
    """Write `rope_parameters` with the keys of transformers 5."""
    scaling = dict(position["scaling"])
    names = {kind: name for name, kind in KINDS.items()}
    values = {"rope_theta": position["theta"], "rope_type": names[scaling.pop("kind")]}
    values |= {
        key: list(value) if isinstance(value, tuple) else value for key, value in scaling.items()
    }
    return {key: value for key, value in values.items() if value is not None}


ACTIVATIONS = {
    "relu": "relu",
    "relu2": "squared_relu",
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
_PLAIN_NAMES = {
    "relu": "relu",
    "squared_relu": "relu2",
    "gelu": "gelu",
    "gelu_tanh": "gelu_new",
    "silu": "silu",
}
_GATED_NAMES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh"}


def read_activation(fields: ConfigJsonReader, name: str) -> str:
    """Return the ModelConfig name of an activation."""
    return ACTIVATIONS[fields.read_choice(name, ACTIVATIONS)]


def read_gated_kind(fields: ConfigJsonReader, name: str) -> str:
    """Return the ModelConfig kind of a gated feed-forward."""
    return GATED[
        ACTIVATIONS[
            fields.read_choice(name, [key for key, ours in ACTIVATIONS.items() if ours in GATED])
        ]
    ]


def get_activation_name(kind: str) -> str:
    """Return Hugging Face's activation name of a feed-forward kind; the kind itself if there is
    none.
    """
    return _PLAIN_NAMES.get(kind) or _GATED_NAMES.get(kind, kind)


def read_architecture(fields: ConfigJsonReader, legal: dict[str, str], default: str) -> str:
    """Return the value in `legal` of the class in `architectures`; `default` if the file names
    no class.
    """
    names = fields.read_str_list("architectures")
    if not names:
        return default
    if len(names) == 1 and names[0] in legal:
        return legal[names[0]]
    fields.add_violation(
        "architectures", f"{', '.join(names)} cannot be built. Known: {', '.join(legal)}."
    )
    return default


def check_decoder_class(fields: ConfigJsonReader, stem: str, tied: bool, *more: str) -> None:
    """Check that `architectures` has a language-model head. The bare model is accepted with tied
    embeddings.
    """
    bare = f"{stem}Model"
    found = read_architecture(
        fields, dict.fromkeys((f"{stem}ForCausalLM", *more), "lm") | {bare: "bare"}, "lm"
    )
    if found == "bare" and not tied:
        fields.add_violation(
            "architectures",
            f"{bare} has no head, but tie_word_embeddings is false. Use {stem}ForCausalLM, which "
            "counts the head.",
        )


def check_common_keys(fields: ConfigJsonReader, *, encoder_decoder: bool = False) -> None:
    """Check the keys that every model type may have and that are supported at one value only.

    Args:
        fields: reader of the config.json.
        encoder_decoder: whether the model type has an encoder and a decoder.
    """
    fields.require_value("is_encoder_decoder", encoder_decoder, why="it contradicts the model type")
    fields.require_value(
        "add_cross_attention", False, None, why="a decoder with cross attention needs an encoder"
    )
    fields.require_value(
        "cross_attention_hidden_size", None, why="cross attention has the decoder's width"
    )
    fields.require_value(
        "tie_encoder_decoder", False, None, why="encoder and decoder do not share weights"
    )
    fields.require_value("pruned_heads", {}, None, why="every layer has all its heads")
    storage = (
        "the storage format is ignored; shapes, parameters and FLOPs are those of unquantized "
        "weights"
    )
    fields.add_note("quantization_config", storage)
    fields.add_note("compression_config", storage)


def find_shortest_period(entries: list[Any]) -> tuple[Any, ...]:
    """Return the shortest prefix that gives the full list when repeated."""
    for length in range(1, len(entries) + 1):
        if all(entry == entries[i % length] for i, entry in enumerate(entries)):
            return tuple(entries[:length])
    return ()


def read_layer_types(
    fields: ConfigJsonReader, layers: int, otherwise: list[str]
) -> tuple[str, ...]:
    """Return `layer_types` as the shortest repeating tuple; `otherwise` is the default of the
    model type.
    """
    kinds = fields.read_str_list("layer_types") or otherwise
    for kind in sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        fields.add_violation(
            "layer_types",
            f"{kind!r} is not supported. Known: full_attention and sliding_attention.",
        )
    if len(kinds) != layers:
        fields.add_violation(
            "layer_types", f"has {len(kinds)} entries for {layers} layers. Give one for each."
        )
    return find_shortest_period(kinds)


def build_window_values(window: int | None, kinds: tuple[str, ...]) -> Values:
    """Return `sliding_window` and `layer_types`, without values that equal the defaults."""
    if window is None or "sliding_attention" not in kinds:
        return {}
    return {"sliding_window": window} | (
        {"layer_types": kinds} if "full_attention" in kinds else {}
    )


def require_full_attention(fields: ConfigJsonReader) -> None:
    """Check that the sliding-window keys are off. Files of other model types may have them."""
    fields.require_value("sliding_window", None, why="this model type has no sliding window")
    fields.require_value(
        "use_sliding_window", False, None, why="this model type has no sliding window"
    )
    if set(fields.read_str_list("layer_types")) - {"full_attention"}:
        fields.add_violation("layer_types", "this model type has full attention only. Remove it.")


def write_layer_types(model: Values) -> list[str]:
    """Write one layer type per layer."""
    kinds = model["layer_types"] or [
        "full_attention" if model["sliding_window"] is None else "sliding_attention"
    ]
    return [kinds[layer % len(kinds)] for layer in range(model["num_hidden_layers"])]
