"""Nemotron-H and Mamba-2: layers of one sub-layer each, and what limits the steps of Mamba-2.

`read_…` functions put values into those of a ModelConfig. `write_…` functions put keys into those
of a config.json.
"""

import math

from llmsys.hugging_face.config_json import ConfigJsonReader
from llmsys.hugging_face.shared_fields import (
    Values,
    find_shortest_period,
    get_activation_name,
    write_layer_types,
)

# Letters of `hybrid_override_pattern`, older names, and those of the classes of transformers 5.
KINDS = {
    "M": "linear_attention",
    "*": "full_attention",
    "E": "moe",
    "-": "mlp",
    "mamba": "linear_attention",
    "attention": "full_attention",
} | {name: name for name in ("linear_attention", "full_attention", "moe", "mlp")}
FEED_FORWARDS = ("moe", "mlp")


def read_nemotron_layers(fields: ConfigJsonReader, values: Values) -> None:
    """Read the sub-layer of each layer, and the experts.

    Args:
        fields: reader of the config.json.
        values: values of the ModelConfig, changed in place.
    """
    kinds = _read_kinds(fields)
    layers = fields.read_optional_int("num_hidden_layers")
    if layers not in (None, len(kinds)):
        fields.add_violation(
            "num_hidden_layers", f"{layers} is not {len(kinds)}, as layers are listed. Correct it."
        )
    feeds = [kind in FEED_FORWARDS for kind in kinds]
    types = ["feed_forward" if kind in FEED_FORWARDS else kind for kind in kinds]
    values["num_hidden_layers"] = len(kinds)
    values["layer_types"] = find_shortest_period(types)
    values["feed_forward_layers"] = find_shortest_period(feeds)
    if "linear_attention" not in kinds:
        values["linear_attention"] = None
    values["moe"] = _read_experts(fields, values["feed_forward"], kinds)


def _read_kinds(fields: ConfigJsonReader) -> list[str]:
    pattern = fields.values.get("hybrid_override_pattern")
    fields.ignore_keys("hybrid_override_pattern", "layers_block_type", "layer_types")
    words = fields.read_str_list("layers_block_type") or fields.read_str_list("layer_types")
    words = words or list(pattern if isinstance(pattern, str) else "ME*-")
    for word in sorted({*words} - {*KINDS}):
        fields.add_violation(
            "layers_block_type", f"{word!r} is not supported. Known: {', '.join(KINDS)}."
        )
    return [KINDS.get(word, "mlp") for word in words]


def _read_experts(
    fields: ConfigJsonReader, feed_forward: Values, kinds: list[str]
) -> Values | None:
    """Return the section of experts, whose shared one is not gated either."""
    chosen, wide = fields.read_int("num_experts_per_tok"), fields.read_int("moe_intermediate_size")
    moe = {
        "num_experts": fields.read_int("n_routed_experts", "num_local_experts"),
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": wide,
        "latent_size": fields.read_optional_int("moe_latent_size"),
        "shared_intermediate_size": fields.read_int("moe_shared_expert_intermediate_size"),
        "expert": {"kind": feed_forward["kind"]},
        "score": "sigmoid",
        "norm_topk_prob": fields.read_bool("norm_topk_prob"),
        "routed_scaling_factor": fields.read_positive_float("routed_scaling_factor"),
        "balance": {"kind": "bias"},
        "dense_layers": tuple(n for n, kind in enumerate(kinds) if kind == "mlp"),
    }
    if "moe" not in kinds:
        fields.ignore_keys("n_shared_experts")
        return None
    fields.require_value("n_shared_experts", 1, None, why="there is one shared layer")
    if feed_forward["bias"]:
        fields.add_violation(
            "mlp_bias", "true gives biases to shared experts and none to routed ones. Use false."
        )
    return moe


def write_nemotron_layers(model: Values, keys: Values) -> None:
    """Write the keys of `read_nemotron_layers`.

    Args:
        model: dumped ModelConfig.
        keys: keys of the config.json, changed in place.
    """
    moe = model["moe"]
    kinds = write_layer_types(model)
    keys["layers_block_type"] = [
        _name_feed_forward(moe, layer) if kind == "feed_forward" else kind
        for layer, kind in enumerate(kinds)
    ]
    if moe is None:
        return
    number = moe["num_shared_experts"] * moe["moe_intermediate_size"]
    keys["n_routed_experts"] = moe["num_experts"]
    keys["moe_shared_expert_intermediate_size"] = moe["shared_intermediate_size"] or number
    for name in (
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "routed_scaling_factor",
    ):
        keys[name] = moe[name]
    if moe["latent_size"] is not None:
        keys["moe_latent_size"] = moe["latent_size"]
    keys["mlp_hidden_act"] = get_activation_name(moe["expert"]["kind"])


def _name_feed_forward(moe: Values | None, layer: int) -> str:
    if moe is None or layer < moe["first_dense_layers"] or layer in moe["dense_layers"]:
        return "mlp"
    return "mlp" if (layer + 1) % moe["every"] else "moe"


def read_step_limits(fields: ConfigJsonReader, values: Values) -> None:
    """Read the shortest step of Mamba-2, and check the number of its channels.

    Args:
        fields: reader of the config.json.
        values: values of the ModelConfig, changed in place.
    """
    linear = values["linear_attention"]
    inner = linear["num_value_heads"] * linear["value_head_dim"]
    wide = fields.read_positive_float("expand") * values["hidden_size"]
    if inner != wide:
        fields.add_violation(
            "num_heads",
            f"{linear['num_value_heads']} heads of head_dim={linear['value_head_dim']} are not "
            f"expand · hidden_size = {wide:g} channels. Correct one of them.",
        )
    read_step_limit(fields, values)


def write_step_limits(model: Values, keys: Values) -> None:
    """Write the keys of `read_step_limits`.

    Args:
        model: dumped ModelConfig.
        keys: keys of the config.json, changed in place.
    """
    linear = model["linear_attention"]
    inner = linear["num_value_heads"] * linear["value_head_dim"]
    expand, rest = divmod(inner, model["hidden_size"])
    # transformers' class wants a whole number
    keys["expand"] = inner / model["hidden_size"] if rest else expand
    write_step_limit(model, keys)


def read_step_limit(fields: ConfigJsonReader, values: Values) -> None:
    """Read the shortest step of Mamba-2 from the limits of steps.

    Args:
        fields: reader of the config.json.
        values: values of the ModelConfig, changed in place.
    """
    limits = fields.values.get("time_step_limit") or (0.0, math.inf)
    fields.ignore_keys("time_step_limit")
    # Whole numbers have no infinity in JSON, which some writers spell out.
    if len(limits) != 2 or limits[1] not in (math.inf, {"__float__": "Infinity"}):
        fields.add_violation(
            "time_step_limit", f"{limits} is not supported: steps have no maximum. Use Infinity."
        )
        return
    values["linear_attention"]["min_step"] = float(limits[0])


def write_step_limit(model: Values, keys: Values) -> None:
    """Write the limits of steps.

    Args:
        model: dumped ModelConfig.
        keys: keys of the config.json, changed in place.
    """
    shortest = model["linear_attention"]["min_step"]
    keys["time_step_limit"] = [shortest, {"__float__": "Infinity"}]
