"""Layers with a sliding window, or without RoPE: fields of config.json that a table of keys
cannot say.

`read_…` functions put values into those of a ModelConfig. `write_…` functions put keys into those
of a config.json.
"""

from llmsys.hugging_face.config_json import ConfigJsonReader
from llmsys.hugging_face.shared_fields import (
    Values,
    build_window_values,
    find_shortest_period,
    read_layer_types,
    require_full_attention,
    write_layer_types,
)


def read_full_attention(fields: ConfigJsonReader, values: Values) -> None:
    """Check that the sliding-window keys are off."""
    require_full_attention(fields)


def read_every_window(fields: ConfigJsonReader, values: Values) -> None:
    """Read a window of all layers, or of none."""
    width = fields.read_optional_int("sliding_window")
    values |= build_window_values(width, ("sliding_attention",))


def write_every_window(model: Values, keys: Values) -> None:
    """Write the keys of `read_every_window`."""
    keys["sliding_window"] = model["sliding_window"]


def _read_switched_width(fields: ConfigJsonReader) -> int | None:
    """Return the width of windows; None, whatever the file says, unless `use_sliding_window`."""
    is_used = fields.read_bool("use_sliding_window")
    width = fields.read_optional_int("sliding_window") if is_used else None
    fields.ignore_keys("sliding_window")
    return width


def _require_width(fields: ConfigJsonReader, kinds: tuple[str, ...], width: int | None) -> None:
    if "sliding_attention" in kinds and width is None:
        fields.add_violation(
            "use_sliding_window",
            "layer_types has sliding_attention. Set use_sliding_window to true.",
        )


def read_switched_window(fields: ConfigJsonReader, values: Values) -> None:
    """Read a window of all layers that `use_sliding_window` turns on."""
    values |= build_window_values(_read_switched_width(fields), ("sliding_attention",))


def write_switched_window(model: Values, keys: Values) -> None:
    """Write the keys of `read_switched_window`."""
    keys["use_sliding_window"] = model["sliding_window"] is not None
    keys["sliding_window"] = model["sliding_window"]


def read_late_windows(fields: ConfigJsonReader, values: Values) -> None:
    """Read windows in the layers from `max_window_layers` (Qwen2, Qwen3)."""
    layers = values["num_hidden_layers"]
    first = fields.read_int("max_window_layers")
    width = _read_switched_width(fields)
    full = min(first, layers) if width is not None else layers
    otherwise = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    kinds = read_layer_types(fields, layers, otherwise)
    _require_width(fields, kinds, width)
    values |= build_window_values(width, kinds)


def read_early_windows(fields: ConfigJsonReader, values: Values) -> None:
    """Read windows in every other layer before `max_window_layers` (Qwen2-MoE)."""
    layers = values["num_hidden_layers"]
    first = fields.read_int("max_window_layers")
    width = _read_switched_width(fields)
    slides = fields.read_bool("use_sliding_window")
    otherwise = [
        "sliding_attention" if slides and layer % 2 == 0 and layer < first else "full_attention"
        for layer in range(layers)
    ]
    kinds = read_layer_types(fields, layers, otherwise)
    _require_width(fields, kinds, width)
    values |= build_window_values(width, kinds)


def write_layer_windows(model: Values, keys: Values) -> None:
    """Write the window keys of Qwen, with one layer type per layer."""
    kinds = write_layer_types(model)
    first = kinds.index("sliding_attention") if "sliding_attention" in kinds else len(kinds)
    write_switched_window(model, keys)
    keys["max_window_layers"] = first
    keys["layer_types"] = kinds


def read_windows_between(
    fields: ConfigJsonReader, values: Values, *, every: int, key: str = ""
) -> None:
    """Read windows in all layers but every n-th (Gemma, gpt-oss, OLMo 3).

    Args:
        fields: reader of the config.json.
        values: values of the ModelConfig, changed in place.
        every: distance of the layers with full attention; 0: there are none (Ministral).
        key: key that may say another distance, with or without an underscore in front.
    """
    if key:
        fields.defaults = fields.defaults | {key: every}
        every = fields.read_int(key, f"_{key}") or 1
    layers = values["num_hidden_layers"]
    otherwise = [
        "full_attention" if every and (layer + 1) % every == 0 else "sliding_attention"
        for layer in range(layers)
    ]
    kinds = read_layer_types(fields, layers, otherwise)
    values |= build_window_values(fields.read_optional_int("sliding_window"), kinds)


