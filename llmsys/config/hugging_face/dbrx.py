"""DBRX, whose config.json nests attention and experts in sections of their own."""

from llmsys.config.hugging_face.experts import NOISE
from llmsys.config.hugging_face.fields import Fields
from llmsys.config.hugging_face.parts import (
    ACTIVATIONS,
    GATED,
    Values,
    activation_name,
    read_class,
    read_common,
)
from llmsys.config.hugging_face.rope import read_rope, write_rope

_ATTENTION = {"attn_pdrop": 0.0, "clip_qkv": None, "kv_n_heads": 1}
_EXPERTS = {"ffn_hidden_size": 3584, "moe_num_experts": 4, "moe_top_k": 1, "moe_loss_weight": 0.01}
_NORMED = "chosen weights are divided by their sum or left as they are"


def read_dbrx(fields: Fields) -> Values:
    """LayerNorm without biases, clipped queries, keys and values, fine-grained experts in every layer."""
    read_common(fields)
    read_class(fields, {"DbrxForCausalLM": "lm"}, "lm")
    fields.skip("router_aux_loss_coef")  # a copy of ffn_config.moe_loss_weight
    fields.only("tie_word_embeddings", False, why="DBRX has a head of its own")
    sizes = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
    values: Values = {ours: fields.whole(theirs, ours) for ours, theirs in sizes.items()}
    values["max_position_embeddings"] = fields.whole("max_seq_len", "max_position_embeddings")
    attention = fields.section("attn_config", _ATTENTION)
    experts = fields.section("ffn_config", _EXPERTS)
    pairs = attention.whole("kv_n_heads")
    fields.only("num_key_value_heads", pairs, why="attn_config.kv_n_heads says another number")
    experts.skip("hidden_size")  # always the width of the model
    for section in (attention, experts):  # transformers writes them as configs of their own
        section.only("is_encoder_decoder", False, why="it contradicts the model type")
    base = attention.number_or_none("rope_theta")  # where the published file keeps it
    values |= {
        "vocab_size": fields.whole("vocab_size"),
        "num_key_value_heads": pairs,
        "initializer_range": fields.number("initializer_range"),
        "norm": {"kind": "layernorm", "bias": False},
        "position": read_rope(fields, theta=base or 10000.0),
        "attention": {"kind": "multi_head", "clip": attention.number_or_none("clip_qkv")},
        "moe": _experts(experts),
        "dropout": {
            "embedding": fields.number("emb_pdrop"),
            "residual": fields.number("resid_pdrop"),
            "attention": attention.number("attn_pdrop"),
        },
    }
    fields.join(attention)
    fields.join(experts)
    return values


def _experts(experts: Fields) -> Values:
    experts.note("moe_jitter_eps", NOISE)
    experts.only("moe_normalize_expert_weights", 1, None, why=_NORMED)
    normed = experts.values.get("moe_normalize_expert_weights", 1) is not None
    activation = experts.section("ffn_act_fn", {"name": "silu"})
    name = activation.choice("name", [key for key, ours in ACTIVATIONS.items() if ours in GATED])
    experts.join(activation)
    return {
        "num_experts": experts.whole("moe_num_experts"),
        "num_experts_per_tok": experts.whole("moe_top_k"),
        "moe_intermediate_size": experts.whole("ffn_hidden_size"),
        "expert": {"kind": GATED[ACTIVATIONS[name]]},
        "norm_topk_prob": normed,
        "balance": {"kind": "auxiliary_loss", "weight": experts.number("moe_loss_weight")},
    }


def write_dbrx(model: Values) -> Values:
    """As `read_dbrx` reads it."""
    moe, rope = model["moe"], write_rope(model["position"])
    attention = {
        "attn_pdrop": model["dropout"]["attention"],
        "clip_qkv": model["attention"]["clip"],
        "kv_n_heads": model["num_key_value_heads"],
        "rope_theta": rope["rope_theta"],
    }
    experts = {
        "ffn_act_fn": {"name": activation_name(moe["expert"]["kind"])},
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
