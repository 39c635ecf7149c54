"""Experts, and what comes with them: fields of config.json that a table of keys cannot say.

`read_…` functions put values into those of a ModelConfig. `write_…` functions put keys into those
of a config.json.
"""

from llmsys.hugging_face.config_json import ConfigJsonReader
from llmsys.hugging_face.shared_fields import (
    Values,
    compute_yarn_score_scale,
    read_rope,
    write_rope,
)


def read_sparse_layers(fields: ConfigJsonReader, values: Values) -> None:
    """Read experts in every `decoder_sparse_step`-th layer except those in `mlp_only_layers`."""
    layers = values["num_hidden_layers"]
    every = fields.read_int("decoder_sparse_step")
    dense = tuple(layer for layer in fields.read_int_list("mlp_only_layers") if 0 <= layer < layers)
    values["moe"] |= {"every": every, "dense_layers": dense}
    sparse = [
        layer for layer in range(layers) if (layer + 1) % max(every, 1) == 0 and layer not in dense
    ]
    if not sparse:
        values["moe"] = None


def write_sparse_layers(model: Values, keys: Values) -> None:
    """Write the keys of `read_sparse_layers`."""
    moe = model["moe"]
    if moe is None:
        keys["mlp_only_layers"] = list(range(model["num_hidden_layers"]))
        return
    keys["decoder_sparse_step"] = moe["every"]
    keys["mlp_only_layers"] = sorted({*range(moe["first_dense_layers"]), *moe["dense_layers"]})


def read_dense_first(fields: ConfigJsonReader, values: Values) -> None:
    """Read the number of dense layers before those with experts."""
    layers = values["num_hidden_layers"]
    dense = min(fields.read_int("first_k_dense_replace"), layers)
    values["moe"]["first_dense_layers"] = dense
    if dense == layers:
        values["moe"] = None


def write_dense_first(model: Values, keys: Values) -> None:
    """Write the keys of `read_dense_first`, without multi-token prediction modules."""
    keys["num_nextn_predict_layers"] = 0
    if model["moe"] is not None:
        keys["first_k_dense_replace"] = model["moe"]["first_dense_layers"]
        return
    # The class wants a number for experts that it does not build.
    keys["first_k_dense_replace"] = model["num_hidden_layers"]
    keys["num_experts_per_tok"] = 1


def read_layers_between(fields: ConfigJsonReader, values: Values) -> None:
    """Read experts in every `moe_layer_interval`-th layer from a first to a last one (ERNIE)."""
    layers = values["num_hidden_layers"]
    start = fields.read_int("moe_layer_start_index")
    end = fields.read_int("moe_layer_end_index")
    every = fields.read_int("moe_layer_interval")
    end = layers - 1 if end == -1 else end
    values["moe"] |= {"every": every, "first_dense_layers": max(start, 0)}
    if end < layers - 1:
        values["moe"]["dense_layers"] = tuple(range(max(end + 1, 0), layers))
    if not any(
        (layer + 1) % max(every, 1) == 0 for layer in range(max(start, 0), min(end + 1, layers))
    ):
        values["moe"] = None


def write_layers_between(model: Values, keys: Values) -> None:
    """Write the keys of `read_layers_between`; other dense layers are not written."""
    moe = model["moe"]
    layers = model["num_hidden_layers"]
    if moe is None:
        keys |= {"moe_layer_start_index": layers, "moe_layer_end_index": layers}
        return
    start, end = moe["first_dense_layers"], layers - 1
    while start in moe["dense_layers"]:
        start += 1
    while end in moe["dense_layers"]:
        end -= 1
    keys["moe_layer_start_index"] = start
    keys["moe_layer_end_index"] = -1 if end == layers - 1 else end
    keys["moe_layer_interval"] = moe["every"]


