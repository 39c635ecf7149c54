"""Readers and writers of DeepSeek-style MoE decoders: deepseek_v2, deepseek_v3 (latent
attention) and glm4_moe.
"""

from typing import Any

from llmsys.hugging_face.config_json import ConfigJsonReader
from llmsys.hugging_face.llama import read_llama_decoder, write_llama_decoder
from llmsys.hugging_face.shared_fields import (
    Values,
    compute_yarn_score_scale,
    get_activation_name,
    read_gated_kind,
    require_full_attention,
)


def read_deepseek_v2(fields: ConfigJsonReader) -> Values:
    """Read DeepSeek-V2: softmax scores, sequence-wise balance loss, groups ranked by their best
    expert.
    """
    fields.require_value("scoring_func", "softmax", why="deepseek_v2 scores with softmax")
    fields.require_value(
        "norm_topk_prob",
        False,
        None,
        why="the published code and transformers disagree on its meaning",
    )
    fields.require_value("mlp_bias", False, None, why="its feed-forward layers have no biases")
    values = _read_latent_decoder(fields, "DeepseekV2", "neighbours")
    method = fields.read_choice("topk_method", ("greedy", "group_limited_greedy"))
    fields.defaults = fields.defaults | {"aux_loss_alpha": 0.001, "seq_aux": True}
    scope = "sequence" if fields.read_bool("seq_aux") else "batch"
    balance = {
        "kind": "auxiliary_loss",
        "weight": fields.read_float("aux_loss_alpha"),
        "scope": scope,
    }
    groups = _read_expert_groups(fields, "max") if method == "group_limited_greedy" else None
    fields.ignore_keys("n_group", "topk_group")
    return values | _read_moe_layers(fields, norm_topk_prob=False, groups=groups, balance=balance)


def read_deepseek_v3(fields: ConfigJsonReader) -> Values:
    """Read DeepSeek-V3: sigmoid scores, a balance bias per expert, groups ranked by their best
    two experts.
    """
    fields.require_value("scoring_func", "sigmoid", why="deepseek_v3 scores with sigmoid")
    fields.require_value(
        "topk_method", "noaux_tc", why="deepseek_v3 chooses with a bias per expert"
    )
    pairing = "neighbours" if fields.read_bool("rope_interleave") else "halves"
    fields.require_value(
        "head_dim",
        fields.read_int("qk_rope_head_dim"),
        None,
        why="it is the number of rotated channels",
    )
    return _read_latent_decoder(fields, "DeepseekV3", pairing) | _read_bias_balanced_layers(fields)


