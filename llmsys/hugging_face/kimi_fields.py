"""Kimi Linear: fields of config.json that a table of keys cannot say.

The published file has the layers of each kind, counted from 1, and the sizes of linear attention in
`linear_attn_config`; transformers writes them as keys of their own.
"""

from llmsys.hugging_face.config_json import ConfigJsonReader
from llmsys.hugging_face.shared_fields import Values, find_shortest_period, write_layer_types

KINDS = ("linear_attention", "full_attention")
FEED_FORWARDS = ("dense", "sparse")
# Key of the published section → that of transformers.
SIZES = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
SECTION = "linear_attn_config"


def read_kimi_layers(fields: ConfigJsonReader, values: Values) -> None:
    """Read the sizes of linear attention, and which layers have it.

    Args:
        fields: reader of the config.json.
        values: values of the ModelConfig, changed in place.
    """
    section = fields.get_section(SECTION)
    sizes = []
    for inner, outer in SIZES.items():
        section.defaults = {inner: fields.read_int(outer)} | section.defaults
        sizes.append(section.read_int(inner))
    kinds = _read_kinds(fields, section, values["num_hidden_layers"])
    if "linear_attention" not in kinds:
        return
    heads, width, taps = sizes
    values["layer_types"] = find_shortest_period(kinds)
    values["linear_attention"] = {
        "kind": "kimi_delta",
        "num_key_heads": heads,
        "num_value_heads": heads,
        **dict.fromkeys(("key_head_dim", "value_head_dim", "decay_rank", "gate_rank"), width),
        "conv_kernel_dim": taps,
    }


def _read_kinds(fields: ConfigJsonReader, section: ConfigJsonReader, layers: int) -> list[str]:
    """Return the kind of each layer: of `layer_types`, of both lists of layers, or full attention
    in every fourth layer from the fifth on.
    """
    full, linear = (section.read_int_list(name) for name in ("full_attn_layers", "kda_layers"))
    if kinds := fields.read_str_list("layer_types"):
        for kind in sorted({*kinds} - {*KINDS}):
            fields.add_violation(
                "layer_types", f"{kind!r} is not supported. Known: {' and '.join(KINDS)}."
            )
        if len(kinds) != layers:
            fields.add_violation(
                "layer_types", f"has {len(kinds)} entries for {layers} layers. Give one for each."
            )
        return kinds
    if not full and not linear:
        return [KINDS[layer > 0 and layer % 4 == 0] for layer in range(layers)]
    if sorted([*full, *linear]) != list(range(1, layers + 1)):
        section.add_violation(
            "kda_layers",
            f"{linear} and full_attn_layers={full} do not name each of the layers 1 to {layers} "
            "once. Correct both lists.",
        )
    return [KINDS[layer in full] for layer in range(1, layers + 1)]


def write_kimi_layers(model: Values, keys: Values) -> None:
    """Write the keys of `read_kimi_layers`, as published."""
    linear = model["linear_attention"]
    kinds = list(enumerate(write_layer_types(model), start=1))
    keys[SECTION] = {
        "full_attn_layers": [layer for layer, kind in kinds if kind == "full_attention"],
        "kda_layers": [layer for layer, kind in kinds if kind == "linear_attention"],
    }
    if linear is not None:
        keys[SECTION] |= {
            "num_heads": linear["num_value_heads"],
            "head_dim": linear["value_head_dim"],
            "short_conv_kernel_size": linear["conv_kernel_dim"],
        }


def read_kimi_experts(fields: ConfigJsonReader, values: Values) -> None:
    """Read which layers have experts: of `mlp_layer_types`, or all after the first dense ones.

    Args:
        fields: reader of the config.json.
        values: values of the ModelConfig, changed in place.
    """
    layers = values["num_hidden_layers"]
    given = fields.read_optional_int("first_k_dense_replace")
    first = min(1 if given is None else given, layers)
    kinds = fields.read_str_list("mlp_layer_types") or [
        FEED_FORWARDS[layer >= first] for layer in range(layers)
    ]
    if {*kinds} - {*FEED_FORWARDS} or len(kinds) != layers:
        fields.add_violation(
            "mlp_layer_types",
            f"{kinds} does not say {' or '.join(FEED_FORWARDS)} for each of {layers} layers. "
            "Correct it.",
        )
    if "sparse" not in kinds:
        values["moe"] = None
        return
    first = kinds.index("sparse")
    rest = tuple(n for n, kind in enumerate(kinds) if kind == "dense" and n > first)
    values["moe"] |= {"first_dense_layers": first, "dense_layers": rest}


def write_kimi_experts(model: Values, keys: Values) -> None:
    """Write the keys of `read_kimi_experts`."""
    layers, moe = model["num_hidden_layers"], model["moe"]
    keys["moe_layer_freq"] = 1
    if moe is None:
        keys["first_k_dense_replace"] = layers
        keys["num_experts_per_token"] = 1  # the class wants a number
        return
    dense = {*range(moe["first_dense_layers"]), *moe["dense_layers"]}
    dense |= {layer for layer in range(layers) if (layer + 1) % moe["every"]}
    first = next((layer for layer in range(layers) if layer not in dense), layers)
    keys["first_k_dense_replace"] = first
    if len(dense) > first:
        keys["mlp_layer_types"] = [FEED_FORWARDS[layer not in dense] for layer in range(layers)]