def read_expert_groups(
    fields: ConfigJsonReader,
    values: Values,
    *,
    score: str,
    method: str = "",
    number: str = "n_group",
) -> None:
    """Read the groups of experts of which a token may use some.

    Args:
        fields: reader of the config.json.
        values: values of the ModelConfig, changed in place.
        score: how groups are ranked, `groups.score` of a ModelConfig.
        method: key that says whether there are groups. Empty: there always are.
        number: key of the number of groups.
    """
    if method:
        asked = fields.read_choice(method, ("greedy", "group_limited_greedy"))
        fields.ignore_keys("n_group", "topk_group")
        if asked == "greedy":
            return
    count = fields.read_optional_int(number, "n_group")
    allowed = fields.read_optional_int("topk_group")
    if values["moe"] is not None and (count not in (None, 1) or allowed not in (None, 1)):
        values["moe"]["groups"] = {
            "num_groups": count,
            "groups_per_token": allowed,
            "score": score,
        }


def write_expert_groups(
    model: Values, keys: Values, *, score: str, method: str = "", number: str = "n_group"
) -> None:
    """Write the keys of `read_expert_groups`."""
    groups = (model["moe"] or {}).get("groups")
    if method:
        keys[method] = "greedy" if groups is None else "group_limited_greedy"
    if model["moe"] is not None:
        keys[number] = groups["num_groups"] if groups else 1
        keys["topk_group"] = groups["groups_per_token"] if groups else 1


def read_latent_heads(fields: ConfigJsonReader, values: Values) -> None:
    """Read what latent attention makes of the keys of ordinary heads.

    It has one key per head, so num_key_value_heads has no effect, and head_dim is computed.
    """
    heads = values["num_attention_heads"]
    values.pop("head_dim", None)
    if values.pop("num_key_value_heads", heads) != heads:
        fields.notes.append("num_key_value_heads: ignored; latent attention has one key per head")
    rotary = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    attention = values["attention"]
    channels = attention["qk_nope_head_dim"] + attention["qk_rope_head_dim"]
    attention["scale"] = compute_yarn_score_scale(values["position"], rotary, channels)


def write_latent_heads(model: Values, keys: Values) -> None:
    """Write the keys of `read_latent_heads`."""
    keys["head_dim"] = model["attention"]["qk_rope_head_dim"]
    keys["num_key_value_heads"] = model["num_attention_heads"]


def read_indexed_layers(fields: ConfigJsonReader, values: Values) -> None:
    """Check that every layer has an indexer of its own, and that only the first ones are dense."""
    for key, kind in (("layer_types", "indexed_attention"), ("indexer_types", "full")):
        if others := sorted({*fields.read_str_list(key)} - {kind}):
            fields.add_violation(
                key, f"{others[0]} is not supported: every layer needs {kind}. Remove it."
            )
    layers, moe = values["num_hidden_layers"], values["moe"]
    dense = layers if moe is None else moe["first_dense_layers"]
    kinds = fields.read_str_list("mlp_layer_types")
    if kinds and kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        fields.add_violation(
            "mlp_layer_types",
            f"{kinds} is not first_k_dense_replace={dense} times dense and then sparse for "
            f"{layers} layers. Correct one of them.",
        )


def read_undivided_heads(fields: ConfigJsonReader, values: Values) -> None:
    """Read heads whose number need not divide the width."""
    values.setdefault("head_dim", values["hidden_size"] // (values["num_attention_heads"] or 1))


def read_dbrx_sections(fields: ConfigJsonReader, values: Values) -> None:
    """Read the base of RoPE where DBRX's published file keeps it, and whether weights are
    normalized.
    """
    base = fields.get_section("attn_config").read_optional_float("rope_theta")
    values["position"] = read_rope(fields, theta=base or 10000.0)
    experts = fields.get_section("ffn_config").values
    values["moe"]["norm_topk_prob"] = experts.get("moe_normalize_expert_weights", 1) is not None


def write_dbrx_sections(model: Values, keys: Values) -> None:
    """Write the keys of `read_dbrx_sections`."""
    rope = write_rope(model["position"])
    normed = model["moe"]["norm_topk_prob"]
    keys["attn_config"]["rope_theta"] = rope["rope_theta"]
    keys["ffn_config"]["moe_normalize_expert_weights"] = 1.0 if normed else None
    keys["rope_parameters"] = rope