def read_glm4_moe(fields: ConfigJsonReader) -> Values:
    """Read GLM-4.5: DeepSeek-V3's experts with ordinary attention and RoPE on half of each head."""
    require_full_attention(fields)
    fields.require_value("scoring_func", "sigmoid", why="glm4_moe scores with sigmoid")
    fields.require_value("topk_method", "noaux_tc", why="glm4_moe chooses with a bias per expert")
    norm = "head" if fields.read_bool("use_qk_norm") else "none"
    attention = {
        "kind": "multi_head",
        "qkv_bias": fields.read_bool("attention_bias"),
        "qk_norm": norm,
    }
    values = read_llama_decoder(fields, "Glm4Moe", fraction=0.5)
    # need not divide
    values.setdefault("head_dim", values["hidden_size"] // (values["num_attention_heads"] or 1))
    return values | {"attention": attention} | _read_bias_balanced_layers(fields)


def _read_latent_decoder(fields: ConfigJsonReader, stem: str, pairing: str) -> Values:
    """Read all fields except the experts."""
    # Latent attention has one key per head: num_key_value_heads has no effect, and head_dim is
    # computed.
    require_full_attention(fields)
    fields.ignore_keys("pretraining_tp", "qk_head_dim")
    values = read_llama_decoder(fields, stem)
    values.pop("head_dim", None)
    if (
        values.pop("num_key_value_heads", values["num_attention_heads"])
        != values["num_attention_heads"]
    ):
        fields.notes.append("num_key_value_heads: ignored; latent attention has one key per head")
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    attention: Values = {"kind": "latent"} | {name: fields.read_int(name) for name in sizes}
    attention |= {
        "q_lora_rank": fields.read_optional_int("q_lora_rank"),
        "bias": fields.read_bool("attention_bias"),
    }
    values["position"]["pairing"] = pairing
    rotary = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    channels = attention["qk_nope_head_dim"] + attention["qk_rope_head_dim"]
    attention["scale"] = compute_yarn_score_scale(values["position"], rotary, channels)
    return values | {"attention": attention}


def _read_expert_groups(fields: ConfigJsonReader, score: str) -> Values | None:
    count, allowed = fields.read_optional_int("n_group"), fields.read_optional_int("topk_group")
    if count in (None, 1) and allowed in (None, 1):
        return None
    return {"num_groups": count, "groups_per_token": allowed, "score": score}


def _read_bias_balanced_layers(fields: ConfigJsonReader) -> Values:
    fields.defaults = fields.defaults | {"aux_loss_alpha": 0.0}
    fields.require_value(
        "seq_aux", True, why="with bias balancing, only the sequence-level loss is supported"
    )
    balance = {"kind": "bias", "sequence_weight": fields.read_float("aux_loss_alpha")}
    chosen = fields.read_bool("norm_topk_prob")
    return _read_moe_layers(
        fields,
        score="sigmoid",
        norm_topk_prob=chosen,
        groups=_read_expert_groups(fields, "top2"),
        balance=balance,
    )


def _read_moe_layers(fields: ConfigJsonReader, **more: Any) -> Values:
    fields.ignore_keys(
        "ep_size", "num_nextn_predict_layers", "num_mtp_layers", "router_aux_loss_coef"
    )
    fields.require_value("moe_layer_freq", 1, why="every layer after the dense ones has experts")
    kind, layers = read_gated_kind(fields, "hidden_act"), fields.read_int("num_hidden_layers")
    dense = min(fields.read_int("first_k_dense_replace"), layers)
    values = {
        "intermediate_size": fields.read_int("intermediate_size"),
        "feed_forward": {"kind": kind},
    }
    moe = {
        "num_experts": fields.read_int("n_routed_experts", "num_local_experts", "num_experts"),
        "num_experts_per_tok": fields.read_int("num_experts_per_tok"),
        "moe_intermediate_size": fields.read_int("moe_intermediate_size"),
        "num_shared_experts": fields.read_optional_int("n_shared_experts") or 0,
        "routed_scaling_factor": fields.read_positive_float("routed_scaling_factor"),
        "first_dense_layers": dense,
        "expert": {"kind": kind},
    }
    return values | {"moe": None if dense == layers else moe | more}


def _write_moe_decoder(model: Values) -> Values:
    moe = model["moe"]
    # all layers are dense, and the class wants numbers for experts that it does not build
    if moe is None:
        return write_llama_decoder(model) | {
            "first_k_dense_replace": model["num_hidden_layers"],
            "num_experts_per_tok": 1,
        }
    groups = moe["groups"] or {"num_groups": 1, "groups_per_token": 1}
    return write_llama_decoder(model) | {
        "hidden_act": get_activation_name(moe["expert"]["kind"]),
        "n_routed_experts": moe["num_experts"],
        "num_experts_per_tok": moe["num_experts_per_tok"],
        "moe_intermediate_size": moe["moe_intermediate_size"],
        "n_shared_experts": moe["num_shared_experts"],
        "routed_scaling_factor": moe["routed_scaling_factor"],
        "first_k_dense_replace": moe["first_dense_layers"],
        "norm_topk_prob": moe["norm_topk_prob"],
        "n_group": groups["num_groups"],
        "topk_group": groups["groups_per_token"],
        "seq_aux": True,
        "aux_loss_alpha": moe["balance"].get("sequence_weight", 0.0),
    }


def _write_latent_decoder(model: Values) -> Values:
    attention = model["attention"]
    sizes = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    values = _write_moe_decoder(model) | {name: attention[name] for name in sizes}
    values |= {"head_dim": attention["qk_rope_head_dim"], "attention_bias": attention["bias"]}
    return values | {"num_key_value_heads": model["num_attention_heads"]}


def write_deepseek_v2(model: Values) -> Values:
    """Write the fields of `read_deepseek_v2`."""
    moe = model["moe"] or {"balance": {}, "groups": None}
    method = "greedy" if moe["groups"] is None else "group_limited_greedy"
    loss = {
        "aux_loss_alpha": moe["balance"].get("weight", 0.0),
        "seq_aux": moe["balance"].get("scope") == "sequence",
    }
    return (
        _write_latent_decoder(model)
        | loss
        | {"topk_method": method, "norm_topk_prob": False, "num_nextn_predict_layers": 0}
    )


def write_deepseek_v3(model: Values) -> Values:
    """Write the fields of `read_deepseek_v3`, without multi-token prediction modules."""
    interleaved = model["position"]["pairing"] == "neighbours"
    return _write_latent_decoder(model) | {
        "rope_interleave": interleaved,
        "num_nextn_predict_layers": 0,
    }


def write_glm4_moe(model: Values) -> Values:
    """Write the fields of `read_glm4_moe`."""
    values = _write_moe_decoder(model)
    values["rope_parameters"]["partial_rotary_factor"] = model["position"]["fraction"]
    norm = model["attention"]["qk_norm"] == "head"
    bias = model["attention"]["qkv_bias"]
    return values | {"attention_bias": bias, "use_qk_norm": norm, "num_nextn_predict_layers": 0}
