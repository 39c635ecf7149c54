"""Granite: multipliers, layers of Mamba-2 or attention, and experts beside a shared one.

`read_…` functions put values into those of a ModelConfig. `write_…` functions put keys into those
of a config.json.
"""

import math

from llmsys.hugging_face.config_json import ConfigJsonReader
from llmsys.hugging_face.linear_layers import read_mamba_widths, write_mamba_widths
from llmsys.hugging_face.shared_fields import (
    Values,
    find_shortest_period,
    get_activation_name,
    read_gated_kind,
    read_rope,
    write_layer_types,
    write_rope,
)

# Published names of the types of layers, and those of the classes of transformers 5.
LAYER_TYPES = {
    "mamba": "linear_attention",
    "linear_attention": "linear_attention",
    "attention": "full_attention",
    "full_attention": "full_attention",
}


def read_multipliers(fields: ConfigJsonReader, values: Values) -> None:
    """Read the factor on attention scores, and the number that divides logits."""
    heads = values["num_attention_heads"] or 1
    width = values.get("head_dim") or values["hidden_size"] // heads
    scale = fields.read_positive_float("attention_multiplier")
    attention = values.setdefault("attention", {})
    attention["scale"] = None if scale == max(1, width) ** -0.5 else scale
    values.setdefault("head", {"kind": "lm"})["scale"] = 1 / fields.read_positive_float(
        "logits_scaling"
    )


def write_multipliers(model: Values, keys: Values) -> None:
    """Write the keys of `read_multipliers`."""
    scale = model["attention"]["scale"]
    keys["attention_multiplier"] = model["head_dim"] ** -0.5 if scale is None else scale
    keys["logits_scaling"] = _invert(model["head"]["scale"])


def _invert(scale: float) -> float:
    """Return the number whose inverse is a scale: 1 / 3 is one of several neighbours."""
    first = 1 / scale
    near = (first, math.nextafter(first, 0), math.nextafter(first, math.inf))
    return next((one for one in near if 1 / one == scale), first)


def read_granite_layers(fields: ConfigJsonReader, values: Values) -> None:
    """Read which layers have Mamba-2 and which attention; without `layer_types` all have Mamba-2.

    Args:
        fields: reader of the config.json.
        values: values of the ModelConfig, changed in place.
    """
    layers = values["num_hidden_layers"]
    name = "layer_types" if fields.has_value("layer_types") else "layers_block_type"
    words = fields.read_str_list(name) or ["linear_attention"] * layers
    fields.ignore_keys("layer_types", "layers_block_type")
    for word in sorted({*words} - {*LAYER_TYPES}):
        fields.add_violation(name, f"{word!r} is not supported. Use mamba or attention.")
    if len(words) != layers:
        fields.add_violation(
            name, f"has {len(words)} entries for {layers} layers. Give one for each."
        )
    kinds = [LAYER_TYPES.get(word, "full_attention") for word in words]
    if "linear_attention" in kinds:
        values["layer_types"] = find_shortest_period(kinds)
        read_mamba_widths(fields, values)
    else:
        # Their sizes are those of no layer.
        fields.ignore_keys("mamba_d_head", "mamba_expand", "time_step_limit")
        values["linear_attention"] = None


def write_granite_layers(model: Values, keys: Values) -> None:
    """Write the type of each layer, and the widths of Mamba-2's heads."""
    keys["layer_types"] = write_layer_types(model)
    if model["linear_attention"] is None:
        keys["mamba_n_heads"] = 1  # the class divides by it, whatever the layers
    else:
        write_mamba_widths(model, keys)


def read_granite_feed_forward(fields: ConfigJsonReader, values: Values) -> None:
    """Read experts beside a shared one; without experts the shared one is the feed-forward.

    Args:
        fields: reader of the config.json.
        values: values of the ModelConfig, changed in place.
    """
    experts = fields.read_optional_int("num_local_experts") or 0
    shared = fields.read_int("shared_intermediate_size")
    wide = fields.read_int("intermediate_size")
    chosen = fields.read_int("num_experts_per_tok")
    weight = fields.read_optional_float("router_aux_loss_coef") or 0.0
    kind = read_gated_kind(fields, "hidden_act")
    if not experts:
        values["intermediate_size"] = shared
        values["feed_forward"] = {"kind": kind}
        return
    values["moe"] = {
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": wide,
        "shared_intermediate_size": shared,
        "expert": {"kind": kind},
        "balance": {"kind": "auxiliary_loss", "weight": weight},
    }


def write_granite_feed_forward(model: Values, keys: Values) -> None:
    """Write the keys of `read_granite_feed_forward`."""
    moe = model["moe"]
    keys["output_router_logits"] = False
    if moe is None:
        keys["num_local_experts"] = 0
        keys["intermediate_size"] = model["intermediate_size"]
        keys["shared_intermediate_size"] = model["intermediate_size"]
        keys["hidden_act"] = get_activation_name(model["feed_forward"]["kind"])
        return
    number = moe["num_shared_experts"] * moe["moe_intermediate_size"]
    keys["num_local_experts"] = moe["num_experts"]
    keys["num_experts_per_tok"] = moe["num_experts_per_tok"]
    keys["intermediate_size"] = moe["moe_intermediate_size"]
    keys["shared_intermediate_size"] = moe["shared_intermediate_size"] or number
    keys["router_aux_loss_coef"] = moe["balance"].get("weight") or 0.0
    keys["hidden_act"] = get_activation_name(moe["expert"]["kind"])


def read_optional_rope(fields: ConfigJsonReader, values: Values) -> None:
    """Read RoPE, which only `position_embedding_type: rope` turns on."""
    kind = fields.values.get("position_embedding_type")
    fields.require_value(
        "position_embedding_type", None, "nope", "rope", why="other positions are not known"
    )
    if kind == "rope":
        values["position"] = read_rope(fields)
        return
    fields.ignore_keys("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    values["position"] = {"kind": "none"}


def write_optional_rope(model: Values, keys: Values) -> None:
    """Write the keys of `read_optional_rope`."""
    position = model["position"]
    keys["position_embedding_type"] = None
    if position["kind"] != "none":
        keys["position_embedding_type"] = "rope"
        keys["rope_parameters"] = write_rope(position)
