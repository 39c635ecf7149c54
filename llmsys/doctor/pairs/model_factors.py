"""The factors of a model: architecture, attention, positions, objective, experts."""

from typing import Any

from llmsys.doctor.pairs.factor import (
    NONE,
    Assignment,
    Settings,
    Value,
    build_choice_factor,
    build_factor,
    list_choices,
)
from llmsys.doctor.pairs.linear_settings import CHANNELS, DUAL, LINEAR

# Objectives of models whose output is the logits of the next token.
LANGUAGE_MODELS = frozenset({"next_token", "span_corruption", "translation"})
ENCODER, DECODER, BOTH = "encoder", "decoder", "encoder_decoder"
# Classes as users write them.
OWN_BLOCKS = "llmsys.doctor.pairs.own_blocks"


def _set_masked(**more: Any) -> Settings:
    return {"model.family": ENCODER, "model.head": {"kind": "mlm"} | more}


def _list_objectives() -> tuple[Value, ...]:
    alone = {"experts": NONE, "residual": "pre"}
    return (
        Value("masked", {"objective.kind": "masked"} | _set_masked()),
        Value(
            "masked_next_sentence",
            {"objective.kind": "masked_next_sentence", "model.embedding.token_types": 2}
            | _set_masked(pooler=True, next_sentence=True),
        ),
        Value(
            "permutation",
            {
                "objective.kind": "permutation",
                "model.family": ENCODER,
                "model.head": {"kind": "permutation"},
            },
            needs={"position": "transformer_xl", "heads": "multi"} | alone,
        ),
        Value(
            "span_corruption",
            {
                "objective.kind": "span_corruption",
                "objective.noise_density": 0.3,
                "model.family": BOTH,
            },
            needs={"scope": "window"},
        ),
        Value(
            "translation",
            {"objective.kind": "translation", "model.family": BOTH, "data.kind": "pairs"},
        ),
        Value(
            "classification",
            {
                "objective.kind": "classification",
                "model.family": ENCODER,
                "model.head": {"kind": "classification", "num_labels": 3},
                "data.kind": "labelled",
            },
        ),
    )


def _set_longformer(assignment: Assignment) -> Settings:
    # A decoder's global tokens would see later ones.
    leading = 0 if assignment["objective"] == "next_token" else 1
    section = {
        "kind": "longformer",
        "windows": [8],
        "dilations": [1, 2],
        "num_global_tokens": leading,
    }
    return {"model.attention": section}


def _list_attention_kinds() -> tuple[Value, ...]:
    latent = {
        "kind": "latent",
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    }
    multi = {"heads": "multi"}
    return (
        Value("latent", {"model.attention": latent}, needs=multi),
        Value("longformer", _set_longformer, needs=multi | {"position": "sinusoidal"}),
        Value(
            "linformer",
            {"model.attention": {"kind": "linformer", "projected_length": 6}},
            needs={"objective": "masked", "scope": "window", "position": "sinusoidal"},
        ),
        Value(
            "lsh",
            {"model.attention": {"kind": "lsh", "chunk_length": 4, "num_hashes": 2}},
            needs=multi | {"position": "learned"},
        ),
        Value(
            "segment_memory",
            {
                "model.attention": {
                    "kind": "segment_memory",
                    "segment_length": 4,
                    "memory_length": 6,
                }
            },
            needs=multi | {"position": "transformer_xl"},
        ),
        Value(
            "python",
            {
                "model.attention": {
                    "kind": "python",
                    "path": f"{OWN_BLOCKS}:SigmoidAttention",
                    "options": {"temperature": 0.5},
                }
            },
        ),
    )


