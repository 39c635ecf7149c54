"""Layers of linear attention: fields of config.json that a table of keys cannot say.

`read_…` functions put values into those of a ModelConfig. `write_…` functions put keys into those
of a config.json.
"""

from llmsys.hugging_face.config_json import ConfigJsonReader
from llmsys.hugging_face.shared_fields import Values, find_shortest_period, write_layer_types

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
