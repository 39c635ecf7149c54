"""Tiny models of transformers, one for each family and for each setting that changes what a family
computes.

Every tensor is random and large enough that a missing, doubled or swapped one shows: norms are not
one, biases, sinks and correction biases not zero.
"""

from typing import Any

import torch
from torch import nn

from llmsys.config.patches import PatchesConfig
from llmsys.data.images import ImageLayout

DECODER: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA = DECODER | {"intermediate_size": 24, "num_key_value_heads": 2}
LATENT = DECODER | {
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "kv_lora_rank": 8,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
}
INDEXED = {"n_group": 1, "topk_group": 1, "index_topk": 7, "index_n_heads": 6, "index_head_dim": 8}
KIMI = DECODER | {
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "linear_num_heads": 2,
    "linear_head_dim": 6,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
NO_ROPE = {"rope_theta": None, "rope_type": "default"}
NEMOTRON = DECODER | {
    "intermediate_size": 24,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "ssm_state_size": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 20,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
}
del NEMOTRON["num_hidden_layers"]
MAMBA2 = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 8,
    "state_size": 6,
    "n_groups": 2,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
DELTA = LLAMA | {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
HYBRID = DELTA | {"shared_expert_intermediate_size": 20}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.7,
    "logits_scaling": 6.0,
}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
BERT = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "pad_token_id": 47,
}
VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "image_size": 12,
    "patch_size": 4,
}
T5 = {
    "vocab_size": 48,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": 48,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 64,
    "pad_token_id": 47,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 47,
    "forced_eos_token_id": None,
}


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **values}}


YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
DEEP_YARN = rope("yarn", **YARN, mscale=0.8, mscale_all_dim=0.6)
DBRX = {
    "vocab_size": 48,
    "d_model": 16,
    "n_layers": 2,
    "n_heads": 4,
    "max_seq_len": 64,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.8, "rope_theta": 500.0},
    "ffn_config": {"ffn_hidden_size": 12, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 16},
}
FALCON = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "new_decoder_architecture": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
OPT = {
    "vocab_size": 48,
    "hidden_size": 16,
    "ffn_dim": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 16,
    "pad_token_id": 47,
    "bos_token_id": None,
    "eos_token_id": None,
}
LONG = {
    "short_factor": [1.0, 1.5],
    "long_factor": [1.2, 3.0],
    "original_max_position_embeddings": 16,
    "factor": 4.0,
}
# transformers' Phimoe takes the short list at every length, so its lists are made equal here; Llama
# changes lists.
SHORT = LONG | {"long_factor": LONG["short_factor"]}
# Where transformers' eager attention adds the bias twice.
SDPA = {"falcon, alibi"}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 48, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64},
    ),
    "llama": ("LlamaForCausalLM", LLAMA | rope("default")),
    "llama, tied": ("LlamaForCausalLM", LLAMA | {"tie_word_embeddings": True}),
    "llama, biases": ("LlamaForCausalLM", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama, linear": ("LlamaForCausalLM", LLAMA | rope("linear", factor=3.0)),
    "llama, dynamic": (
        "LlamaForCausalLM",
        LLAMA | rope("dynamic", factor=3.0) | {"max_position_embeddings": 16},
    ),
    "llama, yarn": ("LlamaForCausalLM", LLAMA | rope("yarn", **YARN)),
    "llama, yarn, factor": (
        "LlamaForCausalLM",
        LLAMA | rope("yarn", **YARN, attention_factor=1.7, beta_fast=4.0),
    ),
    "llama, llama3": (
        "LlamaForCausalLM",
        LLAMA | rope("llama3", **YARN, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "llama, longrope": ("LlamaForCausalLM", LLAMA | rope("longrope", **LONG)),
    "mistral": ("MistralForCausalLM", LLAMA | {"sliding_window": 8}),
    "mistral, head_dim": ("MistralForCausalLM", LLAMA | {"sliding_window": None, "head_dim": 8}),
    "mixtral": ("MixtralForCausalLM", LLAMA | LOCAL_EXPERTS | {"sliding_window": 8}),
    "mixtral, top-3 of 5": (
        "MixtralForCausalLM",
        LLAMA | {"num_local_experts": 5, "num_experts_per_tok": 3},
    ),
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "qwen2, windows": (
        "Qwen2ForCausalLM",
        LLAMA | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen2_moe": ("Qwen2MoeForCausalLM", LLAMA | EXPERTS | {"shared_expert_intermediate_size": 20}),
    "qwen2_moe, normalised, sparse": (
        "Qwen2MoeForCausalLM",
        LLAMA
        | EXPERTS
        | {
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "num_hidden_layers": 4,
            "mlp_only_layers": [3],
        },
    ),
    "qwen3": ("Qwen3ForCausalLM", LLAMA | {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", LLAMA | EXPERTS | {"head_dim": 8, "norm_topk_prob": True}),
    "qwen3_moe, plain": (
        "Qwen3MoeForCausalLM",
        LLAMA | EXPERTS | {"head_dim": 8, "norm_topk_prob": False},
    ),
    "qwen3_next": ("Qwen3NextForCausalLM", HYBRID | EXPERTS),
    "qwen3_next, dense, biased": (
        "Qwen3NextForCausalLM",
        HYBRID
        | {
            "num_experts": 4,
            "num_hidden_layers": 3,
            "mlp_only_layers": [0, 1, 2],
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", DELTA | {"rms_norm_eps": 1e-3}),
    "qwen3_5_text, biased, tied": (
        "Qwen3_5ForCausalLM",
        DELTA
        | {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_moe_text, experts": (
        "Qwen3_5MoeForCausalLM",
        DELTA | EXPERTS | {"shared_expert_intermediate_size": 20},
    ),
    "kimi_linear": ("KimiLinearForCausalLM", KIMI | {"num_expert_group": 4, "topk_group": 2}),
    "kimi_linear, query rank, biased": (
        "KimiLinearForCausalLM",
        KIMI
        | {
            "q_lora_rank": 10,
            "attention_bias": True,
            "moe_renormalize": False,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "linear_conv_kernel_dim": 3,
            "rms_norm_eps": 1e-3,
        },
    ),
    "falcon_h1": (
        "FalconH1ForCausalLM",
        LLAMA
        | {"mamba_n_heads": 4, "mamba_d_ssm": 24, "mamba_n_groups": 2, "mamba_d_state": 6}
        | {
            "embedding_multiplier": 2.5,
            "lm_head_multiplier": 0.4,
            "mlp_multipliers": [0.9, 0.6],
            "key_multiplier": 0.4,
            "attention_in_multiplier": 1.5,
            "attention_out_multiplier": 0.9,
            "ssm_multipliers": [0.35, 0.25, 0.3, 0.5, 0.4],
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.3,
        },
    ),
    "falcon_h1, normed, biased, tied": (
        "FalconH1ForCausalLM",
        LLAMA
        | {
            "mamba_n_heads": 4,
            "mamba_d_ssm": None,
            "mamba_d_state": 6,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "key_multiplier": 0.4,
            "num_key_value_heads": 4,
        },
    ),
    "falcon_h1, normed before gates": (
        "FalconH1ForCausalLM",
        LLAMA | {"mamba_n_heads": 4, "mamba_d_ssm": 24, "mamba_d_state": 6, "mamba_rms_norm": True},
    ),
    "olmo_hybrid": (
        "OlmoHybridForCausalLM",
        LLAMA
        | {"layer_types": ["linear_attention", "full_attention"], "rope_parameters": NO_ROPE}
        # transformers writes convolutions in three equal parts
        | {"linear_key_head_dim": 6, "linear_value_head_dim": 6},
    ),
    "olmo_hybrid, rope, no signs": (
        "OlmoHybridForCausalLM",
        LLAMA
        | {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 10,
            "linear_value_head_dim": 5,
            "linear_allow_neg_eigval": False,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
            "rms_norm_eps": 1e-3,
        },
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        NEMOTRON | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    ),
    "nemotron_h, dense, long steps": (
        "NemotronHForCausalLM",
        NEMOTRON
        | {
            "layers_block_type": ["mlp", "mlp", "linear_attention", "full_attention", "mlp"],
            "mlp_bias": True,
            "use_conv_bias": False,
            "time_step_min": 0.8,
        },
    ),
    "nemotron_h, experts without states": (
        "NemotronHForCausalLM",
        NEMOTRON | {"layers_block_type": ["full_attention", "moe"], "norm_topk_prob": False},
    ),
    "nemotron_h, experts in latents": ("NemotronHForCausalLM", NEMOTRON | {"moe_latent_size": 12}),
    "mamba2": ("Mamba2ForCausalLM", MAMBA2),
    "mamba2, one group, tied": (
        "Mamba2ForCausalLM",
        MAMBA2
        | {"n_groups": 1, "tie_word_embeddings": True, "use_conv_bias": False, "conv_kernel": 3}
        | {"time_step_limit": (0.7, float("inf"))},
    ),
    "bamba": (
        "BambaForCausalLM",
        LLAMA
        | {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 6, "attn_layer_indices": [1]},
    ),
    "bamba, one group, biased": (
        "BambaForCausalLM",
        LLAMA
        | {
            "num_hidden_layers": 4,
            "mamba_n_heads": 4,
            "mamba_d_state": 6,
            "attn_layer_indices": [0, 3],
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "granite": (
        "GraniteForCausalLM",
        LLAMA | MULTIPLIERS | {"tie_word_embeddings": True, "mlp_bias": True},
    ),
    "granitemoe": (
        "GraniteMoeForCausalLM",
        LLAMA | MULTIPLIERS | LOCAL_EXPERTS | {"attention_bias": True},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        LLAMA
        | MULTIPLIERS
        | LOCAL_EXPERTS
        | {
            "shared_intermediate_size": 20,
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 6,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "granitemoehybrid, dense, rope": (
        "GraniteMoeHybridForCausalLM",
        LLAMA
        | MULTIPLIERS
        | {
            "num_local_experts": 0,
            "shared_intermediate_size": 24,
            "mamba_n_heads": 4,
            "mamba_d_state": 6,
            "layer_types": ["full_attention", "linear_attention"],
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
        },
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        LLAMA
        | {
            "head_dim": 8,
            "sliding_window": 8,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        LLAMA
        | {"head_dim": 8, "sliding_window": 8, "num_hidden_layers": 7, "query_pre_attn_scalar": 12},
    ),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        LATENT | {"q_lora_rank": None, "topk_method": "greedy", "routed_scaling_factor": 1.5},
    ),
    "deepseek_v2, groups": (
        "DeepseekV2ForCausalLM",
        LATENT
        | {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        }
        | DEEP_YARN,
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        LATENT | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    ),
    "deepseek_v3, yarn": (
        "DeepseekV3ForCausalLM",
        LATENT | {"n_group": 4, "topk_group": 2} | DEEP_YARN,
    ),
    "deepseek_v3, no q_lora, halves": (
        "DeepseekV3ForCausalLM",
        LATENT
        | {
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "norm_topk_prob": False,
        }
        | {"attention_bias": True},
    ),
    "deepseek_v32": ("DeepseekV32ForCausalLM", LATENT | INDEXED | {"n_group": 4, "topk_group": 2}),
    "deepseek_v32, yarn": ("DeepseekV32ForCausalLM", LATENT | INDEXED | DEEP_YARN),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", LATENT | INDEXED | {"attention_bias": True}),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        LLAMA
        | {
            "head_dim": 8,
            "moe_intermediate_size": 12,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "dots1": (
        "Dots1ForCausalLM",
        LLAMA
        | {
            "num_hidden_layers": 3,
            "head_dim": 8,
            "moe_intermediate_size": 12,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "attention_bias": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2ForCausalLM",
        LLAMA | LOCAL_EXPERTS | {"head_dim": 8, "rotary_dim": 4},
    ),
    "glm": ("GlmForCausalLM", LLAMA | {"head_dim": 8}),
    "glm4": ("Glm4ForCausalLM", LLAMA | {"head_dim": 8, "attention_bias": False}),
    "gemma": ("GemmaForCausalLM", LLAMA | {"head_dim": 8, "hidden_act": "gelu"}),
    "olmo3": (
        "Olmo3ForCausalLM",
        LLAMA | {"num_hidden_layers": 4, "sliding_window": 5, "attention_bias": True},
    ),
    "olmo3, longer": (
        "Olmo3ForCausalLM",
        LLAMA
        | {"num_hidden_layers": 4, "sliding_window": 5}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 1e5} | YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e5},
            }
        },
    ),
    "ministral": ("MinistralForCausalLM", LLAMA | {"head_dim": 8, "sliding_window": 5}),
    "ministral, mixed": (
        "MinistralForCausalLM",
        LLAMA
        | {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}
        | {"head_dim": 6},
    ),
    "starcoder2": (
        "Starcoder2ForCausalLM",
        LLAMA | {"sliding_window": 5, "intermediate_size": 40},
    ),
    "starcoder2, no biases": (
        "Starcoder2ForCausalLM",
        LLAMA | {"use_bias": False, "tie_word_embeddings": False},
    ),
    "cohere2": (
        "Cohere2ForCausalLM",
        LLAMA | {"num_hidden_layers": 4, "sliding_window": 5, "logit_scale": 0.25},
    ),
    "cohere2, pattern": (
        "Cohere2ForCausalLM",
        LLAMA | {"num_hidden_layers": 3, "sliding_window": 5, "sliding_window_pattern": 2},
    ),
    "arcee": ("ArceeForCausalLM", LLAMA | {"hidden_act": "relu2", "mlp_bias": True}),
    "seed_oss": ("SeedOssForCausalLM", LLAMA | {"head_dim": 6, "mlp_bias": True}),
    "exaone4": (
        "Exaone4ForCausalLM",
        LLAMA | {"num_hidden_layers": 3, "sliding_window": 5, "sliding_window_pattern": 2},
    ),
    "exaone4, no windows": (
        "Exaone4ForCausalLM",
        LLAMA | {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "ernie4_5": ("Ernie4_5ForCausalLM", LLAMA | {"head_dim": 6, "use_bias": True}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        LLAMA
        | {
            "num_hidden_layers": 4,
            "moe_intermediate_size": 12,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
        },
    ),
    "mpt": (
        "MptForCausalLM",
        {"vocab_size": 48, "d_model": 24, "n_layers": 2, "n_heads": 6, "max_seq_len": 64}
        | {"attn_config": {"clip_qkv": 0.8}},
    ),
    "roformer": ("RoFormerForMaskedLM", BERT),
    "olmo2": ("Olmo2ForCausalLM", LLAMA),
    "olmoe": (
        "OlmoeForCausalLM",
        LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.8},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", DECODER | {"intermediate_size": 24, "rotary_pct": 0.5}),
    "gpt_neox, one after another": (
        "GPTNeoXForCausalLM",
        DECODER | {"intermediate_size": 24, "rotary_pct": 1.0, "use_parallel_residual": False},
    ),
    "opt": ("OPTForCausalLM", OPT),
    "opt, norms after": ("OPTForCausalLM", OPT | {"do_layer_norm_before": False}),
    "bloom": (
        "BloomForCausalLM",
        {
            "vocab_size": 48,
            "hidden_size": 16,
            "n_layer": 2,
            "n_head": 4,
            "bos_token_id": None,
            "eos_token_id": None,
        },
    ),
    "falcon, one key": (
        "FalconForCausalLM",
        FALCON | {"multi_query": True, "parallel_attn": True, "alibi": False},
    ),
    "falcon, alibi": (
        "FalconForCausalLM",
        FALCON | {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
    ),
    "falcon, new": (
        "FalconForCausalLM",
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon, new, one norm": (
        "FalconForCausalLM",
        FALCON
        | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "phimoe": (
        "PhimoeForCausalLM",
        LLAMA | LOCAL_EXPERTS | {"lm_head_bias": True, "attention_bias": True},
    ),
    "phimoe, longrope": (
        "PhimoeForCausalLM",
        LLAMA | LOCAL_EXPERTS | rope("longrope", **SHORT, short_mscale=1.2, long_mscale=1.4),
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        LLAMA
        | LOCAL_EXPERTS
        | {"head_dim": 8, "sliding_window": 8}
        | rope("yarn", **YARN, truncate=False),
    ),
    "smollm3": ("SmolLM3ForCausalLM", LLAMA | {"num_hidden_layers": 4}),
    "dbrx": ("DbrxForCausalLM", DBRX),
    "bert": ("BertForMaskedLM", BERT),
    "bert, pretraining": ("BertForPreTraining", BERT | {"tie_word_embeddings": True}),
    "bert, labels": ("BertForSequenceClassification", BERT | {"num_labels": 3}),
    "bert, features": ("BertModel", BERT),
    "roberta": (
        "RobertaForMaskedLM",
        BERT | {"max_position_embeddings": 66, "pad_token_id": 1, "type_vocab_size": 1},
    ),
    "roberta, labels": (
        "RobertaForSequenceClassification",
        BERT | {"max_position_embeddings": 66, "pad_token_id": 1, "num_labels": 3},
    ),
    "vit": ("ViTForImageClassification", VIT | {"num_labels": 3}),
    "vit, features": ("ViTModel", VIT | {"qkv_bias": False, "patch_size": 2, "num_channels": 1}),
    "t5": ("T5ForConditionalGeneration", T5 | {"tie_word_embeddings": True}),
    "t5, gated": (
        "T5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "t5, deeper decoder": (
        "T5ForConditionalGeneration",
        T5 | {"num_decoder_layers": 3, "num_layers": 1},
    ),
    "marian": ("MarianMTModel", BART | {"scale_embedding": True, "activation_function": "swish"}),
    "bart": ("BartForConditionalGeneration", BART),
    "bart, scaled": (
        "BartForConditionalGeneration",
        BART | {"scale_embedding": True, "encoder_layers": 1},
    ),
}


def build(case: str) -> Any:
    """The model of a case, in evaluation mode, with random values everywhere."""
    import transformers

    name, values = CASES[case]
    kind = getattr(transformers, name)
    config = kind.config_class(**values)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        given = getattr(config, key, None) or 0
        if max(given if isinstance(given, list) else [given]) >= 48:
            setattr(config, key, None)
    config._attn_implementation = "sdpa" if case in SDPA else "eager"
    model = kind(config).eval()
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=getattr(config, "decoder_start_token_id", None)
    )
    randomize_parameters(model)
    return model


def build_images(
    patches: PatchesConfig, rows: int, image_size: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the patches of random images as our models take them, and the same images as
    transformers does.
    """
    layout = ImageLayout(image_size or patches.image_size, patches)
    shape = (rows, patches.num_channels, layout.image_size, layout.image_size)
    images = torch.randint(
        0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    mean, std = (
        torch.tensor(patches.list_channel_values(one))[:, None, None]
        for one in (patches.mean, patches.std)
    )
    return torch.from_numpy(layout.cut_patches(images.numpy())), (images / 255 - mean) / std


@torch.no_grad()
def randomize_parameters(model: nn.Module, seed: int = 0) -> None:
    """Wide enough that attention, gates and routers leave their linear range."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.3 * noise if parameter.dim() == 1 else 0.3 * noise)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            # Small enough for the states of linear attention to live through a row.
            parameter.uniform_(-9, -5, generator=generator)
    for name, buffer in (*model.named_buffers(), *model.named_parameters()):
        if name.endswith(("e_score_correction_bias", "final_logits_bias")):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
