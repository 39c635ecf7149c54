"""Layers of linear attention: fields of config.json that a table of keys cannot say.

`read_…` functions put values into those of a ModelConfig. `write_…` functions put keys into those
of a config.json.
"""

import math

from llmsys.hugging_face.config_json import ConfigJsonReader
from llmsys.hugging_face.shared_fields import (
    Values,
    find_shortest_period,
    read_rope,
    write_layer_types,
    write_rope,
)

KINDS = ("linear_attention", "full_attention")


def read_linear_layers(fields: ConfigJsonReader, values: Values) -> None:
    """Read which layers have linear attention: without `layer_types`, all but every n-th
    (Qwen3-Next).
    """
    layers = values["num_hidden_layers"]
    every = fields.read_optional_int("full_attention_interval") or 4
    kinds = fields.read_str_list("layer_types") or [
        KINDS[(layer + 1) % every == 0] for layer in range(layers)
    ]
    for kind in sorted({*kinds} - {*KINDS}):
        fields.add_violation(
            "layer_types", f"{kind!r} is not supported. Known: {' and '.join(KINDS)}."
        )
    if len(kinds) != layers:
        fields.add_violation(
            "layer_types", f"has {len(kinds)} entries for {layers} layers. Give one for each."
        )
    if "linear_attention" in kinds:
        values["layer_types"] = find_shortest_period(kinds)
    else:
        values["linear_attention"] = None


def write_linear_layers(model: Values, keys: Values) -> None:
    """Write the type of each layer."""
    keys["layer_types"] = write_layer_types(model)


def read_olmo_layers(fields: ConfigJsonReader, values: Values) -> None:
    """Read which layers have linear attention, and its heads: as many as those of attention, with
    three quarters of their channels in keys and twice as many in values (OLMo Hybrid).
    """
    layers, heads = values["num_hidden_layers"], values["num_attention_heads"]
    if not fields.has_value("layer_types") and layers < 4:
        fields.defaults = fields.defaults | {"layer_types": [KINDS[0]] * (layers - 1) + [KINDS[1]]}
    read_linear_layers(fields, values)
    if values["linear_attention"] is None or "full_attention" not in values["layer_types"]:
        fields.add_violation(
            "layer_types", "layers of both types are needed: linear_attention and full_attention."
        )
        return
    keys = fields.read_optional_int("linear_num_key_heads") or heads
    width = fields.read_optional_int("linear_key_head_dim")
    width = width or int(0.75 * values["hidden_size"] / max(1, keys))
    values["linear_attention"] |= {
        "num_key_heads": keys,
        "num_value_heads": fields.read_optional_int("linear_num_value_heads") or heads,
        "key_head_dim": width,
        "value_head_dim": fields.read_optional_int("linear_value_head_dim") or 2 * width,
    }


def write_olmo_layers(model: Values, keys: Values) -> None:
    """Write the keys of `read_olmo_layers`."""
    write_linear_layers(model, keys)
    linear = model["linear_attention"]
    for one in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"):
        keys[f"linear_{one}"] = linear[one]


def read_optional_theta(fields: ConfigJsonReader, values: Values) -> None:
    """Read RoPE; null as its base, or as all of it, turns positions off."""
    given = fields.values.get("rope_parameters", {})
    if given is None or (isinstance(given, dict) and given.get("rope_theta", 0) is None):
        fields.ignore_keys("rope_parameters", "rope_theta", "rope_scaling")
        values["position"] = {"kind": "none"}
    else:
        values["position"] = read_rope(fields)


def write_optional_theta(model: Values, keys: Values) -> None:
    """Write the keys of `read_optional_theta`."""
    position = model["position"]
    # The class fills in a base where the mapping is null.
    none = {"rope_theta": None, "rope_type": "default"}
    keys["rope_parameters"] = none if position["kind"] == "none" else write_rope(position)


def read_mamba_layers(fields: ConfigJsonReader, values: Values) -> None:
    """Read which layers have attention, and the width of Mamba-2's heads (Bamba)."""
    attending = fields.read_int_list("attn_layer_indices")
    kinds = [KINDS[layer in attending] for layer in range(values["num_hidden_layers"])]
    read_mamba_widths(fields, values)
    if "linear_attention" in kinds:
        values["layer_types"] = find_shortest_period(kinds)
    else:
        values["linear_attention"] = None


def read_mamba_head_width(
    fields: ConfigJsonReader, values: Values, channels: int, source: str
) -> None:
    """Read the width of Mamba-2's heads from that of all heads.

    Args:
        fields: reader of the config.json.
        values: values of the ModelConfig, changed in place.
        channels: channels of all heads.
        source: keys that they are from, for messages.
    """
    linear = values["linear_attention"]
    heads = linear["num_value_heads"]
    width, rest = divmod(channels, max(1, heads))
    linear["value_head_dim"] = max(1, width)
    given = fields.values.get("mamba_d_head")
    fields.ignore_keys("mamba_d_head")
    if rest or given not in (None, "auto", width):
        fields.add_violation(
            "mamba_n_heads",
            f"{heads} heads do not have {source} = {channels} channels. Give a divisor, and leave "
            "mamba_d_head out.",
        )


def read_mamba_widths(fields: ConfigJsonReader, values: Values) -> None:
    """Read the width of Mamba-2's heads from that of all heads, and check that steps have no
    limits.

    Args:
        fields: reader of the config.json.
        values: values of the ModelConfig, changed in place.
    """
    inner = fields.read_int("mamba_expand") * values["hidden_size"]
    read_mamba_head_width(fields, values, inner, "mamba_expand · hidden_size")
    fields.ignore_keys("time_step_limit")
    # Whole numbers have no infinity in JSON, which some writers spell out.
    limits = fields.values.get("time_step_limit")
    if limits not in (None, [0, math.inf], [0, {"__float__": "Infinity"}]):
        fields.add_violation(
            "time_step_limit", f"{limits} is not supported: steps have no limits. Leave it out."
        )


def write_mamba_layers(model: Values, keys: Values) -> None:
    """Write the layers with attention, and the widths of Mamba-2's heads."""
    kinds = write_layer_types(model)
    keys["attn_layer_indices"] = [
        layer for layer, kind in enumerate(kinds) if kind == "full_attention"
    ]
    write_mamba_widths(model, keys)


def write_mamba_widths(model: Values, keys: Values) -> None:
    """Write the keys of `read_mamba_widths`.

    Args:
        model: dumped ModelConfig.
        keys: keys of the config.json, changed in place.
    """
    linear = model["linear_attention"]
    keys["mamba_d_head"] = linear["value_head_dim"]
    inner = linear["num_value_heads"] * linear["value_head_dim"]
    keys["mamba_expand"] = inner // model["hidden_size"]