def _list_scalings() -> tuple[Value, ...]:
    path, grown = "model.position.scaling", {"factor": 2.0, "original_max_position_embeddings": 8}
    # Half the rotated channels of a head: divisors of longrope.
    lists = {
        "original_max_position_embeddings": 8,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    return (
        Value("linear", {path: {"kind": "linear", "factor": 2.0}}),
        *(Value(kind, {path: {"kind": kind} | grown}) for kind in ("ntk", "yarn", "llama3")),
        Value("longrope", {path: {"kind": "longrope"} | lists}),
    )


def _list_recurrent_layers() -> tuple[Value, ...]:
    shape = {
        "model.intermediate_size": 0,
        "model.num_attention_heads": 1,
        "model.num_key_value_heads": 1,
        "model.position": {"kind": "none"},
    }
    plain = {"experts": NONE, "position": "none", "heads": "multi"}
    alone = {"model.rnn.score": "none", "model.rnn.input_feeding": False}
    needs = {"objective": "translation"} | plain
    language_model = {"objective": "next_token", "scope": "window"} | plain
    return (
        *(
            Value(kind, {"model.rnn.kind": kind} | shape, needs)
            for kind in list_choices("model.rnn")
        ),
        Value("gru without attention", {"model.rnn.kind": "gru"} | alone | shape, needs),
        Value("lstm language model", {"model.rnn.kind": "lstm"} | alone | shape, language_model),
    )


_INDEXER: Settings = {
    "model.attention.q_lora_rank": 10,
    "model.attention.sparse.index_topk": 4,
    "model.attention.sparse.index_n_heads": 3,
    "model.attention.sparse.index_head_dim": 6,
}
MODEL_FACTORS = (
    build_choice_factor("objective", "objective", "next_token", *_list_objectives()),
    build_choice_factor("attention", "model.attention", "multi_head", *_list_attention_kinds()),
    build_factor(
        "indexer",
        Value(NONE),
        Value("sparse", _INDEXER),
        Value("warm-up", _INDEXER | {"model.attention.sparse.phase": "warm_up"}),
        acts_with={"attention": frozenset({"latent"})},
    ),
    build_factor(
        "heads",
        Value("grouped", {"model.num_key_value_heads": 2}),
        Value("multi", {"model.num_key_value_heads": 4}),
        Value("one", {"model.num_key_value_heads": 1}),
    ),
    build_factor(
        "queries",
        Value("plain"),
        Value("sinks", {"model.attention.sinks": True}),
        Value("norm of heads", {"model.attention.qk_norm": "head"}),
        Value("norm over heads", {"model.attention.qk_norm": "full"}),
        Value("biases", {"model.attention.qkv_bias": True, "model.attention.output_bias": True}),
        Value("softcap", {"model.attention.logit_softcap": 5.0}),
        Value("clip", {"model.attention.clip": 0.5}),
        Value("output gate", {"model.attention.output_gate": True}),
        acts_with={"attention": frozenset({"multi_head"})},
    ),
    build_choice_factor(
        "position",
        "model.position",
        "rope",
        Value("relative_bias", {"model.position": {"kind": "relative_bias", "buckets": 8}}),
        Value(
            "transformer_xl",
            {"model.position": {"kind": "transformer_xl"}},
            needs={"heads": "multi"},
        ),
    ),
    build_factor(
        "rotated channels",
        Value("all"),
        Value("half", {"model.position.fraction": 0.5}),
        acts_with={"position": frozenset({"rope"}), "attention": frozenset({"multi_head"})},
    ),
    build_choice_factor(
        "rope scaling",
        "model.position.scaling",
        NONE,
        *_list_scalings(),
        acts_with={"position": frozenset({"rope"}), "attention": frozenset({"multi_head"})},
    ),
    build_factor(
        "scores",
        Value("plain"),
        Value("wide heads", {"model.head_dim": 12}),
        Value("scale", {"model.attention.scale": 0.5}),
        acts_with={"attention": frozenset({"multi_head"})},
    ),
    build_factor(
        "layer types",
        Value("full"),
        Value("sliding", {"model.sliding_window": 5}),
        Value(
            "alternating",
            {
                "model.sliding_window": 5,
                "model.layer_types": ["sliding_attention", "full_attention"],
            },
        ),
        Value(
            "linear",
            LINEAR | {"model.layer_types": ["linear_attention", "full_attention"]},
            needs={"objective": "next_token"},
        ),
        Value(
            "kimi delta",
            CHANNELS | {"model.layer_types": ["linear_attention", "full_attention"]},
            needs={"objective": "next_token"},
        ),
        Value(
            "mamba2",
            DUAL | {"model.layer_types": ["linear_attention", "full_attention"]},
            needs={"objective": "next_token"},
        ),
        Value(
            "one sub-layer",
            DUAL
            | {
                "model.layer_types": ["linear_attention", "feed_forward"],
                "model.feed_forward_layers": [False, True],
            },
            needs={"objective": "next_token"},
        ),
        Value(
            "attention alone",
            {
                "model.layer_types": ["full_attention", "feed_forward"],
                "model.feed_forward_layers": [False, True],
            },
            needs={"objective": "next_token"},
        ),
        Value(
            "hybrid",
            DUAL | {"model.layer_types": ["hybrid", "full_attention"]},
            needs={"objective": "next_token"},
        ),
        Value(
            "linear and sliding",
            LINEAR
            | {
                "model.sliding_window": 5,
                "model.layer_types": ["sliding_attention", "linear_attention"],
            },
            needs={"objective": "next_token"},
        ),
    ),
    build_choice_factor(
        "residual",
        "model.residual",
        "pre",
        Value("reversible", {"model.residual": {"kind": "reversible"}}, needs={"experts": NONE}),
        Value("scaled branches", {"model.residual": {"kind": "pre", "multiplier": 0.5}}),
        Value(
            "output after attention",
            {"model.residual": {"kind": "output", "linear_layers": "pre"}},
        ),
    ),
    build_factor(
        "projections",
        Value(NONE),
        Value(
            "multiplied",
            {
                "model.multipliers": {
                    "attention": {"k_proj": 0.5, "o_proj": 1.5},
                    "feed_forward": {"up_proj": 1.2, "down_proj": 0.7},
                }
            },
            needs={"objective": "next_token", "experts": NONE},
        ),
        acts_with={"attention": frozenset({"multi_head"})},
    ),
    build_factor("skips", Value(NONE), Value("u-shaped", {"model.u_shaped_skips": True})),
    build_choice_factor("norm", "model.norm", "rmsnorm"),
    build_choice_factor(
        "feed-forward",
        "model.feed_forward",
        "swiglu",
        Value(
            "python",
            {
                "model.feed_forward": {
                    "kind": "python",
                    "path": f"{OWN_BLOCKS}:SquaredRelu",
                    "options": {"bias": True},
                }
            },
            needs={"experts": NONE},
        ),
    ),
    build_factor(
        "feed-forward parts",
        Value("plain"),
        Value("biases", {"model.feed_forward.bias": True}),
        Value("chunks", {"model.feed_forward_chunk": 3}),
    ),
    build_factor(
        "embedding",
        Value("plain"),
        Value("scaled", {"model.embedding.scale": 2.0}),
        Value("norm", {"model.embedding.norm": True}),
    ),
    build_factor(
        "token tables",
        Value(NONE),
        # The last layer alone, so that blocks differ and a stage without it has no such table.
        Value("values", {"model.embedding.value_layers": [1]}),
        Value("bigrams", {"model.embedding.bigram_rows": 23}),
        acts_with={"objective": frozenset({"next_token"})},
    ),
    build_factor(
        "logits",
        Value("plain"),
        Value("bias", {"model.head.bias": "trained"}),
        Value("softcap", {"model.head.softcap": 3.0}),
        Value("scaled", {"model.head.scale": 0.5}),
        acts_with={"objective": LANGUAGE_MODELS},
    ),
    build_factor("tied", Value("no"), Value("yes", {"model.tie_word_embeddings": True})),
    build_factor(
        "multi-token prediction",
        Value(NONE),
        Value("one", {"model.multi_token_prediction": {"depth": 1, "weight": 0.3}}),
        Value("two", {"model.multi_token_prediction": {"depth": 2, "weight": 0.3}}),
    ),
    build_factor(
        "dropout",
        Value(NONE),
        # Each place has another probability, so that none is taken for another.
        Value(
            "between blocks",
            {"model.dropout": {"embedding": 0.1, "residual": 0.2, "final": 0.15}},
        ),
        Value("in blocks", {"model.dropout": {"attention": 0.25, "activation": 0.3}}),
    ),
    build_choice_factor("recurrence", "model.recurrence", NONE),
    build_choice_factor("recurrent layers", "model.rnn", NONE, *_list_recurrent_layers()),
    build_choice_factor(
        "parametrization",
        "model.parametrization",
        "standard",
        Value("mup", {"model.parametrization": {"kind": "mup", "base_hidden_size": 16}}),
        Value(
            "complete_p",
            {
                "model.parametrization": {
                    "kind": "complete_p",
                    "base_hidden_size": 16,
                    "base_num_hidden_layers": 1,
                }
            },
        ),
    ),
)

MOE: Settings = {
    "model.moe.num_experts": 4,
    "model.moe.num_experts_per_tok": 2,
    "model.moe.moe_intermediate_size": 16,
}
HAS_EXPERTS = {"experts": frozenset({"all", "after the first", "every second"})}

EXPERT_FACTORS = (
    build_factor(
        "experts",
        Value(NONE),
        Value("all", MOE),
        Value("after the first", MOE | {"model.moe.first_dense_layers": 1}),
        Value("every second", MOE | {"model.moe.every": 2}),
    ),
    build_choice_factor(
        "routing",
        "model.moe.routing",
        "token_choice",
        Value("capacity", {"model.moe.routing": {"kind": "capacity", "factor": 0.7}}),
        Value(
            "capacity of documents",
            {"model.moe.routing": {"kind": "capacity", "factor": 0.7, "scope": "document"}},
        ),
        Value("expert_choice", {"model.moe.routing": {"kind": "expert_choice", "factor": 1.5}}),
        acts_with=HAS_EXPERTS,
    ),
    build_choice_factor(
        "balance",
        "model.moe.balance",
        "bias",
        Value("bias", {"model.moe.balance": {"kind": "bias", "rate": 0.01}}),
        Value(
            "bias and loss",
            {"model.moe.balance": {"kind": "bias", "rate": 0.01, "sequence_weight": 0.5}},
        ),
        Value("auxiliary_loss", {"model.moe.balance": {"kind": "auxiliary_loss", "weight": 0.5}}),
        Value(
            "loss of sequences",
            {"model.moe.balance": {"kind": "auxiliary_loss", "weight": 0.5, "scope": "sequence"}},
        ),
        acts_with=HAS_EXPERTS,
    ),
    build_factor(
        "shared experts",
        Value(NONE),
        Value("one", {"model.moe.num_shared_experts": 1}),
        Value("gated", {"model.moe.num_shared_experts": 1, "model.moe.shared_gate": True}),
        acts_with=HAS_EXPERTS,
    ),
    build_factor(
        "expert channels",
        Value("those of the model"),
        Value("latents", {"model.moe.latent_size": 6}),
        acts_with=HAS_EXPERTS,
    ),
    build_choice_factor("router score", "model.moe.score", "softmax", acts_with=HAS_EXPERTS),
    build_factor(
        "expert groups",
        Value(NONE),
        Value("best", {"model.moe.groups": {"num_groups": 2, "groups_per_token": 1}}),
        Value(
            "best two",
            {"model.moe.groups": {"num_groups": 2, "groups_per_token": 1, "score": "top2"}},
        ),
        acts_with=HAS_EXPERTS,
    ),
    build_factor(
        "expert weights",
        Value("plain"),
        Value("not normalized", {"model.moe.norm_topk_prob": False}),
        Value("scaled", {"model.moe.routed_scaling_factor": 2.0}),
        acts_with=HAS_EXPERTS,
    ),
    build_factor(
        "router z",
        Value(NONE),
        Value("on", {"model.moe.z_loss_weight": 0.1}),
        acts_with=HAS_EXPERTS,
    ),
    build_factor(
        "expert biases",
        Value(NONE),
        Value(
            "on",
            {
                "model.moe.router_bias": True,
                "model.moe.expert": {"kind": "clamped_swiglu", "bias": True},
            },
        ),
        acts_with=HAS_EXPERTS,
    ),
)
