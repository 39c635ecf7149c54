"""Positions and widths of decoders: fields of config.json that a table of keys cannot say.

`read_…` functions put values into those of a ModelConfig. `write_…` functions put keys into those
of a config.json.
"""

from typing import Any

from llmsys.hugging_face.config_json import ConfigJsonReader
from llmsys.hugging_face.shared_fields import Values, read_rope, read_scaling, write_rope

# Base of Gemma 3's layers with a window.
SLIDING_THETA = 1e4
# Keys of RoPE with several axes: channels of each, and whether they take turns.
AXES = ("mrope_section", "mrope_interleaved")


def read_rope_section(fields: ConfigJsonReader, values: Values, **options: Any) -> None:
    """Read RoPE.

    Args:
        fields: reader of the config.json.
        values: values of the ModelConfig, changed in place.
        options: those of `read_rope`.
    """
    values["position"] = read_rope(fields, **options) | values.get("position", {})


def write_rope_section(
    model: Values, keys: Values, *, fraction: float | None = None, **options: Any
) -> None:
    """Write the keys of `read_rope_section`."""
    keys["rope_parameters"] = write_rope(model["position"])
    if fraction is not None:
        keys["rope_parameters"]["partial_rotary_factor"] = model["position"]["fraction"]


def read_rope_of_axes(fields: ConfigJsonReader, values: Values, **options: Any) -> None:
    """Read RoPE whose channels are divided among time, height and width, which in a text are all
    the position of a token (Qwen3.5).

    Args:
        fields: reader of the config.json.
        values: values of the ModelConfig, changed in place.
        options: those of `read_rope`.
    """
    for name in ("rope_parameters", "rope_scaling"):
        inner = fields.values.get(name)
        if isinstance(inner, dict):
            kept = {key: value for key, value in inner.items() if key not in AXES}
            fields.values = fields.values | {name: kept}
    read_rope_section(fields, values, **options)


def read_rope_of_channels(
    fields: ConfigJsonReader, values: Values, *, theta: float = 10000.0
) -> None:
    """Read RoPE on the first `rotary_dim` channels of a head (MiniMax-M2's published files).

    Args:
        fields: reader of the config.json.
        values: values of the ModelConfig, changed in place.
        theta: the default of `read_rope`.
    """
    heads = values["num_attention_heads"] or 1
    width = values.get("head_dim") or values["hidden_size"] // heads
    rotated = fields.read_optional_int("rotary_dim")
    fraction = 1.0 if rotated is None else rotated / max(1, width)
    read_rope_section(fields, values, theta=theta, fraction=fraction)


def write_rope_of_channels(model: Values, keys: Values, *, theta: float = 10000.0) -> None:
    """Write the keys of `read_rope_of_channels`, as current files have them."""
    write_rope_section(model, keys, fraction=1.0)


def read_rope_with_yarn(fields: ConfigJsonReader, values: Values) -> None:
    """Read gpt-oss's RoPE, which YaRN scales where the file says nothing."""
    if not fields.has_value("rope_parameters") and not fields.has_value("rope_scaling"):
        yarn = {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        }
        fields.values = fields.values | {"rope_parameters": yarn}
    read_rope_section(fields, values, theta=150000.0)


def read_rope_of_two_kinds(
    fields: ConfigJsonReader, values: Values, *, theta: float = 1e6, is_shared: bool = False
) -> None:
    """Read base and scaling of full layers, and the base of sliding layers, which cannot be scaled
    (Gemma 3, OLMo 3).

    Args:
        fields: reader of the config.json.
        values: values of the ModelConfig, changed in place.
        theta: default base of full layers.
        is_shared: `rope_theta` and the default are those of sliding layers too.
    """
    nested = fields.read_section("rope_parameters", {})
    full = nested.read_section("full_attention", {})
    sliding = nested.read_section("sliding_attention", {})
    old = fields.read_section("rope_scaling", {})
    if full.values and old.values:
        fields.add_violation(
            "rope_scaling", "is given together with rope_parameters. Keep rope_parameters."
        )
    base = fields.read_optional_float("rope_theta") or theta
    if is_shared:
        sliding_base = base
    else:
        sliding_base = fields.read_optional_float("rope_local_base_freq") or SLIDING_THETA
    base = full.read_optional_float("rope_theta") or base
    sliding_base = sliding.read_optional_float("rope_theta") or sliding_base
    sliding.require_value("rope_type", "default", why="sliding-window layers have no rope scaling")
    scaling = read_scaling(old if old.values else full, fields)
    # One RoPE for all layers has no second base.
    is_one = is_shared and sliding_base == base and scaling["kind"] == "none"
    for inner in (full, sliding):
        nested.merge_section(inner)
    for outer in (nested, old):
        fields.merge_section(outer)
    values["position"] = {
        "kind": "rope",
        "theta": base,
        "sliding_theta": None if is_one else sliding_base,
        "scaling": scaling,
    }


