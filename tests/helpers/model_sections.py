"""Tiny model sections that together use every choice a model section has: for tests over all
architectures.
"""

from typing import Any

Changes = dict[str, Any]

SHAPE: Changes = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MOE: Changes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: Changes = {
    "kind": "latent",
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
SPARSE: Changes = LATENT | {
    "q_lora_rank": 14,
    "sparse": {"index_topk": 5, "index_n_heads": 3, "index_head_dim": 6},
}
LAYERNORM: Changes = {"norm": {"kind": "layernorm"}}
LINEAR: Changes = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_attention": {
        "kind": "gated_delta",
        "num_key_heads": 2,
        "num_value_heads": 4,
        "key_head_dim": 6,
        "value_head_dim": 10,
        "chunk_length": 4,
    },
}
DUAL: Changes = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_attention": {
        "kind": "mamba2",
        "num_key_heads": 2,
        "num_value_heads": 4,
        "key_head_dim": 6,
        "value_head_dim": 10,
        "chunk_length": 4,
    },
}
KIMI: Changes = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_attention": {
        "kind": "kimi_delta",
        "num_key_heads": 2,
        "num_value_heads": 4,
        "key_head_dim": 6,
        "value_head_dim": 10,
        "decay_rank": 5,
        "gate_rank": 7,
        "chunk_length": 4,
    },
}
RECURRENT: Changes = {
    "family": "encoder_decoder",
    "intermediate_size": 0,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "position": {"kind": "none"},
}
ALONE: Changes = {"kind": "lstm", "score": "none", "input_feeding": False}
BIASES: Changes = {"attention": {"kind": "multi_head", "qkv_bias": True, "output_bias": True}}
EVERY_HEAD: Changes = {"num_key_value_heads": 4}


def _attention(**changes: Any) -> Changes:
    return {"attention": {"kind": "multi_head"} | changes}


