"""A tiny model for every choice that a model section has, and what each family reads."""

from typing import Any

import torch
from torch import Tensor

from llmsys.config.model import ModelConfig
from tests.helpers.tiny_model import build_tiny_config, build_tiny_tokens

LAYERNORM = {"kind": "layernorm"}
ALL_BIASES = {"kind": "multi_head", "qkv_bias": True, "output_bias": True}
LATENT = {
    "kind": "latent",
    "q_lora_rank": 6,
    "kv_lora_rank": 5,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
BUCKETS = {"kind": "relative_bias", "buckets": 8, "max_distance": 6}
SLIDING = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
BERT = {
    "family": "encoder",
    "residual": {"kind": "post"},
    "norm": LAYERNORM,
    "position": {"kind": "learned"},
    "attention": ALL_BIASES,
    "feed_forward": {"kind": "gelu", "bias": True},
    "embedding": {"norm": True, "token_types": 2},
    "num_key_value_heads": 4,
}
ORIGINAL = {
    "family": "encoder_decoder",
    "residual": {"kind": "post"},
    "norm": LAYERNORM,
    "position": {"kind": "sinusoidal"},
    "feed_forward": {"kind": "relu", "bias": True},
    "embedding": {"scale": "sqrt_hidden_size"},
    "tie_word_embeddings": True,
}
RECURRENT = {
    "family": "encoder_decoder",
    "intermediate_size": 0,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "position": {"kind": "none"},
}

DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied, own head_dim, one key": {
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
        "head_dim": 6,
    },
    "learned, offset": {
        "position": {"kind": "learned", "offset": 2},
        "norm": LAYERNORM,
        "attention": ALL_BIASES,
    },
    "sinusoidal": {"position": {"kind": "sinusoidal"}},
    "sinusoidal halves": {"position": {"kind": "sinusoidal", "arrangement": "halves"}},
    "rope, part": {"position": {"kind": "rope", "fraction": 0.5, "theta": 50.0}},
    "rope, neighbours": {"position": {"kind": "rope", "pairing": "neighbours"}},
    "rope, linear": {"position": {"kind": "rope", "scaling": {"kind": "linear", "factor": 3.0}}},
    "rope in some layers": {"position": {"kind": "rope", "layers": [False, True]}},
    "windows, own theta": {
        "position": {"kind": "rope", "sliding_theta": 20.0, "theta": 500.0},
        **SLIDING,
    },
    "window everywhere": {"sliding_window": 2},
    "alibi": {"position": {"kind": "alibi", "factor": 0.7}, "embedding": {"norm": True}},
    "relative bias": {"position": BUCKETS, "attention": {"kind": "multi_head", "scale": 1.0}},
    "relative bias, windows": {"position": BUCKETS, **SLIDING},
    "transformer_xl": {"position": {"kind": "transformer_xl"}},
    "transformer_xl, no biases, window": {
        "position": {"kind": "transformer_xl", "biases": False},
        "sliding_window": 4,
    },
    "no position": {"position": {"kind": "none"}},
    "qk norm of heads": {"attention": {"kind": "multi_head", "qk_norm": "head"}},
    "qk norm of all": {"attention": {"kind": "multi_head", "qk_norm": "full", "clip": 0.8}},
    "softcap, windows": {
        "attention": {"kind": "multi_head", "logit_softcap": 2.0, "scale": 0.7},
        **SLIDING,
    },
    "sinks, windows": {"attention": {"kind": "multi_head", "sinks": True}, **SLIDING},
    "sinks, softcap, alibi": {
        "attention": {"kind": "multi_head", "sinks": True, "logit_softcap": 3.0},
        "position": {"kind": "alibi"},
    },
    "latent": {
        "attention": LATENT,
        "position": {"kind": "rope", "pairing": "neighbours"},
        "num_key_value_heads": 4,
    },
    "latent, no query latent": {
        "attention": LATENT | {"q_lora_rank": None, "bias": True, "scale": 0.4},
        "num_key_value_heads": 4,
        **SLIDING,
    },
    "latent, no position": {
        "attention": LATENT | {"bias": True},
        "position": {"kind": "none"},
        "num_key_value_heads": 4,
    },
    "post": {"residual": {"kind": "post"}},
    "post, final norm": {"residual": {"kind": "post", "final_norm": True}, "norm": LAYERNORM},
    "deepnorm": {"residual": {"kind": "deepnorm"}, "norm": LAYERNORM},
    "deepnorm, final norm": {"residual": {"kind": "deepnorm", "final_norm": True}},
    "sandwich, unit offset": {
        "residual": {"kind": "sandwich"},
        "norm": {"kind": "rmsnorm", "unit_offset": True},
    },
    "output norm": {"residual": {"kind": "output"}},
    "parallel": {"residual": {"kind": "parallel"}, "norm": {"kind": "layernorm", "bias": False}},
    "parallel, two norms": {"residual": {"kind": "parallel", "norms": 2}},
    "scaled embedding, capped head": {
        "embedding": {"scale": 1.7},
        "head": {"kind": "lm", "softcap": 3.0, "bias": "trained", "scale": 0.6},
    },
    **{
        f"feed-forward {kind}": {"feed_forward": {"kind": kind, "bias": bias}}
        for kind, bias in [
            ("relu", True),
            ("squared_relu", False),
            ("gelu", False),
            ("gelu_tanh", True),
            ("silu", False),
            ("swiglu", True),
            ("geglu", False),
            ("geglu_tanh", True),
        ]
    },
    "value embeddings": {
        "embedding": {"value_layers": [1]},
        "attention": {"kind": "multi_head", "clip": 0.8, "qk_norm": "head"},
    },
    "bigrams, value embeddings": {
        "embedding": {"value_layers": [0, 1], "bigram_rows": 19, "scale": 1.7, "norm": True},
        "tie_word_embeddings": True,
        **SLIDING,
    },
    "u-shaped skips": {"u_shaped_skips": True, "num_hidden_layers": 5},
    "universal, rope": {"recurrence": {"kind": "fixed"}, "num_hidden_layers": 3},
    "universal, adaptive": {
        "recurrence": {"kind": "adaptive", "threshold": 0.9, "ponder_weight": 0.5},
        "num_hidden_layers": 4,
        "residual": {"kind": "post"},
        "norm": LAYERNORM,
        "position": {"kind": "sinusoidal"},
    },
    "feed-forward clamped": {
        "feed_forward": {"kind": "clamped_swiglu", "bias": True, "limit": 0.5}
    },
}

