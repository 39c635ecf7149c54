"""What is written reads back to the same model, and transformers builds the same tensors from
it.
"""

import json
from typing import Any

import pytest
import torch
import transformers

from llmsys.config.export.exported_model import choose_export
from llmsys.config.loading.load import build_model_config, load_model_config
from llmsys.config.model import ModelConfig
from llmsys.errors import ConfigError
from llmsys.estimate.model_tensors import count_parameters
from llmsys.hugging_face.families import FAMILIES
from tests.helpers.paths import TEST_DATA

PUBLISHED = json.loads((TEST_DATA / "config" / "published_configs.json").read_text())


def build_config_json(model: ModelConfig, model_type: str | None = None) -> dict[str, Any]:
    return choose_export(model, None, model_type).values


SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
WIDE = SMALL | {"intermediate_size": 24, "max_position_embeddings": 64}
GROUPED = WIDE | {"num_key_value_heads": 2}
MIXED = GROUPED | {"num_experts_per_tok": 2}
LATENT = WIDE | {
    "num_key_value_heads": 4, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
}  # fmt: skip
KIMI = {
    "num_experts": 8, "num_experts_per_token": 2, "linear_num_heads": 2, "linear_head_dim": 6,
    "pad_token_id": 0,
}  # fmt: skip
INDEXED = {"index_topk": 5, "index_n_heads": 3, "index_head_dim": 6, "q_lora_rank": 7}
STACKS = {
    "vocab_size": 97, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 20, "decoder_ffn_dim": 24,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 16,
}
# Small models of every type, with as many of its choices as one model can take; what transformers
# builds is the truth.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", GROUPED),
    ("llama", GROUPED | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
        "head_dim": 6}),
    ("mistral", GROUPED),
    ("mixtral", MIXED | {"num_local_experts": 4}),
    ("qwen2", GROUPED | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ("qwen2_moe", MIXED | {"num_experts": 4, "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 20}),
    ("qwen2_moe", MIXED | {"mlp_only_layers": [0], "decoder_sparse_step": 2, "num_experts": 4,
        "qkv_bias": False}),
    ("qwen3", GROUPED | {"head_dim": 12}),
    ("qwen3_moe", MIXED | {"num_experts": 4, "moe_intermediate_size": 12, "mlp_only_layers": [1]}),
    ("qwen3_next", MIXED | {"num_experts": 4, "moe_intermediate_size": 12, "head_dim": 8,
        "shared_expert_intermediate_size": 20, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10}),
    ("qwen3_5_text", GROUPED | {"head_dim": 8, "linear_num_key_heads": 2, "attention_bias": True,
        "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10}),
    ("kimi_linear", LATENT | KIMI | {"num_expert_group": 4, "topk_group": 2, "q_lora_rank": 7,
        "attention_bias": True, "layer_types": ["full_attention", "linear_attention"],
        "num_hidden_layers": 2, "linear_conv_kernel_dim": 3}),
    ("kimi_linear", LATENT | KIMI | {"num_hidden_layers": 4,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "layer_types": ["linear_attention"] * 4}),
    ("kimi_linear", LATENT | KIMI | {"mlp_layer_types": ["dense"] * 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"]}),
    ("granite", GROUPED | {"mlp_bias": True, "logits_scaling": 6, "residual_multiplier": 0.2}),
    ("granitemoe", MIXED | {"num_local_experts": 4, "attention_multiplier": 0.3}),
    ("granitemoehybrid", MIXED | {"num_local_experts": 4, "shared_intermediate_size": 20,
        "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 6, "logits_scaling": 3}),
    ("granitemoehybrid", GROUPED | {"num_local_experts": 0, "shared_intermediate_size": 20,
        "mamba_n_heads": 4, "mamba_d_state": 6, "position_embedding_type": "rope"}),
    ("smollm3", GROUPED | {"pad_token_id": 0, "no_rope_layer_interval": 2}),
    ("olmo2", GROUPED | {"attention_bias": True}),
    ("olmoe", MIXED | {"num_experts": 4, "clip_qkv": 2.0}),
    ("phimoe", MIXED | {"num_local_experts": 4, "lm_head_bias": True, "attention_bias": True}),
    ("gpt_oss", MIXED | {"num_local_experts": 4, "head_dim": 8}),
    ("dbrx", {"vocab_size": 97, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
              "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
              "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 24}}),
    ("gemma2", GROUPED | {"head_dim": 6, "query_pre_attn_scalar": 10}),
    ("gemma3_text", GROUPED | {"head_dim": 6, "sliding_window": 8}),
    ("deepseek_v2", LATENT | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
        "q_lora_rank": 7}),
    ("deepseek_v2", LATENT | {"q_lora_rank": None, "first_k_dense_replace": 3}),
    ("deepseek_v3", LATENT | {"n_group": 4, "topk_group": 2, "attention_bias": True,
        "q_lora_rank": 7,
                              "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    ("deepseek_v32", LATENT | INDEXED | {"n_group": 4, "topk_group": 2,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    ("glm_moe_dsa", LATENT | INDEXED | {"attention_bias": True, "indexer_types": ["full"] * 3}),
    ("dots1", MIXED | {"n_routed_experts": 8, "moe_intermediate_size": 12, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "max_window_layers": 2}),
    ("minimax_m2", MIXED | {"num_local_experts": 4, "head_dim": 8, "rotary_dim": 4}),
    ("minimax_m2", MIXED | {"num_local_experts": 4}),
    ("glm", GROUPED | {"pad_token_id": 0, "head_dim": 8, "attention_bias": False}),
    ("glm4", GROUPED | {"pad_token_id": 0, "head_dim": 8}),
    ("gemma", GROUPED | {"head_dim": 6, "attention_bias": True}),
    ("olmo3", GROUPED),
    ("olmo3", GROUPED | {"num_hidden_layers": 4, "sliding_window": 8}),
    ("ministral", GROUPED | {"head_dim": 6, "layer_types": ["full_attention"] * 3}),
    ("ministral", GROUPED | {"num_hidden_layers": 2, "sliding_window": 8, "head_dim": 8,
        "layer_types": ["full_attention", "sliding_attention"]}),
    ("starcoder2", GROUPED | {"sliding_window": 8, "residual_dropout": 0.1}),
    ("starcoder2", GROUPED | {"use_bias": False, "tie_word_embeddings": False}),
    ("cohere2", GROUPED | {"layer_types": ["full_attention"] * 3}),
    ("cohere2", GROUPED | {"num_hidden_layers": 4, "sliding_window": 8, "attention_bias": True}),
    ("arcee", GROUPED | {"hidden_act": "relu2", "mlp_bias": True}),
    ("seed_oss", GROUPED | {"head_dim": 6, "attention_out_bias": True, "mlp_bias": True}),
    ("exaone4", GROUPED),
    ("exaone4", GROUPED | {"num_hidden_layers": 4, "sliding_window_pattern": 2}),
    ("exaone4", GROUPED | {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    ("mpt", {"vocab_size": 97, "d_model": 24, "n_layers": 2, "n_heads": 6, "max_seq_len": 64,
        "attn_config": {"clip_qkv": 8.0, "softmax_scale": 0.5}}),
    ("roformer", WIDE | {"hidden_act": "relu", "type_vocab_size": 1}),
    ("ernie4_5", GROUPED | {"use_bias": True, "head_dim": 6, "tie_word_embeddings": False}),
    ("ernie4_5_moe", MIXED | {"moe_num_experts": 4, "moe_intermediate_size": 12,
        "moe_num_shared_experts": 2, "moe_layer_end_index": 1}),
    ("ernie4_5_moe", MIXED | {"moe_num_experts": 4, "moe_intermediate_size": 12, "head_dim": 10,
        "moe_num_shared_experts": 0, "moe_layer_start_index": 0, "moe_layer_interval": 2}),
    ("ernie4_5_moe", MIXED | {"moe_layer_start_index": 9}),
    ("glm4_moe", MIXED | {"head_dim": 8, "n_routed_experts": 8, "use_qk_norm": True,
        "attention_bias": True}),
    ("gpt2", {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    ("gpt2", {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 20,
        "scale_attn_weights": False}),
    ("gpt_neox", WIDE | {"use_parallel_residual": False}),
    ("gpt_neox", WIDE | {"attention_bias": False, "hidden_dropout": 0.1}),
    ("opt", SMALL | {"ffn_dim": 24, "enable_bias": False}),
    ("opt", SMALL | {"ffn_dim": 24, "do_layer_norm_before": False}),
    ("bloom", {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    ("falcon", SMALL | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    ("falcon", SMALL | {"new_decoder_architecture": True, "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1}),
    ("falcon", SMALL | {"multi_query": False, "alibi": True, "parallel_attn": False}),
    ("falcon", SMALL),
    ("bert", WIDE),
    ("bert", WIDE | {"architectures": ["BertForPreTraining"], "type_vocab_size": 1}),
    ("bert", WIDE | {"architectures": ["BertModel"], "hidden_act": "relu"}),
    ("bert", WIDE | {"architectures": ["BertForSequenceClassification"]}),
    ("roberta", WIDE),
    ("roberta", WIDE | {"architectures": ["RobertaForSequenceClassification"],
        "classifier_dropout": 0.3}),
    ("xlnet", {"vocab_size": 97, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 24}),
    ("vit", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 24,
             "qkv_bias": False, "image_size": 32, "num_channels": 1}),
    ("vit", {"num_hidden_layers": 1, "architectures": ["ViTModel"], "hidden_act": "relu"}),
    ("t5", {"vocab_size": 97, "d_model": 32, "d_kv": 6, "d_ff": 24, "num_layers": 2,
        "num_heads": 4}),
    ("t5", {"vocab_size": 97, "d_model": 32, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 3,
            "feed_forward_proj": "gated-gelu", "scale_decoder_outputs": False}),
    ("bart", STACKS | {"scale_embedding": True}),
    ("marian", STACKS),
    ("marian", STACKS | {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 55}),
    ("marian", STACKS | {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}),
]  # fmt: skip
IDS = [f"{name}-{number}" for number, (name, _) in enumerate(CASES)]


def parameters(values: dict[str, Any]) -> int:
    """Trained parameters of what transformers builds; Marian's sinusoids are a parameter there
    that is not trained.
    """
    config = transformers.AutoConfig.for_model(**values)
    architecture = (values.get("architectures") or [FAMILIES[values["model_type"]].architecture])[0]
    with torch.device("meta"):
        built = getattr(transformers, architecture)(config)
    return sum(one.numel() for one in built.parameters() if one.requires_grad)


@pytest.mark.parametrize(("model_type", "values"), CASES, ids=IDS)
def test_read_and_written_models_have_the_tensors_that_transformers_builds(
    model_type: str, values: dict[str, Any]
) -> None:
    given = {"model_type": model_type, **values}
    model = build_model_config(given)
    written = build_config_json(model, model_type)
    assert build_model_config(json.loads(json.dumps(written))) == model
    total = count_parameters(model).total
    assert total == parameters(given)
    assert total == parameters(written)


@pytest.mark.parametrize(("model_type", "values"), CASES, ids=IDS)
def test_what_transformers_saves_reads_as_what_it_was_given(
    model_type: str, values: dict[str, Any]
) -> None:
    given = {"model_type": model_type, **values}
    saved = json.loads(json.dumps(transformers.AutoConfig.for_model(**given).to_dict()))
    assert build_model_config(saved) == build_model_config(given)


@pytest.mark.parametrize("values", PUBLISHED, ids=[one["id"] for one in PUBLISHED])
def test_every_published_model_comes_back(values: dict[str, Any]) -> None:
    model = build_model_config({key: value for key, value in values.items() if key != "id"})
    own = values["model_type"]
    # its own, and the plainest whose weights are converted
    for model_type in (own, None) if FAMILIES[own].has_weights else (own,):
        written = build_config_json(model, model_type)
        assert build_model_config(json.loads(json.dumps(written))) == model


def test_the_plainest_type_that_can_say_a_model_is_chosen() -> None:
    assert build_config_json(load_model_config("model/deepseek-67b"))["model_type"] == "llama"
    assert build_config_json(load_model_config("model/mistral-7b"))["model_type"] == "mistral"
    assert (
        build_config_json(load_model_config("model/mistral-7b", ["sliding_window=null"]))[
            "model_type"
        ]
        == "llama"
    )


def test_no_ids_of_another_vocabulary_are_written() -> None:
    values = build_config_json(load_model_config("model/llama-7b"))
    assert values["eos_token_id"] is None
    assert values["architectures"] == ["LlamaForCausalLM"]


def test_what_only_training_reads_may_be_left_out() -> None:
    model = load_model_config("model/llama-7b", ["dropout.residual=0.1", "initializer=xavier"])
    choice = choose_export(model)
    assert choice.model_type == "llama"
    left_out = {one.key: one.value for one in choice.left_out}
    assert left_out == {"initializer": "xavier", "dropout.residual": 0.1}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("palm-8b", "head.scale=inverse_sqrt_hidden_size"),
        ("glm-130b", "residual.kind=deepnorm"),
        ("gopher-417m", "position.kind=transformer_xl"),
        ("transformer-base", "model.position.arrangement=interleaved (halves would do)"),
    ],
)
def test_a_model_that_no_type_has_is_refused_with_the_fields(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config_json(load_model_config(f"model/{name}"))
    text = str(caught.value)
    assert text.startswith("No Hugging Face model type can represent this model. The nearest is ")
    assert message in text
    assert text.endswith("Change these fields, or keep the model in llmsys format.")


def test_further_tokens_are_predicted_in_this_format_only() -> None:
    model = load_model_config("model/deepseek-v3", ["multi_token_prediction={depth: 1}"])
    with pytest.raises(
        ConfigError,
        match=r"nearest is deepseek_v3, which cannot represent model\.multi_token_prediction=a "
        r"section \(null would do\)",
    ):
        build_config_json(model)


SPARSE = "attention.sparse={index_topk: 64}"


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("deepseek_v32", ["attention.sparse={phase: warm_up}"], r"phase=warm_up \(sparse would do"),
        ("deepseek_v32", [SPARSE, "position.pairing=halves"], r"model\.position\.pairing=halves"),
        (None, ["moe.latent_size=1024"], r"nearest is deepseek_v3, .*model\.moe\.latent_size=1024"),
    ],
    ids=str,
)
def test_what_no_type_has_of_indexers_and_latents_is_named(
    model_type: str | None, changes: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_config_json(load_model_config("model/deepseek-v3", changes), model_type)


def test_an_indexer_is_exported_as_the_type_of_its_pairing() -> None:
    for pairing, model_type in (("halves", "deepseek_v32"), ("neighbours", "glm_moe_dsa")):
        changes = [SPARSE, f"attention.sparse.pairing={pairing}"]
        exported = build_config_json(load_model_config("model/deepseek-v3", changes))
        assert exported["model_type"] == model_type


def test_an_unknown_type_cannot_be_asked_for() -> None:
    shape = {**SMALL, "intermediate_size": 24}
    with pytest.raises(ConfigError, match=r"model_type: 'mamba' is not supported\. Known: llama,"):
        build_config_json(ModelConfig.model_validate(shape), "mamba")
    with pytest.raises(
        ConfigError,
        match=r"gpt2 cannot represent this model\. It cannot represent model\.norm\.kind=rmsnorm "
        r"\(layernorm would do\), model\.position\.kind=rope \(learned would do\)",
    ):
        build_config_json(ModelConfig.model_validate(shape), "gpt2")