DECODERS: dict[str, Changes] = {
    "lstm alone": {**RECURRENT, "family": "decoder", "rnn": ALONE},
    "gru alone, deep": {
        **RECURRENT,
        "family": "decoder",
        "rnn": {**ALONE, "kind": "gru"},
        "num_hidden_layers": 3,
    },
    "dense": {},
    "tied": {"tie_word_embeddings": True},
    "own head width": {"head_dim": 10},
    "multi-query, parallel": {"num_key_value_heads": 1, "residual": {"kind": "parallel"}},
    "parallel with two norms": {
        **LAYERNORM,
        **BIASES,
        "residual": {"kind": "parallel", "norms": 2},
    },
    "layernorm without bias": {"norm": {"kind": "layernorm", "bias": False}},
    "learned positions with offset": {
        **LAYERNORM,
        **BIASES,
        "position": {"kind": "learned", "offset": 2},
    },
    "alibi, embedding norm": {
        **LAYERNORM,
        "position": {"kind": "alibi"},
        "embedding": {"norm": True},
    },
    "gelu with biases": {
        "feed_forward": {"kind": "gelu", "bias": True},
        "position": {"kind": "none"},
    },
    "relu": {"feed_forward": {"kind": "relu"}, "position": {"kind": "sinusoidal"}},
    "scaled branches": {"residual": {"kind": "pre", "multiplier": 0.5}},
    "value embeddings in some layers, bigrams": {
        "embedding": {"value_layers": [0, 2], "bigram_rows": 30}
    },
    "u-shaped skips": {"u_shaped_skips": True},
    "qkv bias only": _attention(qkv_bias=True),
    "norm of each head": _attention(qk_norm="head"),
    "norm over heads, output norms": {**_attention(qk_norm="full"), "residual": {"kind": "output"}},
    "sinks": _attention(sinks=True, output_bias=True),
    "sandwich, capped, windows": {
        **_attention(logit_softcap=50.0),
        "residual": {"kind": "sandwich"},
        "norm": {"kind": "rmsnorm", "unit_offset": True},
        "feed_forward": {"kind": "geglu_tanh"},
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "output gate": _attention(output_gate=True, qk_norm="head"),
    "gated delta rule": LINEAR,
    "gated delta rule and gated attention": {
        **LINEAR,
        **_attention(output_gate=True, qk_norm="head"),
        "position": {"kind": "rope", "fraction": 0.67},
    },
    "gated delta rule with signs, norms by type": {
        **LINEAR,
        **_attention(qk_norm="full"),
        "linear_attention": LINEAR["linear_attention"]
        | {"allow_neg_eigval": True, "norm_eps": 1e-4},
        "residual": {"kind": "output", "linear_layers": "pre"},
    },
    "gated delta rule and windows, normed sums": {
        **LINEAR,
        "residual": {"kind": "post"},
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "linear_attention"],
    },
    "kimi delta rule": KIMI,
    "kimi delta rule and latents without positions": {
        **KIMI,
        "num_key_value_heads": 4,
        "attention": LATENT,
        "position": {"kind": "none"},
    },
    "state space dual": DUAL,
    "state space dual in every layer, no bias": {
        **DUAL,
        "layer_types": ["linear_attention"],
        "linear_attention": DUAL["linear_attention"] | {"conv_bias": False, "num_key_heads": 1},
        "position": {"kind": "none"},
    },
    "attention beside states, multiplied": {
        **DUAL,
        "num_hidden_layers": 3,
        "layer_types": ["hybrid"],
        "linear_attention": DUAL["linear_attention"] | {"output_norm": "none"},
        "multipliers": {
            "attention": {"k_proj": 0.4, "o_proj": 0.9},
            "linear_attention": {"g_proj": 0.3, "v_proj": 1.2, "a_proj": 0.8, "o_proj": 0.2},
            "feed_forward": {"gate_proj": 0.9, "down_proj": 0.6},
        },
    },
    "attention beside states, output norms": {
        **DUAL,
        "layer_types": ["hybrid", "full_attention"],
        "linear_attention": DUAL["linear_attention"] | {"output_norm": "before_gate"},
        "residual": {"kind": "output"},
    },
    "one sub-layer a layer": {
        **DUAL,
        "layer_types": ["linear_attention", "feed_forward", "full_attention", "feed_forward"],
        "feed_forward_layers": [False, True],
        "linear_attention": DUAL["linear_attention"] | {"min_step": 0.01},
        "feed_forward": {"kind": "squared_relu"},
        "position": {"kind": "none"},
    },
    "one sub-layer a layer, experts": {
        **DUAL,
        "layer_types": ["linear_attention", "feed_forward", "full_attention", "feed_forward"],
        "feed_forward_layers": [False, True],
        "moe": MOE
        | {"every": 4, "shared_intermediate_size": 12}
        | {"expert": {"kind": "squared_relu"}, "balance": {"kind": "bias"}},
        "feed_forward": {"kind": "squared_relu"},
    },
    "states without feed-forwards": {
        **DUAL,
        "layer_types": ["linear_attention"],
        "feed_forward_layers": [False],
        "position": {"kind": "none"},
    },
    "windows without feed-forwards, output norms": {
        "num_hidden_layers": 4,
        "feed_forward_layers": [True, False],
        "residual": {"kind": "output"},
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "deepnorm": {**LAYERNORM, "residual": {"kind": "deepnorm", "final_norm": True}},
    "post": {**LAYERNORM, "residual": {"kind": "post"}},
    "transformer-xl": {**EVERY_HEAD, "position": {"kind": "transformer_xl"}},
    "transformer-xl without biases": {
        **EVERY_HEAD,
        "position": {"kind": "transformer_xl", "biases": False},
    },
    "segments with memory": {
        **EVERY_HEAD,
        "position": {"kind": "transformer_xl"},
        "attention": {
            "kind": "segment_memory",
            "segment_length": 4,
            "memory_length": 6,
            "qkv_bias": True,
        },
    },
    "dilated windows": {
        **EVERY_HEAD,
        "position": {"kind": "sinusoidal"},
        "attention": {
            "kind": "longformer",
            "windows": [8],
            "dilations": [1, 2],
            "num_global_tokens": 0,
        },
    },
    "relative bias": {"position": {"kind": "relative_bias", "buckets": 8}},
    "universal": {"recurrence": {"kind": "fixed"}},
    "universal, adaptive": {"recurrence": {"kind": "adaptive"}, "residual": {"kind": "post"}},
    "trained head bias": {"head": {"kind": "lm", "bias": "trained"}},
    "fixed head bias": {"head": {"kind": "lm", "bias": "fixed"}, "tie_word_embeddings": True},
    "latent": {**EVERY_HEAD, "attention": LATENT | {"q_lora_rank": 14}},
    "latent without query rank": {**EVERY_HEAD, "attention": LATENT},
    "latent and sparse": {**EVERY_HEAD, "attention": SPARSE},
    "latent and sparse, warm-up, neighbours": {
        **EVERY_HEAD,
        "attention": SPARSE
        | {"v_head_dim": 12}
        | {"sparse": SPARSE["sparse"] | {"phase": "warm_up", "pairing": "neighbours"}},
    },
    "latent with biases": {**EVERY_HEAD, "attention": LATENT | {"q_lora_rank": 14, "bias": True}},
}
MIXTURES: dict[str, Changes] = {
    "experts": {"moe": MOE},
    "experts without a dense width": {"moe": MOE, "intermediate_size": 0},
    "experts balanced by a loss": {
        "moe": {**MOE, "balance": {"kind": "auxiliary_loss"}, "score": "sigmoid"}
    },
    "shared experts, dense first, tied": {
        "moe": {**MOE, "num_shared_experts": 2, "first_dense_layers": 1},
        "tie_word_embeddings": True,
    },
    "gated shared expert of its own width": {
        "moe": {**MOE, "shared_intermediate_size": 20, "shared_gate": True}
    },
    "every second layer": {"num_hidden_layers": 5, "moe": {**MOE, "every": 2}},
    "dense layers by number": {"num_hidden_layers": 5, "moe": {**MOE, "dense_layers": [1, 2]}},
    "expert and router biases": {
        "moe": {**MOE, "router_bias": True, "expert": {"kind": "clamped_swiglu", "bias": True}},
    },
    "experts without a gate": {"moe": {**MOE, "expert": {"kind": "relu"}, "num_shared_experts": 1}},
    "experts in latents": {"moe": {**MOE, "latent_size": 8}},
    "experts in latents, and shared": {
        "moe": {
            **MOE,
            "latent_size": 8,
            "num_shared_experts": 1,
            "expert": {"kind": "squared_relu"},
        },
    },
    "experts in latents, and shared, output norms": {
        "moe": {**MOE, "latent_size": 8, "num_shared_experts": 1},
        "residual": {"kind": "sandwich"},
    },
    "gated delta rule with experts": {"moe": {**MOE, "num_shared_experts": 1}, **LINEAR},
    "kimi delta rule with experts": {"moe": {**MOE, "num_shared_experts": 1}, **KIMI},
    "state space dual with experts": {"moe": {**MOE, "num_shared_experts": 1}, **DUAL},
    "gated delta rule predicts further": {
        **LINEAR,
        "layer_types": ["full_attention", "linear_attention"],
        "multi_token_prediction": {},
    },
    "predicts two tokens further": {"multi_token_prediction": {"depth": 2}},
    "predicts further with experts and sparse latents": {
        **EVERY_HEAD,
        "attention": SPARSE,
        "moe": {**MOE, "num_shared_experts": 1},
        "multi_token_prediction": {},
    },
    "predicts further with experts and latents": {
        **EVERY_HEAD,
        "attention": LATENT | {"q_lora_rank": 14},
        "moe": {**MOE, "num_shared_experts": 1, "first_dense_layers": 1},
        "multi_token_prediction": {},
    },
}
BERT: Changes = {
    **LAYERNORM,
    **BIASES,
    **EVERY_HEAD,
    "family": "encoder",
    "residual": {"kind": "post"},
    "position": {"kind": "learned"},
    "feed_forward": {"kind": "gelu", "bias": True},
    "embedding": {"norm": True, "token_types": 2},
    "tie_word_embeddings": True,
}
ENCODERS: dict[str, Changes] = {
    "lstm tokens": {**RECURRENT, "family": "encoder", "rnn": ALONE, "head": {"kind": "mlm"}},
    "elman classifier": {
        **RECURRENT,
        "family": "encoder",
        "rnn": {**ALONE, "kind": "elman"},
        "head": {"kind": "classification", "num_labels": 3, "pooling": "mean"},
    },
    "masked language model": {**BERT, "head": {"kind": "mlm"}},
    "masked, untied": {**BERT, "head": {"kind": "mlm"}, "tie_word_embeddings": False},
    "masked and next sentence": {
        **BERT,
        "head": {"kind": "mlm", "pooler": True, "next_sentence": True},
    },
    "classifier": {**BERT, "head": {"kind": "classification", "num_labels": 5}},
    "features": {**BERT, "head": {"kind": "features"}},
    "features and pooler": {**BERT, "head": {"kind": "features", "pooler": True}},
    "longformer": {
        **BERT,
        "attention": {"kind": "longformer", "windows": [8]},
        "head": {"kind": "mlm"},
    },
    "longformer, dilated": {
        **BERT,
        "attention": {
            "kind": "longformer",
            "windows": [4],
            "dilations": [1, 2],
            "num_global_tokens": 2,
            "qkv_bias": True,
        },
        "head": {"kind": "mlm"},
    },
    "linformer": {
        **BERT,
        "attention": {"kind": "linformer", "projected_length": 6},
        "head": {"kind": "mlm"},
    },
    "linformer, grouped, own mixtures": {
        **BERT,
        "num_key_value_heads": 2,
        "attention": {"kind": "linformer", "projected_length": 6, "sharing": "none"},
        "position": {"kind": "rope"},
        "head": {"kind": "features"},
    },
    "linformer, heads share": {
        **BERT,
        "attention": {"kind": "linformer", "projected_length": 6, "sharing": "heads"},
        "head": {"kind": "features"},
    },
    "hashed": {
        **BERT,
        "attention": {"kind": "lsh", "chunk_length": 4, "num_hashes": 2},
        "head": {"kind": "mlm"},
    },
    "two streams": {
        **LAYERNORM,
        **EVERY_HEAD,
        "family": "encoder",
        "position": {"kind": "transformer_xl", "segments": 2},
        "head": {"kind": "permutation"},
        "residual": {"kind": "post"},
        "tie_word_embeddings": True,
    },
    "two streams, untied": {
        **EVERY_HEAD,
        "family": "encoder",
        "position": {"kind": "transformer_xl"},
        "head": {"kind": "permutation"},
    },
    "encoder of experts": {"family": "encoder", "moe": MOE, "head": {"kind": "mlm"}},
    "encoder with windows": {
        "family": "encoder",
        "sliding_window": 4,
        "head": {"kind": "features"},
    },
}
ORIGINAL: Changes = {
    **LAYERNORM,
    **BIASES,
    **EVERY_HEAD,
    "family": "encoder_decoder",
    "residual": {"kind": "post"},
    "position": {"kind": "sinusoidal"},
    "feed_forward": {"kind": "relu", "bias": True},
    "tie_word_embeddings": True,
}
PAIRS: dict[str, Changes] = {
    "original": ORIGINAL,
    "universal in both stacks": {
        **ORIGINAL,
        "recurrence": {"kind": "adaptive"},
        "encoder": {"num_hidden_layers": 2},
    },
    "two vocabularies": {
        **ORIGINAL,
        "embedding": {"source_vocab_size": 30},
        "tie_word_embeddings": False,
    },
    "learned in both stacks": {
        **ORIGINAL,
        "position": {"kind": "learned", "offset": 2},
        "embedding": {"norm": True},
    },
    "relative bias in both stacks": {
        "family": "encoder_decoder",
        "head_dim": 10,
        "position": {"kind": "relative_bias", "buckets": 8},
        "feed_forward": {"kind": "geglu_tanh"},
    },
    "lstm": {**RECURRENT, "rnn": {"kind": "lstm"}, "tie_word_embeddings": True},
    "gru, additive": {
        **RECURRENT,
        "rnn": {"kind": "gru", "score": "additive"},
        "encoder": {"num_hidden_layers": 2},
    },
    "elman, not fed, two vocabularies": {
        **RECURRENT,
        "rnn": {"kind": "elman", "input_feeding": False},
        "embedding": {"source_vocab_size": 30},
    },
    "lstm, no attention": {**RECURRENT, "rnn": ALONE},
    "another encoder": {
        **ORIGINAL,
        "encoder": {"num_hidden_layers": 2, "intermediate_size": 32, "num_attention_heads": 8},
    },
    "grouped, norm of each head": {"family": "encoder_decoder", **_attention(qk_norm="head")},
    "sandwich in both stacks": {"family": "encoder_decoder", "residual": {"kind": "sandwich"}},
    "output norms in both stacks": {"family": "encoder_decoder", "residual": {"kind": "output"}},
    "experts in the decoder": {"family": "encoder_decoder", "moe": MOE},
}
VARIANTS = DECODERS | MIXTURES | ENCODERS | PAIRS
