"""Reader and writer of DBRX, whose config.json nests attention and experts in sections."""

from llmsys.hugging_face.config_json import ConfigJsonReader
from llmsys.hugging_face.moe import NOISE
from llmsys.hugging_face.shared_fields import (
    ACTIVATIONS,
    GATED,
    Values,
    check_common_keys,
    get_activation_name,
    read_architecture,
    read_rope,
    write_rope,
)

_ATTENTION = {"attn_pdrop": 0.0, "clip_qkv": None, "kv_n_heads": 1}
_EXPERTS = {"ffn_hidden_size": 3584, "moe_num_experts": 4, "moe_top_k": 1, "moe_loss_weight": 0.01}
_NORMED = "the weights of chosen experts are either normalized by their sum or not at all"


def read_dbrx(fields: ConfigJsonReader) -> Values:
    """Read DBRX: LayerNorm without biases, clipped queries, keys and values, fine-grained
    experts in every layer.
    """
    check_common_keys(fields)
    read_architecture(fields, {"DbrxForCausalLM": "lm"}, "lm")
    fields.ignore_keys("router_aux_loss_coef")  # a copy of ffn_config.moe_loss_weight
    fields.require_value("tie_word_embeddings", False, why="DBRX has an untied head")
    sizes = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    }
    values: Values = {ours: fields.read_int(theirs, ours) for ours, theirs in sizes.items()}
    values["max_position_embeddings"] = fields.read_int("max_seq_len", "max_position_embeddings")
    attention = fields.read_section("attn_config", _ATTENTION)
    experts = fields.read_section("ffn_config", _EXPERTS)
    pairs = attention.read_int("kv_n_heads")
    fields.require_value(
        "num_key_value_heads", pairs, why="attn_config.kv_n_heads has another value"
    )
    experts.ignore_keys("hidden_size")  # always the width of the model
    for section in (attention, experts):  # transformers writes them as configs of their own
        section.require_value("is_encoder_decoder", False, why="it contradicts the model type")
    base = attention.read_optional_float("rope_theta")  # where the published file keeps it
    values |= {
        "vocab_size": fields.read_int("vocab_size"),
        "num_key_value_heads": pairs,
        "initializer_range": fields.read_float("initializer_range"),
        "norm": {"kind": "layernorm", "bias": False},
        "position": read_rope(fields, theta=base or 10000.0),
        "attention": {"kind": "multi_head", "clip": attention.read_optional_float("clip_qkv")},
        "moe": _read_moe_section(experts),
        "dropout": {
            "embedding": fields.read_float("emb_pdrop"),
            "residual": fields.read_float("resid_pdrop"),
            "attention": attention.read_float("attn_pdrop"),
        },
    }
    fields.merge_section(attention)
    fields.merge_section(experts)
    return values


def _read_moe_section(experts: ConfigJsonReader) -> Values:
    experts.add_note("moe_jitter_eps", NOISE)
    experts.require_value("moe_normalize_expert_weights", 1, None, why=_NORMED)
    normed = experts.values.get("moe_normalize_expert_weights", 1) is not None
    activation = experts.read_section("ffn_act_fn", {"name": "silu"})
    name = activation.read_choice(
        "name", [key for key, ours in ACTIVATIONS.items() if ours in GATED]
    )
    experts.merge_section(activation)
    return {
        "num_experts": experts.read_int("moe_num_experts"),
        "num_experts_per_tok": experts.read_int("moe_top_k"),
        "moe_intermediate_size": experts.read_int("ffn_hidden_size"),
        "expert": {"kind": GATED[ACTIVATIONS[name]]},
        "norm_topk_prob": normed,
        "balance": {"kind": "auxiliary_loss", "weight": experts.read_float("moe_loss_weight")},
    }


def write_dbrx(model: Values) -> Values:
    """Write the fields of `read_dbrx`."""
    moe, rope = model["moe"], write_rope(model["position"])
    attention = {
        "attn_pdrop": model["dropout"]["attention"],
        "clip_qkv": model["attention"]["clip"],
        "kv_n_heads": model["num_key_value_heads"],
        "rope_theta": rope["rope_theta"],
    }
    experts = {
        "ffn_act_fn": {"name": get_activation_name(moe["expert"]["kind"])},
        "ffn_hidden_size": moe["moe_intermediate_size"],
        "moe_num_experts": moe["num_experts"],
        "moe_top_k": moe["num_experts_per_tok"],
        "moe_loss_weight": moe["balance"].get("weight", 0.0),
        "moe_normalize_expert_weights": 1.0 if moe["norm_topk_prob"] else None,
    }
    return {
        "vocab_size": model["vocab_size"],
        "d_model": model["hidden_size"],
        "n_heads": model["num_attention_heads"],
        "n_layers": model["num_hidden_layers"],
        "max_seq_len": model["max_position_embeddings"],
        "resid_pdrop": model["dropout"]["residual"],
        "emb_pdrop": model["dropout"]["embedding"],
        "initializer_range": model["initializer_range"],
        "tie_word_embeddings": model["tie_word_embeddings"],
        "attn_config": attention,
        "ffn_config": experts,
        "rope_parameters": rope,
    }
