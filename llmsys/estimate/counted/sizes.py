"""Sizes from a config.json, checked: whole numbers above 0 and below the largest that a tensor
can have.
"""

from llmsys.hugging_face.config_json import ConfigJsonReader

# torch numbers the elements of a tensor with 63 bits.
MAX_SIZE = 2**31


def read_size(fields: ConfigJsonReader, *names: str) -> int:
    """Return a size; anything outside 1 to `MAX_SIZE` is a problem.

    Args:
        fields: reader of the config.json.
        names: the key and its other spellings.

    Returns:
        The value, or 1 for a wrong one.
    """
    value = fields.read_int(*names)
    if 1 <= value <= MAX_SIZE:
        return value
    fields.add_violation(
        names[0], f"{value} is not a size. Use a whole number from 1 to {MAX_SIZE:,}."
    )
    return 1


def read_heads(fields: ConfigJsonReader, hidden: int) -> tuple[int, int, int]:
    """Return query heads, key-value heads and the channels of a head.

    Args:
        fields: reader of the config.json.
        hidden: channels of the model.

    Returns:
        The three sizes. Key-value heads default to the heads, a head to its share of the channels.
    """
    heads = read_size(fields, "num_attention_heads")
    pairs = fields.read_optional_int("num_key_value_heads") or heads
    width = fields.read_optional_int("head_dim") or hidden // heads
    if heads % pairs or pairs < 1:
        fields.add_violation(
            "num_key_value_heads", f"{pairs} does not divide num_attention_heads={heads}."
        )
    if width < 1:
        fields.add_violation(
            "head_dim", f"hidden_size={hidden} has no channel for each of {heads} heads. Set it."
        )
    return heads, max(1, pairs), max(1, width)


def read_layer_windows(fields: ConfigJsonReader, layers: int) -> dict[int | None, int]:
    """Return the number of layers for each attention window; None: they see everything.

    Args:
        fields: reader of the config.json.
        layers: number of layers.

    Returns:
        Layers by window.
    """
    window = fields.read_optional_int("sliding_window")
    kinds = fields.read_str_list("layer_types")
    if not kinds:
        kinds = ["full_attention" if window is None else "sliding_attention"] * layers
    if len(kinds) != layers:
        fields.add_violation(
            "layer_types", f"has {len(kinds)} entries for {layers} layers. Give one for each."
        )
    for unknown in sorted({*kinds} - {"full_attention", "sliding_attention"}):
        fields.add_violation(
            "layer_types", f"{unknown!r} is not supported. Use full_attention or sliding_attention."
        )
    slides = kinds.count("sliding_attention") if window is not None else 0
    counts: dict[int | None, int] = {None: layers - slides}
    if slides:
        counts[window] = slides
    return {key: count for key, count in counts.items() if count}
