"""Published hybrids: their config.json is read, and the model has the parameters of transformers'
class.
"""

import json
from typing import Any

import pytest
import torch

from llmsys.config.loading.load import build_model_config
from llmsys.estimate.model_tensors import count_parameters
from llmsys.hugging_face.families import FAMILIES

transformers = pytest.importorskip("transformers")

NEMOTRON = {
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "hidden_dropout": 0.0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}
# As far as known from memory, without the files at hand: sizes, and the spelling of keys.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Nemotron-H-8B-Base-8K": NEMOTRON
    | {
        "attention_head_dim": 128,
        "hidden_size": 4096,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "intermediate_size": 21504,
        "mamba_num_heads": 128,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 8,
        "num_query_groups": 8,
    },
    "Nemotron-3-Nano-30B-A3B": NEMOTRON
    | {
        "head_dim": 128,
        "hidden_size": 2688,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "intermediate_size": 1856,
        "mamba_num_heads": 64,
        "mamba_ssm_cache_dtype": "float32",
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_eps": 1e-05,
        "norm_topk_prob": True,
        "num_experts_per_tok": 6,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 1.0,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "topk_group": 1,
    },
    "mamba2-2.7b": {
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        "chunk_size": 256,
        "conv_kernel": 4,
        "expand": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "initializer_range": 0.1,
        "layer_norm_epsilon": 1e-05,
        "n_groups": 1,
        "num_heads": 80,
        "num_hidden_layers": 64,
        "rescale_prenorm_residual": False,
        "residual_in_fp32": True,
        "rms_norm": True,
        "state_size": 128,
        "tie_word_embeddings": True,
        "time_step_floor": 0.0001,
        "time_step_limit": [0.0, float("inf")],
        "time_step_max": 0.1,
        "time_step_min": 0.001,
        "time_step_rank": 160,
        "use_bias": False,
        "use_conv_bias": True,
        "vocab_size": 50288,
    },
    "Olmo-Hybrid-7B": {
        "model_type": "olmo_hybrid",
        "architectures": ["OlmoHybridForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 3840,
        "initializer_range": 0.02,
        "intermediate_size": 11008,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
        "linear_allow_neg_eigval": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 96,
        "linear_num_key_heads": 30,
        "linear_num_value_heads": 30,
        "linear_value_head_dim": 192,
        "max_position_embeddings": 65536,
        "num_attention_heads": 30,
        "num_hidden_layers": 32,
        "num_key_value_heads": 30,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": None, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": 100352,
    },
    "Falcon-H1-1.5B-Base": {
        "model_type": "falcon_h1",
        "architectures": ["FalconH1ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 0.9375,
        "attn_layer_indices": None,
        "embedding_multiplier": 5.656854249492381,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 4096,
        "key_multiplier": 0.390625,
        "lm_head_multiplier": 0.0390625,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_ssm": 3072,
        "mamba_d_state": 256,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 48,
        "mamba_norm_before_gate": False,
        "mamba_proj_bias": False,
        "mamba_rms_norm": False,
        "mamba_use_mlp": True,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "mlp_expansion_factor": 8,
        "mlp_multipliers": [0.8838834764831844, 0.5859375],
        "num_attention_heads": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "num_logits_to_keep": 1,
        "projectors_bias": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 100000000000.0,
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [
            0.3535533905932738,
            0.25,
            0.3535533905932738,
            0.5,
            0.3535533905932738,
        ],
        "ssm_out_multiplier": 0.23570226039551587,
        "tie_word_embeddings": False,
        "vocab_size": 65537,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_with_the_parameters_of_its_class(name: str) -> None:
    values = json.loads(json.dumps(PUBLISHED[name]))
    config = transformers.AutoConfig.for_model(**values)
    with torch.device("meta"):
        theirs = getattr(transformers, values["architectures"][0])(config)
    theirs.tie_weights()
    ours = count_parameters(build_model_config(values))
    assert ours.total == sum(one.numel() for one in theirs.parameters())


def test_sublayers_of_nemotron_are_written_as_they_are_read() -> None:
    values = PUBLISHED["Nemotron-3-Nano-30B-A3B"] | {"hybrid_override_pattern": "ME*--M"}
    model = build_model_config(values | {"num_hidden_layers": 6})
    assert (model.moe_layers, model.num_dense_layers, model.linear_layers) == ([1], 2, [0, 5])
    kinds = ["linear_attention", "moe", "full_attention", "mlp", "mlp", "linear_attention"]
    assert FAMILIES["nemotron_h"].write(model.model_dump())["layers_block_type"] == kinds


def test_factors_of_falcon_are_on_its_projections() -> None:
    factors = [0.1, 0.2, 0.3, 0.4, 0.5]
    changes: dict[str, Any] = {"attention_in_multiplier": 2.0, "ssm_multipliers": factors}
    model = build_model_config(PUBLISHED["Falcon-H1-1.5B-Base"] | changes)
    assert model.multipliers is not None
    attention, linear = model.multipliers.attention, model.multipliers.linear_attention
    assert (attention.q_proj, attention.k_proj, attention.v_proj) == (2.0, 2 * 0.390625, 2.0)
    # Gates, values, keys, queries, steps.
    names = ("g_proj", "v_proj", "k_proj", "q_proj", "a_proj")
    assert [getattr(linear, name) for name in names] == [1.25 * factor for factor in factors]