MEMORIES: dict[str, dict[str, Any]] = {
    "segments of 3, memory of 2": {"segment_length": 3, "memory_length": 2},
    "segments of 2, memory of 4, biases": {
        "segment_length": 2,
        "memory_length": 4,
        "qkv_bias": True,
    },
    "segments without memory": {"segment_length": 4, "memory_length": 0, "output_bias": True},
    "one segment": {"segment_length": 9},
}
DECODERS |= {
    name: {
        "position": {"kind": "transformer_xl"},
        "attention": {"kind": "segment_memory"} | changes,
    }
    for name, changes in MEMORIES.items()
}
DECODERS["longformer, causal"] = {
    "position": {"kind": "sinusoidal"},
    "num_key_value_heads": 4,
    "attention": {
        "kind": "longformer",
        "windows": [6, 4],
        "dilations": [1, 1, 2, 3],
        "num_global_tokens": 0,
    },
}

ENCODERS: dict[str, dict[str, Any]] = {
    "bert": BERT | {"head": {"kind": "mlm"}, "tie_word_embeddings": True},
    "bert classifier": BERT | {"head": {"kind": "classification", "num_labels": 3}},
    "rope encoder": {"family": "encoder", "head": {"kind": "features"}, **SLIDING},
    "longformer": BERT
    | {
        "head": {"kind": "mlm"},
        "attention": {"kind": "longformer", "windows": [4, 2], "dilations": [1, 1, 2, 3]},
    },
    "longformer, no global tokens": BERT
    | {
        "head": {"kind": "features"},
        "attention": {
            "kind": "longformer",
            "windows": [2],
            "num_global_tokens": 0,
            "qkv_bias": True,
        },
    },
    "universal encoder": BERT
    | {
        "head": {"kind": "mlm"},
        "recurrence": {"kind": "adaptive", "threshold": 0.9},
        "num_hidden_layers": 3,
    },
    "alibi encoder": {
        "family": "encoder",
        "head": {"kind": "mlm", "activation": "relu"},
        "position": {"kind": "alibi"},
    },
    "t5 encoder": {"family": "encoder", "head": {"kind": "features"}, "position": BUCKETS},
    "xlnet": {
        "family": "encoder",
        "head": {"kind": "features"},
        "position": {"kind": "transformer_xl", "segments": 2},
        "embedding": {"token_types": 2},
    },
}

ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "original": ORIGINAL,
    "universal": ORIGINAL
    | {
        "recurrence": {"kind": "adaptive", "threshold": 0.8},
        "num_hidden_layers": 3,
        "encoder": {"num_hidden_layers": 4},
    },
    "t5": {
        "family": "encoder_decoder",
        "position": BUCKETS,
        "attention": {"kind": "multi_head", "scale": 1.0},
        "head": {"kind": "lm", "scale": "inverse_sqrt_hidden_size"},
        "tie_word_embeddings": True,
        "encoder": {"num_hidden_layers": 1, "intermediate_size": 12, "num_attention_heads": 2},
    },
    "bart": ORIGINAL
    | {
        "position": {"kind": "learned", "offset": 2},
        "attention": ALL_BIASES,
        "embedding": {"norm": True},
        "head": {"kind": "lm", "bias": "fixed"},
    },
    "two vocabularies, deepnorm": ORIGINAL
    | {
        "residual": {"kind": "deepnorm"},
        "embedding": {"source_vocab_size": 41},
        "encoder": {"num_hidden_layers": 3},
    },
    "parallel, qk norm, rope": {
        "family": "encoder_decoder",
        "residual": {"kind": "parallel"},
        "attention": {"kind": "multi_head", "qk_norm": "head"},
    },
    "sandwich, xl": {
        "family": "encoder_decoder",
        "residual": {"kind": "sandwich"},
        "position": {"kind": "transformer_xl"},
    },
    "lstm": RECURRENT | {"rnn": {"kind": "lstm"}, "tie_word_embeddings": True},
    "gru, additive, another encoder": RECURRENT
    | {"rnn": {"kind": "gru", "score": "additive"}, "encoder": {"num_hidden_layers": 1}},
    "elman, not fed": RECURRENT
    | {"rnn": {"kind": "elman", "input_feeding": False}, "num_hidden_layers": 3},
    "lstm, additive, not fed": RECURRENT
    | {"rnn": {"kind": "lstm", "score": "additive", "input_feeding": False}},
    "gru, no attention": RECURRENT
    | {"rnn": {"kind": "gru", "score": "none", "input_feeding": False}},
    "output, alibi": {
        "family": "encoder_decoder",
        "residual": {"kind": "output"},
        "position": {"kind": "alibi"},
    },
}

ARCHITECTURES = DECODERS | ENCODERS | ENCODER_DECODERS


def build_choice_config(name: str) -> ModelConfig:
    return build_tiny_config(**ARCHITECTURES[name])


def build_source(config: ModelConfig) -> dict[str, Tensor]:
    """Two sources of unequal length for an encoder-decoder, the shorter one padded; nothing for
    other families.
    """
    if config.family != "encoder_decoder":
        return {}
    documents = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, -1, -1]])
    return {"source_BS": build_tiny_tokens(2, 5, seed=3), "source_documents_BS": documents}
