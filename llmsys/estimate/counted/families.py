"""The model types that are counted and not trained, with the defaults of transformers' config
classes.

Keys that are listed as ignored change the computation of a token, and neither parameters nor
matmuls.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from llmsys.estimate.counted import dense_families as dense
from llmsys.estimate.counted import gemma_families as gemma
from llmsys.estimate.counted import hybrid_families as hybrid
from llmsys.estimate.counted import recent_families as recent
from llmsys.estimate.counted.counted_model import CountedModel
from llmsys.hugging_face.config_json import ConfigJsonReader


class CountedFamily(NamedTuple):
    """One model type: its counts, the defaults that they need, and its keys that do not change
    them.
    """

    build: Callable[[ConfigJsonReader], CountedModel]
    defaults: dict[str, Any]
    ignored: str = ""


_DECODER = {
    "num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": False,
    "attention_bias": False,
    "max_position_embeddings": 2048, "sliding_window": None, "layer_types": None,
}  # fmt: skip
_LLAMA = _DECODER | {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32,
}  # fmt: skip
_COHERE = _DECODER | {
    "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
    "num_attention_heads": 64, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
_MISTRAL = _LLAMA | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
_HUNYUAN = (
    "eod_token_id use_qk_norm use_cla cla_share_factor attention_head_dim class_num pool_type "
    "add_classification_head use_rotary_pos_emb norm_type mlp_bias org_vocab_size im_start_id "
    "im_end_id im_newline_id text_start_id text_end_id video_start_id video_end_id mask_init_id "
    "sep_token_id "
    "skip_cls_token position_embedding_xdrope enable_lm_head_fp32 dense_list"
)
_MAMBA = "time_step_min time_step_max time_step_floor rescale_prenorm_residual residual_in_fp32 "

COUNTED_FAMILIES: dict[str, CountedFamily] = {
    "phi3": CountedFamily(
        dense.build_phi3,
        _LLAMA | {
            "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
            "max_position_embeddings": 4096,
        },
        "original_max_position_embeddings resid_pdrop embd_pdrop",
    ),
    "cohere": CountedFamily(dense.build_cohere, _COHERE | {"use_qk_norm": False},
        "logit_scale layer_norm_eps"),
    "ministral3": CountedFamily(
        dense.build_ministral,
        _MISTRAL | {
            "vocab_size": 131072, "num_hidden_layers": 34, "head_dim": 128,
            "max_position_embeddings": 262144,
        },
    ),
    "mt5": CountedFamily(
        dense.build_mt5,
        {
            "vocab_size": 250112, "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8,
            "num_decoder_layers": None, "num_heads": 6, "relative_attention_num_buckets": 32,
            "feed_forward_proj": "gated-gelu",
        },
        "relative_attention_max_distance dropout_rate layer_norm_epsilon initializer_factor "
        "is_decoder is_gated_act dense_act_fn n_positions scale_decoder_outputs",
    ),
    "mamba": CountedFamily(
        hybrid.build_mamba,
        {
            "vocab_size": 50280, "hidden_size": 768, "state_size": 16, "num_hidden_layers": 32,
            "expand": 2,
            "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": "auto",
            "tie_word_embeddings": True,
        },
        _MAMBA + "layer_norm_epsilon time_step_scale time_step_init_scheme use_mambapy "
        "use_associative_scan intermediate_size d_inner d_model n_layer ssm_cfg "
        "fused_add_norm rms_norm pad_vocab_size_multiple",
    ),
    "jamba": CountedFamily(
        hybrid.build_jamba,
        _DECODER | {
            "vocab_size": 65536, "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 262144,
            "num_experts_per_tok": 2, "num_experts": 16, "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4,
            "mamba_expand": 2, "mamba_dt_rank": "auto", "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
        "use_mamba_kernels use_mambapy use_associative_scan num_logits_to_keep "
        "mamba_inner_layernorms calc_logits_for_entire_prompt",
    ),
    "apertus": CountedFamily(
        recent.build_apertus,
        _LLAMA | {
            "vocab_size": 131072, "intermediate_size": 14336, "max_position_embeddings": 65536,
        },
        "post_norm qk_norm mlp_bias hidden_dropout",
    ),
    "hunyuan_v1_dense": CountedFamily(
        recent.build_hunyuan_dense, _LLAMA | {"vocab_size": 290943}, _HUNYUAN
    ),
    "hunyuan_v1_moe": CountedFamily(
        recent.build_hunyuan_experts,
        _LLAMA | {"vocab_size": 290943, "num_experts": 1, "moe_topk": 1},
        _HUNYUAN + " moe_intermediate_size num_shared_expert use_mixed_mlp_moe "
        "moe_layer_num_skipped moe_random_routing_dropped_token moe_drop_tokens norm_topk_prob "
        "routed_scaling_factor n_group topk_group num_experts_per_tok group_limited_greedy "
        "capacity_factor",
    ),
    "llama4_text": CountedFamily(
        recent.build_llama4,
        _DECODER | {
            "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192,
            "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40,
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
            "num_experts_per_tok": 1, "num_local_experts": 16, "moe_layers": None,
            "interleave_moe_layer_step": 1, "no_rope_layers": None, "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
        },
        "use_qk_norm attn_temperature_tuning floor_scale attn_scale for_llm_compressor",
    ),
    "lfm2": CountedFamily(
        recent.build_lfm2,
        _DECODER | {
            "vocab_size": 65536, "hidden_size": 2560, "intermediate_size": 12288,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "max_position_embeddings": 128000, "tie_word_embeddings": True, "conv_bias": False,
            "conv_L_cache": 3, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True, "full_attn_idxs": None,
        },
        "norm_eps block_norm_eps block_use_swiglu block_use_xavier_init block_mlp_init_scale "
        "block_out_init_scale block_dim conv_dim conv_dim_out conv_use_xavier_init theta "
        "conv_init_scale num_heads use_pos_enc",
    ),
    "modernbert": CountedFamily(
        recent.build_modernbert,
        _DECODER | {
            "vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152,
            "num_hidden_layers": 22, "num_attention_heads": 12, "max_position_embeddings": 8192,
            "tie_word_embeddings": True, "norm_bias": False, "mlp_bias": False,
            "classifier_bias": False, "decoder_bias": True, "local_attention": 128,
        },
        "hidden_activation initializer_cutoff_factor norm_eps embedding_dropout mlp_dropout "
        "classifier_pooling classifier_activation deterministic_flash_attn sparse_prediction "
        "sparse_pred_ignore_index global_rope_theta local_rope_theta layer_norm_eps "
        "position_embedding_type reference_compile repad_logits_with_grad gradient_checkpointing "
        "classifier_dropout",
    ),
    "gemma4_text": CountedFamily(
        gemma.build_gemma4,
        _DECODER | {
            "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216,
            "num_hidden_layers": 30, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "max_position_embeddings": 131072, "sliding_window": 512,
            "tie_word_embeddings": True, "vocab_size_per_layer_input": 262144,
            "hidden_size_per_layer_input": 256, "attention_k_eq_v": False,
            "num_kv_shared_layers": 0, "enable_moe_block": False, "use_double_wide_mlp": False,
            "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None,
            "global_head_dim": 512, "num_global_key_value_heads": None,
        },
        "hidden_activation final_logit_softcapping use_bidirectional_attention",
    ),
    "esm": CountedFamily(
        recent.build_esm,
        _DECODER | {
            "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
            "num_attention_heads": 12, "max_position_embeddings": 1026,
            "tie_word_embeddings": True, "position_embedding_type": "absolute",
            "emb_layer_norm_before": None,
        },
        "hidden_dropout_prob attention_probs_dropout_prob layer_norm_eps token_dropout "
        "is_folding_model esmfold_config vocab_list is_decoder classifier_dropout",
    ),
}  # fmt: skip
# Keys of every type that change no count.
EVERYWHERE = (
    "hidden_act rms_norm_eps initializer_range rope_theta rope_scaling rope_parameters "
    "partial_rotary_factor attention_dropout router_aux_loss_coef router_jitter_noise "
    "pretraining_tp"
)
