"""Tiny configs of the model types that are read from Hugging Face, and the classes that compute
them.

Odd sizes on purpose: heads that do not share hidden_size evenly, more layers in one stack, dense
layers among experts.
"""

from typing import Any

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
# The gated delta rule in two of three layers, without and with experts.
DELTA = GROUPED | {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
DELTA_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 10,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
INDEXED = {"index_topk": 5, "index_n_heads": 3, "index_head_dim": 6}
# Kimi delta attention in two of three layers, latent attention in the other one.
KIMI = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": 12,
    "linear_num_heads": 4,
    "linear_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
STACKS = {
    "vocab_size": 61,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}

# name: (model_type, class, values)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "gpt2",
        "GPT2LMHeadModel",
        {
            "vocab_size": 61,
            "n_embd": 24,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 1,
        }
        | {"eos_token_id": 2},
    ),
    "llama": ("llama", "LlamaForCausalLM", GROUPED | {"attention_bias": True, "mlp_bias": True}),
    "llama tied": (
        "llama",
        "LlamaForCausalLM",
        GROUPED | {"tie_word_embeddings": True, "head_dim": 10},
    ),
    "mistral": ("mistral", "MistralForCausalLM", GROUPED | {"sliding_window": 5, "head_dim": 8}),
    "mixtral": ("mixtral", "MixtralForCausalLM", GROUPED | {"num_local_experts": 4}),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", GROUPED),
    "qwen2_moe": (
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        GROUPED
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
        | {"shared_expert_intermediate_size": 20, "mlp_only_layers": [1]},
    ),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", GROUPED | {"head_dim": 10}),
    "qwen3_moe": (
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        GROUPED
        | {"head_dim": 10, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    ),
    "qwen3_next": (
        "qwen3_next",
        "Qwen3NextForCausalLM",
        DELTA | DELTA_EXPERTS,
    ),
    "qwen3_5_text": (
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        DELTA,
    ),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        DELTA | DELTA_EXPERTS,
    ),
    "kimi_linear": ("kimi_linear", "KimiLinearForCausalLM", SMALL | KIMI),
    "kimi_linear with query rank": (
        "kimi_linear",
        "KimiLinearForCausalLM",
        SMALL
        | KIMI
        | {
            "num_hidden_layers": 4,
            "q_lora_rank": 14,
            "attention_bias": True,
            "num_expert_group": 4,
            "topk_group": 2,
            "layer_types": None,
            "linear_attn_config": {
                "full_attn_layers": [2, 4],
                "kda_layers": [1, 3],
                "num_heads": 2,
                "head_dim": 10,
                "short_conv_kernel_size": 3,
            },
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        },
    ),
    "granite": ("granite", "GraniteForCausalLM", GROUPED | {"mlp_bias": True}),
    "granitemoe": (
        "granitemoe",
        "GraniteMoeForCausalLM",
        GROUPED | {"num_local_experts": 4, "residual_multiplier": 0.5},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        GROUPED
        | {
            "hidden_size": 32,
            "num_local_experts": 4,
            "shared_intermediate_size": 20,
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 6,
            "mamba_expand": 1,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        "FalconH1ForCausalLM",
        GROUPED
        | {
            "mamba_n_heads": 4,
            "mamba_d_ssm": 20,
            "mamba_n_groups": 2,
            "mamba_d_state": 6,
            "mamba_rms_norm": True,
            "mlp_bias": True,
            "mlp_multipliers": [0.5, 2.0],
        },
    ),
    "olmo_hybrid": (
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        GROUPED
        | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 5,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        "NemotronHForCausalLM",
        GROUPED
        | {
            "num_hidden_layers": 5,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
            "head_dim": 10,
            "mamba_num_heads": 4,
            "mamba_head_dim": 6,
            "n_groups": 2,
            "ssm_state_size": 6,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "moe_shared_expert_intermediate_size": 14,
        },
    ),
    "mamba2": (
        "mamba2",
        "Mamba2ForCausalLM",
        {key: SMALL[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
        | {"num_heads": 4, "head_dim": 12, "n_groups": 2, "state_size": 6, "conv_kernel": 3},
    ),
    "bamba": (
        "bamba",
        "BambaForCausalLM",
        GROUPED
        | {
            "hidden_size": 32,
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 6,
            "mamba_expand": 1,
            "attn_layer_indices": [1],
            "mlp_bias": True,
        },
    ),
    "gemma2": ("gemma2", "Gemma2ForCausalLM", GROUPED | {"head_dim": 10, "sliding_window": 5}),
    "gemma3_text": (
        "gemma3_text",
        "Gemma3ForCausalLM",
        GROUPED | {"head_dim": 10, "sliding_window": 5},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        SMALL
        | LATENT
        | {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    ),
    "deepseek_v2 with query rank": (
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        SMALL | LATENT | {"q_lora_rank": 14, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3ForCausalLM", SMALL | LATENT | {"q_lora_rank": 14}),
    "deepseek_v3 with biases": (
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        SMALL | LATENT | {"q_lora_rank": 14, "attention_bias": True},
    ),
    "deepseek_v32": (
        "deepseek_v32",
        "DeepseekV32ForCausalLM",
        SMALL | LATENT | INDEXED | {"q_lora_rank": 14},
    ),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        SMALL | LATENT | INDEXED | {"q_lora_rank": 14, "attention_bias": True},
    ),
    "dots1": (
        "dots1",
        "Dots1ForCausalLM",
        GROUPED
        | {
            "head_dim": 10,
            "moe_intermediate_size": 12,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "minimax_m2": (
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        GROUPED
        | {"head_dim": 10, "rotary_dim": 4, "num_local_experts": 4}
        | {"num_experts_per_tok": 2},
    ),
    "glm": ("glm", "GlmForCausalLM", GROUPED | {"head_dim": 12}),
    "glm4": ("glm4", "Glm4ForCausalLM", GROUPED | {"head_dim": 12, "attention_bias": False}),
    "gemma": ("gemma", "GemmaForCausalLM", GROUPED | {"head_dim": 12, "attention_bias": True}),
    "olmo3": ("olmo3", "Olmo3ForCausalLM", GROUPED | {"sliding_window": 5}),
    "ministral": (
        "ministral",
        "MinistralForCausalLM",
        GROUPED | {"sliding_window": 5, "head_dim": 10},
    ),
    "starcoder2": ("starcoder2", "Starcoder2ForCausalLM", GROUPED | {"sliding_window": 5}),
    "cohere2": ("cohere2", "Cohere2ForCausalLM", GROUPED | {"sliding_window": 5}),
    "arcee": ("arcee", "ArceeForCausalLM", GROUPED | {"mlp_bias": True}),
    "seed_oss": ("seed_oss", "SeedOssForCausalLM", GROUPED | {"head_dim": 10}),
    "exaone4": ("exaone4", "Exaone4ForCausalLM", GROUPED | {"sliding_window": 5}),
    "ernie4_5": ("ernie4_5", "Ernie4_5ForCausalLM", GROUPED | {"head_dim": 10}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        GROUPED | {"moe_intermediate_size": 12, "moe_num_experts": 6, "moe_k": 2},
    ),
    "mpt": (
        "mpt",
        "MptForCausalLM",
        {"vocab_size": 61, "d_model": 24, "n_layers": 3, "n_heads": 4, "max_seq_len": 64},
    ),
    "roformer": ("roformer", "RoFormerForMaskedLM", SMALL),
    "olmo2": ("olmo2", "Olmo2ForCausalLM", GROUPED),
    "olmoe": ("olmoe", "OlmoeForCausalLM", GROUPED | {"num_experts": 6, "num_experts_per_tok": 2}),
    "gpt_neox": ("gpt_neox", "GPTNeoXForCausalLM", SMALL | {"rotary_pct": 1 / 3}),
    "gpt_neox in a row": (
        "gpt_neox",
        "GPTNeoXForCausalLM",
        SMALL | {"rotary_pct": 1 / 3, "use_parallel_residual": False},
    ),
    "opt": (
        "opt",
        "OPTForCausalLM",
        {key: value for key, value in SMALL.items() if key != "intermediate_size"}
        | {"ffn_dim": 40, "word_embed_proj_dim": 24},
    ),
    "bloom": (
        "bloom",
        "BloomForCausalLM",
        {
            "vocab_size": 61,
            "hidden_size": 24,
            "n_layer": 3,
            "n_head": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        | {"pad_token_id": 0},
    ),
    "falcon 7b": (
        "falcon",
        "FalconForCausalLM",
        {
            "vocab_size": 61,
            "hidden_size": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "bos_token_id": 1,
        }
        | {"eos_token_id": 2},
    ),
    "falcon 40b": (
        "falcon",
        "FalconForCausalLM",
        {
            "vocab_size": 61,
            "hidden_size": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
        }
        | {"new_decoder_architecture": True, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "falcon rw": (
        "falcon",
        "FalconForCausalLM",
        {
            "vocab_size": 61,
            "hidden_size": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "alibi": True,
        }
        | {
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "phimoe": (
        "phimoe",
        "PhimoeForCausalLM",
        GROUPED
        | {
            "num_local_experts": 4,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": None,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        "GptOssForCausalLM",
        GROUPED
        | {"head_dim": 10, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    ),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM", GROUPED),
    "dbrx": (
        "dbrx",
        "DbrxForCausalLM",
        {
            "vocab_size": 61,
            "d_model": 24,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
            "ffn_config": {"ffn_hidden_size": 12, "moe_num_experts": 6, "moe_top_k": 2},
        },
    ),
    "bert": ("bert", "BertModel", SMALL),
    "bert masked": ("bert", "BertForMaskedLM", SMALL),
    "bert pretraining": ("bert", "BertForPreTraining", SMALL),
    "bert classifier": ("bert", "BertForSequenceClassification", SMALL | {"num_labels": 3}),
    "roberta": ("roberta", "RobertaForMaskedLM", SMALL | {"type_vocab_size": 1, "pad_token_id": 1}),
    "t5": (
        "t5",
        "T5ForConditionalGeneration",
        {
            "vocab_size": 61,
            "d_model": 24,
            "d_kv": 10,
            "d_ff": 40,
            "num_layers": 2,
            "num_decoder_layers": 3,
        }
        | {"num_heads": 4, "decoder_start_token_id": 0},
    ),
    "t5 gated and untied": (
        "t5",
        "T5ForConditionalGeneration",
        {"vocab_size": 61, "d_model": 24, "d_kv": 10, "d_ff": 40, "num_layers": 2, "num_heads": 4}
        | {
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
            "decoder_start_token_id": 0,
        },
    ),
    "marian": ("marian", "MarianMTModel", STACKS),
    "bart": ("bart", "BartForConditionalGeneration", STACKS),
    "vit": (
        "vit",
        "ViTForImageClassification",
        {
            "hidden_size": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 40,
        }
        | {"image_size": 12, "patch_size": 4},
    ),
}