def write_rope_of_two_kinds(model: Values, keys: Values, **options: Any) -> None:
    """Write the keys of `read_rope_of_two_kinds`."""
    position = model["position"]
    base = position["theta"] if position["sliding_theta"] is None else position["sliding_theta"]
    sliding = {"rope_type": "default", "rope_theta": base}
    keys["rope_parameters"] = {
        "full_attention": write_rope(position),
        "sliding_attention": sliding,
    }


def read_score_scale(fields: ConfigJsonReader, values: Values) -> None:
    """Read the channels by which Gemma scales its scores, if they are not those of a head."""
    scalar = fields.read_positive_float("query_pre_attn_scalar")
    values["attention"]["scale"] = None if scalar == values.get("head_dim") else scalar**-0.5


def write_score_scale(model: Values, keys: Values) -> None:
    """Write the keys of `read_score_scale`."""
    scale = model["attention"]["scale"]
    scalar = model["head_dim"] if scale is None else scale**-2
    is_whole = abs(scalar - round(scalar)) < 1e-6
    keys["query_pre_attn_scalar"] = round(scalar) if is_whole else scalar


def read_four_times(fields: ConfigJsonReader, values: Values, *, key: str = "") -> None:
    """Read a feed-forward that is four times as wide as the model, unless `key` says otherwise."""
    given = fields.read_optional_int(key) if key else None
    values["intermediate_size"] = given or 4 * values["hidden_size"]


def write_four_times(model: Values, keys: Values, *, key: str = "") -> None:
    """Write the keys of `read_four_times`."""
    if key:
        keys[key] = model["intermediate_size"]


def read_falcon_branches(fields: ConfigJsonReader, values: Values) -> None:
    """Read Falcon's positions, key-value heads, and how attention and feed-forward are joined."""
    heads = values["num_attention_heads"]
    values["position"] = read_rope(fields)
    if fields.read_bool("alibi"):  # the bias is divided as the scores are
        width = values["hidden_size"] // (heads or 1)
        values["position"] = {"kind": "alibi", "factor": max(1, width) ** -0.5}
    values["num_key_value_heads"] = _read_key_value_heads(fields, heads)
    values["residual"] = _read_residual(fields)


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
    new = fields.read_bool("new_decoder_architecture")
    norms = fields.read_optional_int("num_ln_in_parallel_attn")
    if not fields.read_bool("parallel_attn"):
        if new:
            fields.add_violation(
                "parallel_attn", "false contradicts new_decoder_architecture. Set it to true."
            )
        return {"kind": "pre"}
    if norms not in (None, 1, 2) or (norms == 2 and not new):
        fields.add_violation("num_ln_in_parallel_attn", f"{norms} cannot be built here. Use 1.")
    return {"kind": "parallel", "norms": 2 if new and norms in (None, 2) else 1}


def write_falcon_branches(model: Values, keys: Values) -> None:
    """Write the keys of `read_falcon_branches`."""
    residual = model["residual"]
    pairs = model["num_key_value_heads"]
    is_new = residual.get("norms") == 2 or pairs not in (1, model["num_attention_heads"])
    has_alibi = model["position"]["kind"] == "alibi"
    keys |= {
        "num_kv_heads": pairs,
        "num_ln_in_parallel_attn": residual.get("norms") if is_new else None,
        "alibi": has_alibi,
        "new_decoder_architecture": is_new,
        "multi_query": pairs == 1,
        "parallel_attn": residual["kind"] == "parallel",
    }
    if not has_alibi:
        keys["rope_parameters"] = write_rope(model["position"])
