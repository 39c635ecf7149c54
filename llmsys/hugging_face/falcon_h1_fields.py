"""Falcon-H1: attention beside Mamba-2 in every layer, and factors on projections.

`read_…` functions put values into those of a ModelConfig. `write_…` functions put keys into those
of a config.json.
"""

import math

from llmsys.hugging_face.config_json import ConfigJsonReader
from llmsys.hugging_face.linear_layers import read_mamba_head_width
from llmsys.hugging_face.nemotron_fields import read_step_limit, write_step_limit
from llmsys.hugging_face.shared_fields import Values

# Our names of the factors of `ssm_multipliers` and `mlp_multipliers`, in their order.
STATE_FACTORS = ("g_proj", "v_proj", "k_proj", "q_proj", "a_proj")
FEED_FORWARD_FACTORS = ("gate_proj", "down_proj")


def read_falcon_h1_mixer(fields: ConfigJsonReader, values: Values) -> None:
    """Read the width of Mamba-2's heads, the place of its norm, and its shortest step.

    Args:
        fields: reader of the config.json.
        values: values of the ModelConfig, changed in place.
    """
    linear = values["linear_attention"]
    given = fields.read_optional_int("mamba_d_ssm")
    inner = given or fields.read_int("mamba_expand") * values["hidden_size"]
    fields.ignore_keys("mamba_expand")
    read_mamba_head_width(fields, values, inner, "mamba_d_ssm")
    norm = "before_gate" if fields.read_bool("mamba_norm_before_gate") else "after_gate"
    linear["output_norm"] = norm if fields.read_bool("mamba_rms_norm") else "none"
    read_step_limit(fields, values)


def write_falcon_h1_mixer(model: Values, keys: Values) -> None:
    """Write the keys of `read_falcon_h1_mixer`."""
    linear = model["linear_attention"]
    keys["mamba_d_head"] = linear["value_head_dim"]
    keys["mamba_d_ssm"] = linear["num_value_heads"] * linear["value_head_dim"]
    keys["mamba_rms_norm"] = linear["output_norm"] != "none"
    keys["mamba_norm_before_gate"] = linear["output_norm"] == "before_gate"
    write_step_limit(model, keys)


def read_projection_factors(fields: ConfigJsonReader, values: Values) -> None:
    """Read factors; those on the inputs of a mixer are on the outputs of its projections.

    Args:
        fields: reader of the config.json.
        values: values of the ModelConfig, changed in place.
    """
    enters = fields.read_positive_float("attention_in_multiplier")
    if enters != 1.0 and values["attention"]["qkv_bias"]:
        fields.add_violation(
            "attention_in_multiplier", f"{enters} is supported without attention_bias. Use 1."
        )
    attention = dict.fromkeys(("q_proj", "v_proj"), enters) | {
        "k_proj": enters * fields.read_positive_float("key_multiplier"),
        "o_proj": fields.read_positive_float("attention_out_multiplier"),
    }
    scan_enters = fields.read_positive_float("ssm_in_multiplier")
    states = _read_factors(fields, "ssm_multipliers", STATE_FACTORS)
    linear = {name: scan_enters * factor for name, factor in states.items()}
    linear["o_proj"] = fields.read_positive_float("ssm_out_multiplier")
    dense = _read_factors(fields, "mlp_multipliers", FEED_FORWARD_FACTORS)
    given = {"attention": attention, "linear_attention": linear, "feed_forward": dense}
    if any(factor != 1.0 for section in given.values() for factor in section.values()):
        values["multipliers"] = given


def _read_factors(fields: ConfigJsonReader, name: str, ours: tuple[str, ...]) -> dict[str, float]:
    factors = fields.read_float_list(name) or [1.0] * len(ours)
    if len(factors) != len(ours) or min(factors) <= 0:
        fields.add_violation(name, f"{factors} are not {len(ours)} positive numbers. Correct them.")
        return {}
    return dict(zip(ours, factors, strict=True))


def write_projection_factors(model: Values, keys: Values) -> None:
    """Write the keys of `read_projection_factors`."""
    given = model["multipliers"]
    if given is None:
        return
    attention, linear = given["attention"], given["linear_attention"]
    enters = attention["q_proj"]
    keys["attention_in_multiplier"] = enters
    keys["key_multiplier"] = _find_quotient(attention["k_proj"], enters)
    keys["attention_out_multiplier"] = attention["o_proj"]
    keys["ssm_multipliers"] = [linear[name] for name in STATE_FACTORS]
    keys["ssm_out_multiplier"] = linear["o_proj"]
    keys["mlp_multipliers"] = [given["feed_forward"][name] for name in FEED_FORWARD_FACTORS]


def _find_quotient(product: float, factor: float) -> float:
    """Return the number whose product with a factor is the given one: one of some neighbours."""
    first = product / factor
    near = (first, math.nextafter(first, 0), math.nextafter(first, math.inf))
    return next((one for one in near if one * factor == product), first)