def write_windows_between(model: Values, keys: Values, *, every: int, key: str = "") -> None:
    """Write the keys of `read_windows_between`."""
    keys["sliding_window"] = model["sliding_window"]
    keys["layer_types"] = write_layer_types(model)


def read_windows_from(fields: ConfigJsonReader, values: Values) -> None:
    """Read windows in the layers from `max_window_layers`, without a switch (dots.llm1)."""
    layers = values["num_hidden_layers"]
    first = fields.read_int("max_window_layers")
    width = fields.read_optional_int("sliding_window")
    full = min(first, layers) if width is not None else layers
    otherwise = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    values |= build_window_values(width, read_layer_types(fields, layers, otherwise))


def write_windows_from(model: Values, keys: Values) -> None:
    """Write the keys of `read_windows_from`."""
    kinds = write_layer_types(model)
    keys["sliding_window"] = model["sliding_window"]
    keys["max_window_layers"] = len(kinds)
    keys["layer_types"] = kinds


def read_windows_with_rope(
    fields: ConfigJsonReader, values: Values, *, pattern: int | None = None
) -> None:
    """Read windows in all layers but every n-th, which then has no RoPE (EXAONE 4, Command A).

    Args:
        fields: reader of the config.json.
        values: values of the ModelConfig, changed in place.
        pattern: distance of the layers without a window, where transformers' class has no key for
            it. Layers without a window then have no RoPE either, whatever the others have. None:
            the key's; and without a width all layers have RoPE.
    """
    layers = values["num_hidden_layers"]
    width = fields.read_optional_int("sliding_window")
    if pattern is not None:
        fields.defaults = fields.defaults | {"sliding_window_pattern": pattern}
        if width is None:
            fields.add_violation(
                "sliding_window", "null would leave every layer without RoPE. Give a width."
            )
    given = fields.values.get("sliding_window_pattern")
    if isinstance(given, str) or width is None:
        # such as LLLG, which layer_types repeats
        fields.ignore_keys("sliding_window_pattern")
        every = 0 if width is None else len(given or "")
    else:
        every = fields.read_optional_int("sliding_window_pattern") or 0
    otherwise = [
        "sliding_attention" if every and (layer + 1) % every else "full_attention"
        for layer in range(layers)
    ]
    kinds = read_layer_types(fields, layers, otherwise)
    if width is None and "sliding_attention" in kinds:
        fields.add_violation(
            "sliding_window", "layer_types has sliding_attention. Give the width of its windows."
        )
    values |= build_window_values(width, kinds)
    if width is not None:
        values["position"]["layers"] = tuple(kind == "sliding_attention" for kind in kinds)


def write_windows_with_rope(model: Values, keys: Values, *, pattern: int | None = None) -> None:
    """Write the keys of `read_windows_with_rope`."""
    width = model["sliding_window"]
    if pattern is not None and width is None:
        width = model["max_position_embeddings"]  # no layer reads it, and the class asks for one
    keys["sliding_window"] = width
    keys["layer_types"] = write_layer_types(model)


def read_layers_without_rope(fields: ConfigJsonReader, values: Values) -> None:
    """Read SmolLM3's layers without RoPE, every fourth one, which alone may have a window.

    `no_rope_layers` is 1 for layers with RoPE.
    """
    layers = values["num_hidden_layers"]
    interval = int(fields.read_positive_float("no_rope_layer_interval"))
    rotates = fields.read_int_list("no_rope_layers") or [
        int((layer + 1) % interval != 0) for layer in range(layers)
    ]
    if len(rotates) != layers:
        fields.add_violation(
            "no_rope_layers", f"has {len(rotates)} entries for {layers} layers. Give one for each."
        )
    width = _read_switched_width(fields)
    otherwise = [
        "full_attention" if width is None or rotated else "sliding_attention" for rotated in rotates
    ]
    kinds = read_layer_types(fields, layers, otherwise)
    values |= build_window_values(width, kinds)
    values["position"]["layers"] = find_shortest_period([bool(one) for one in rotates]) or (True,)


def write_layers_without_rope(model: Values, keys: Values) -> None:
    """Write the keys of `read_layers_without_rope`."""
    rotates = model["position"]["layers"]
    layers = range(model["num_hidden_layers"])
    write_switched_window(model, keys)
    keys["no_rope_layers"] = [int(rotates[layer % len(rotates)]) for layer in layers]
    keys["layer_types"] = write_layer_types(model)
