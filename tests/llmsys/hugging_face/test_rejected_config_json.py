"""Nothing in a config.json is passed over in silence: each mistake names its key, what is wrong
and what would do.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from llmsys.config.loading.load import (
    build_model_config,
    load_model_config,
    load_run_config,
    read_config,
)
from llmsys.errors import ConfigError
from llmsys.hugging_face.families import FAMILIES
from llmsys.hugging_face.shared_fields import KINDS
from llmsys.launch.main import main

TINY = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def refusal(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build_model_config(values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hiden_size": 3},
            "hiden_size: unknown field, which may change the computation. Did you mean "
            "hidden_size?",
        ),
        (
            {"looped_layers": 2},
            "looped_layers: unknown field, which may change the computation. Remove it if it",
        ),
        ({"looped_layers": None}, "looped_layers: unknown field"),
        ({"hidden_size": "32"}, "hidden_size: '32' is not a whole number."),
        ({"hidden_size": True}, "hidden_size: true is not a whole number."),
        ({"hidden_size": None}, "hidden_size: null is not a whole number."),
        ({"hidden_size": 32.5}, "hidden_size: 32.5 is not a whole number."),
        ({"rms_norm_eps": None}, "rms_norm_eps: null is not a finite number."),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: nan is not a finite number."),
        ({"attention_bias": "no"}, "attention_bias: 'no' is not true or false."),
        ({"hidden_act": "relu2"}, "hidden_act: 'relu2' is not supported. Known: gelu,"),
        ({"hidden_act": "sillu"}, "Did you mean silu?"),
        (
            {"pretraining_tp": 2},
            "pretraining_tp: 2 is not supported: it only splits matmuls into slices.",
        ),
        (
            {"sliding_window": 8},
            "sliding_window: 8 is not supported: this model type has no sliding window. Only null "
            "can be",
        ),
        (
            {"layer_types": ["sliding_attention"] * 2},
            "layer_types: this model type has full attention only.",
        ),
        (
            {"is_encoder_decoder": True},
            "is_encoder_decoder: true is not supported: it contradicts the model type.",
        ),
        (
            {"add_cross_attention": True},
            "add_cross_attention: true is not supported: a decoder with cross attention",
        ),
        ({"tie_encoder_decoder": True}, "tie_encoder_decoder: true is not supported"),
        (
            {"pruned_heads": {"0": [1]}},
            "pruned_heads: {'0': [1]} is not supported: every layer has all its heads.",
        ),
        (
            {"rope_scaling": {"rope_type": "ntk"}},
            "rope_scaling.rope_type: 'ntk' is not supported. Known: default,",
        ),
        (
            {"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2}},
            "rope_scaling.type: 'yarn' and",
        ),
        (
            {"rope_scaling": {"type": "linear"}},
            "rope_scaling.factor: is missing. Give a finite number.",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": "2"}},
            "rope_scaling.factor: '2' is not a finite number.",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2, "beta": 1}},
            "rope_scaling.beta: unknown field",
        ),
        (
            {"rope_parameters": {"mrope_section": [1]}},
            "rope_parameters.mrope_section: unknown field",
        ),
        (
            {"rope_parameters": {"full_attention": {}}},
            "rope_parameters.full_attention: unknown field",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor: 0.5 is not supported",
        ),
        (
            {"rope_parameters": {"a": 1}, "rope_scaling": {"b": 1}},
            "rope_scaling: is given together with rope_parameters.",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling: 'linear' is not a mapping."),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "LlamaForSequenceClassification cannot be built. Known",
        ),
        (
            {"architectures": ["LlamaModel"]},
            "architectures: LlamaModel has no head, but tie_word_embeddings is false.",
        ),
        (
            {"architectures": "LlamaForCausalLM"},
            "architectures: 'LlamaForCausalLM' is not a list of texts.",
        ),
        (
            {"num_attention_heads": 5},
            "config.json: num_attention_heads: 5 does not divide hidden_size=32. Use 4 or 8",
        ),
        (
            {"num_key_value_heads": 3},
            "config.json: num_key_value_heads: 3 does not divide num_attention_heads=4.",
        ),
        ({"head_dim": 0}, "config.json: head_dim: 0 is too small: the minimum is 1."),
        ({"rope_theta": 0}, "config.json: position.theta: 0.0 is too small: it must be above 0."),
        (
            {"rope_interleaved": True},
            "rope_interleaved: true is not supported: rotated channel pairs",
        ),
        ({"vocab_size": 0}, "config.json: vocab_size: 0 is too small: the minimum is 2."),
    ],
)
def test_a_llama_that_cannot_be_built_is_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    assert message in refusal(**{**TINY, **changes})


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            "all layers use the same attention scale. Only false can be",
        ),
        (
            "gpt2",
            {"n_embd": 768, "hidden_size": 32},
            "hidden_size: 32 and n_embd=768 disagree. Keep one of them.",
        ),
        (
            "bloom",
            {"apply_residual_connection_post_layernorm": True},
            "the residual is taken before the norm",
        ),
        ("bloom", {"slow_but_exact": True}, "slow_but_exact: true is not supported"),
        (
            "opt",
            {"word_embed_proj_dim": 512},
            "word_embed_proj_dim: 512 is not supported: the embedding has the width",
        ),
        (
            "opt",
            {"layerdrop": 0.1},
            "layerdrop: 0.1 is not supported: LayerDrop is not supported. Only 0 can",
        ),
        (
            "falcon",
            {"new_decoder_architecture": True, "parallel_attn": False},
            "parallel_attn: false contradicts",
        ),
        (
            "falcon",
            {"num_ln_in_parallel_attn": 2},
            "num_ln_in_parallel_attn: 2 cannot be built here. Use 1.",
        ),
        (
            "falcon",
            {"multi_query": False, "num_kv_heads": 2},
            "2 groups need new_decoder_architecture. Use 71",
        ),
        (
            "gpt_neox",
            {"rotary_pct": 0.25, "partial_rotary_factor": 1},
            "partial_rotary_factor: 1 and rotary_pct=0.25",
        ),
        ("gemma2", {"use_bidirectional_attention": True}, "a decoder is causal"),
        (
            "qwen3_next",
            {"hidden_act": "gelu"},
            "hidden_act: 'gelu' is not supported: the convolution is followed by silu. Only 'silu'",
        ),
        (
            "qwen3_5_text",
            {"attn_output_gate": False},
            "attn_output_gate: false is not supported: outputs of attention have gates.",
        ),
        (
            "qwen3_5_moe_text",
            {"norm_topk_prob": False},
            "norm_topk_prob: false is not supported: the weights of chosen experts are normalized.",
        ),
        (
            "granite",
            {"residual_multiplier": 0},
            "residual_multiplier: 0.0 is not above 0.",
        ),
        ("granitemoe", {"logits_scaling": -2}, "logits_scaling: -2.0 is not above 0."),
        (
            "granitemoehybrid",
            {"layer_types": ["mamba", "mlp"]},
            "layer_types: 'mlp' is not supported. Use mamba or attention.",
        ),
        (
            "granitemoehybrid",
            {"layers_block_type": ["mamba"]},
            "layers_block_type: has 1 entries for 32 layers. Give one for each.",
        ),
        (
            "granitemoehybrid",
            {"position_embedding_type": "learned"},
            "position_embedding_type: 'learned' is not supported: other positions are not known.",
        ),
        (
            "granitemoehybrid",
            {"mamba_n_heads": 7},
            "mamba_n_heads: 7 heads do not have mamba_expand · hidden_size = 8192 channels. Give",
        ),
        (
            "granitemoehybrid",
            {"normalization_function": "layernorm"},
            "normalization_function: 'layernorm' is not supported: its norms are RMSNorm.",
        ),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: 0.0 is not above 0."),
        (
            "gemma2",
            {"layer_types": ["full_attention"]},
            "layer_types: has 1 entries for 26 layers. Give one for each.",
        ),
        (
            "gemma2",
            {"layer_types": ["chunked_attention"] * 26},
            "layer_types: 'chunked_attention' is not supported.",
        ),
        (
            "gemma2",
            {"sliding_window_size": 512},
            "sliding_window_size: 512 is not supported: sliding_window has anoth",
        ),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "moe.every: 0 is too small: the minimum is 1."),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval: 0.0 is not above 0."),
        (
            "gpt_neox",
            {"rotary_pct": 0.0},
            "position.fraction: 0.0 is too small: it must be above 0.",
        ),
        (
            "qwen3_moe",
            {"use_qk_norm": False},
            "use_qk_norm: false is not supported: queries and keys have norms.",
        ),
        (
            "cohere2",
            {"sliding_window": None},
            "sliding_window: null would leave every layer without RoPE. Give a width.",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_theta": 1}},
            "rope_parameters.rope_theta: unknown field",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2}}},
            "rope_parameters.sliding_attention.rope_type: 'linear' is not supported: "
            "sliding-window layers have no rope scaling.",
        ),
        (
            "deepseek_v3",
            {"scoring_func": "softmax"},
            "scoring_func: 'softmax' is not supported: deepseek_v3 scores with",
        ),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq: 2 is not supported"),
        (
            "kimi_linear",
            {"layer_types": ["linear_attention", "mamba"]},
            "layer_types: 'mamba' is not supported. Known: linear_attention and full_attention.",
        ),
        (
            "kimi_linear",
            {"layer_types": ["full_attention"]},
            "layer_types: has 1 entries for 27 layers. Give one for each.",
        ),
        (
            "kimi_linear",
            {
                "num_hidden_layers": 3,
                "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [0, 1]},
            },
            "linear_attn_config.kda_layers: [0, 1] and full_attn_layers=[3] do not name each of "
            "the layers 1 to 3 once. Correct both lists.",
        ),
        (
            "kimi_linear",
            {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "moe"]},
            "mlp_layer_types: ['dense', 'moe'] does not say dense or sparse for each of 2 layers.",
        ),
        (
            "kimi_linear",
            {"mla_use_nope": False},
            "mla_use_nope: false is not supported: latent attention has no positions there.",
        ),
        (
            "kimi_linear",
            {"moe_router_activation_func": "softmax"},
            "moe_router_activation_func: 'softmax' is not supported: kimi_linear scores with",
        ),
        (
            "deepseek_v32",
            {"layer_types": ["indexed_attention", "full_attention"]},
            "layer_types: full_attention is not supported: every layer needs indexed_attention.",
        ),
        (
            "glm_moe_dsa",
            {"indexer_types": ["full", "shared"]},
            "indexer_types: shared is not supported: every layer needs full. Remove it.",
        ),
        (
            "glm_moe_dsa",
            {"index_topk_freq": 4},
            "index_topk_freq: 4 is not supported: every layer has an indexer of its own.",
        ),
        (
            "deepseek_v32",
            {"num_hidden_layers": 2, "mlp_layer_types": ["sparse", "dense"]},
            "mlp_layer_types: ['sparse', 'dense'] is not first_k_dense_replace=2 times dense",
        ),
        (
            "deepseek_v3",
            {"head_dim": 128},
            "head_dim: 128 is not supported: it is the number of rotated channels. Only",
        ),
        (
            "deepseek_v3",
            {"n_group": 1, "topk_group": 0},
            "moe.groups.groups_per_token: 0 is too small: the minimum is",
        ),
        (
            "deepseek_v3",
            {"n_group": 7},
            "moe.groups.num_groups: 7 groups cannot share 256 experts evenly.",
        ),
        ("deepseek_v2", {}, "num_experts_per_tok: is missing. Give a whole number."),
        (
            "deepseek_v2",
            {"num_experts_per_tok": 6, "norm_topk_prob": True},
            "the published code and transformers dis",
        ),
        (
            "deepseek_v2",
            {"num_experts_per_tok": 6, "topk_method": "best"},
            "topk_method: 'best' is not supported.",
        ),
        (
            "mixtral",
            {"num_experts_per_tok": 9},
            "moe.num_experts_per_tok: 9 of 8 experts cannot be chosen.",
        ),
        ("qwen3", {"layer_types": ["sliding_attention"] * 32}, "Set use_sliding_window to true."),
        (
            "smollm3",
            {"no_rope_layers": [1, 0]},
            "no_rope_layers: has 2 entries for 36 layers. Give one for each.",
        ),
        (
            "gpt_oss",
            {"hidden_act": "gelu"},
            "hidden_act: 'gelu' is not supported: its experts compute a clamped SwiGLU.",
        ),
        (
            "dbrx",
            {"ffn_config": {"moe_normalize_expert_weights": 2}},
            "ffn_config.moe_normalize_expert_weights: 2 is",
        ),
        ("dbrx", {"ffn_config": {"moe_size": 2}}, "ffn_config.moe_size: unknown field"),
        (
            "dbrx",
            {"attn_config": {"clip_qkv": "8"}},
            "attn_config.clip_qkv: '8' is not a finite number.",
        ),
        (
            "bert",
            {"architectures": ["BertLMHeadModel"]},
            "architectures: BertLMHeadModel cannot be built. Known: Bert",
        ),
        (
            "bert",
            {"position_embedding_type": "relative_key"},
            "positions are added to the embedding",
        ),
        (
            "bert",
            {"is_decoder": True},
            "is_decoder: true is not supported: an encoder is bidirectional.",
        ),
        ("bert", {"tie_word_embeddings": False}, "false adds a second bias that is unused."),
        (
            "roberta",
            {"max_position_embeddings": 2},
            "max_position_embeddings: the first 2 rows are unused. Use more",
        ),
        (
            "t5",
            {"architectures": ["T5EncoderModel"]},
            "architectures: T5EncoderModel cannot be built. Known: T5For",
        ),
        (
            "t5",
            {"feed_forward_proj": "gated-relu"},
            "feed_forward_proj: 'gated-relu' is not supported.",
        ),
        (
            "t5",
            {"dense_act_fn": "silu"},
            "dense_act_fn: 'silu' is not supported: feed_forward_proj has another activation.",
        ),
        ("bart", {"encoder_layerdrop": 0.1}, "encoder_layerdrop: 0.1 is not supported"),
        ("bart", {"tie_word_embeddings": False}, "embedding and head are one matrix"),
        (
            "marian",
            {"decoder_vocab_size": 9},
            "decoder_vocab_size: 9 is not vocab_size=58101, and they share one",
        ),
        ("marian", {"normalize_before": True}, "normalize_before: true is not supported"),
        (
            "marian",
            {"encoder_layers": 6, "num_hidden_layers": 5},
            "num_hidden_layers: 5 and encoder_layers=6 disagree.",
        ),
        (
            "xlnet",
            {"attn_type": "uni"},
            "attn_type: 'uni' is not supported: XLNet is bidirectional.",
        ),
    ],
)
def test_what_a_family_cannot_mean_is_refused_by_name(
    model_type: str, changes: dict[str, Any], message: str
) -> None:
    assert message in refusal(model_type=model_type, **changes)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_type_refuses_what_nobody_knows(model_type: str) -> None:
    assert "config.json: quite_new: unknown field" in refusal(
        model_type=model_type, quite_new=1, num_experts_per_tok=2
    )


def test_all_problems_are_named_at_once() -> None:
    text = refusal(**TINY, quite_new=1, pretraining_tp=2, rms_norm_eps="small")
    assert text.splitlines()[0] == "3 problems in config.json:"
    assert all(
        f"config.json: {key}: " in text for key in ("quite_new", "pretraining_tp", "rms_norm_eps")
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "model_type: is missing. Give one of arcee, bamba, bart,"),
        ({"model_type": "lama"}, "model_type: 'lama' is not supported. Known: arcee, bamba,"),
        (
            {"model_type": "qwen9", "rms_norm_eps": 1e-6, "mlp_bias": False},
            "'qwen9' is not supported. By its fields it is llama: if it computes the same, write "
            "that model_type into a copy of the file. Known: arcee,",
        ),
        (
            {"model_type": "lama", "n_embd": 8, "n_inner": 9, "rotary_dim": 4},
            "'lama' is not supported. By its fields it is nearest to gpt2, which does not take "
            "rotary_dim. Where these change nothing, write that model_type into a copy of the file "
            "without them.",
        ),
        (
            {"model_type": "sparse", "moe_num_experts": 4, "moe_k": 2, "use_bias": False},
            "By its fields it is ernie4_5_moe: if",
        ),
        ({"model_type": "llama9", "quite_new": 1, "newer": 2}, "'llama9' is not supported. Known"),
        ({"model_type": "mamba"}, "Known: arcee, bamba, bart, bert,"),
        ({"model_type": 3}, "model_type: 3 is not supported."),
        (
            {"model_type": "gemma3", "text_config": {}},
            "'gemma3' has its language model under text_config, with",
        ),
    ],
)
def test_an_unknown_type_is_refused_with_those_that_are_known(
    values: dict[str, Any], message: str
) -> None:
    assert message in refusal(**values)


# --- Wherever a model config is ---


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the folder `tiny` of a model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(
        json.dumps(TINY | {"model_type": "mistral", "num_key_value_heads": 2})
    )
    return tmp_path


def test_a_config_json_is_a_config(folder: Path) -> None:
    assert (
        load_model_config("tiny")
        == load_model_config("tiny/config.json")
        == load_model_config(str(folder / "tiny"))
    )
    assert (
        load_model_config("tiny", ["sliding_window=null", "num_hidden_layers=3"]).sliding_window
        is None
    )
    assert load_model_config("tiny").sliding_window == 4096
    assert read_config("tiny").origins[("model", "hidden_size")] == "tiny/config.json"


def test_a_config_json_is_a_base(folder: Path) -> None:
    (folder / "run.yaml").write_text("model: {base: tiny/config.json, num_hidden_layers: 3}\n")
    (folder / "bare.yaml").write_text("base: tiny\nnorm: {eps: 1e-3}\n")
    assert (
        load_run_config("run.yaml").model.num_hidden_layers,
        load_run_config("run.yaml").model.hidden_size,
    ) == (
        3,
        32,
    )
    assert load_model_config("bare.yaml").norm.eps == 1e-3
    assert (
        load_run_config("run.yaml", ["model.position.theta=7"]).model.position.model_dump()["theta"]
        == 7
    )


def test_a_config_json_is_shown_and_priced(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", "tiny"]) == 0
    assert "sliding_window: 4096  # default null; from tiny/config.json" in capsys.readouterr().out
    assert main(["estimate", "tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"]["total"] > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{\n 'a': 1}",
            "bad.json:2: not JSON: Expecting property name enclosed in double quotes. Correct "
            "column 2.",
        ),
        ('{"a": 1,\n"a": 2}', "bad.json: a is given twice. Keep one of them."),
        ("[1]", "bad.json holds a list, not a mapping. Give the config.json of a model."),
        ("", "bad.json:1: not JSON: Expecting value."),
        ("[" * 100_000, "bad.json: not JSON: nested too deeply."),
        (
            '{"model_type": "llama", "vocab_size": "x"}',
            "bad.json: vocab_size: 'x' is not a whole number.",
        ),
        (
            '{"model_type": "llama", "vocab_size": 1}',
            "bad.json: model.vocab_size: 1 is too small: the minimum is",
        ),
    ],
)
def test_a_file_that_cannot_be_read_says_why(folder: Path, text: str, message: str) -> None:
    (folder / "bad.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_model_config("bad.json")
    assert message in str(caught.value)


def test_a_model_stands_only_where_a_model_belongs(folder: Path) -> None:
    (folder / "run.yaml").write_text("optimizer: {base: tiny/config.json}\n")
    with pytest.raises(
        ConfigError,
        match=r"tiny/config\.json is a model, but optimizer is not a model section\. Write it as "
        r"`model",
    ):
        load_run_config("run.yaml")


def test_a_folder_without_a_config_json_is_refused(folder: Path) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(
        ConfigError, match=r"empty is a folder without a config: .* llmsys init empty"
    ):
        load_model_config("empty")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_junk_is_refused_and_never_crashes(model_type: str) -> None:
    nested = {
        "rope_scaling",
        "rope_parameters",
        "attn_config",
        "ffn_config",
        "architectures",
        "layer_types",
    }
    inner = (
        "factor",
        "rope_type",
        "original_max_position_embeddings",
        "mscale_all_dim",
        "short_factor",
        "attn_pdrop",
    )
    for junk in (None, "x", "", -1, 0, 1.5, float("inf"), [], [1, "x"], {}, {"x": 1}, True, [None]):
        shapes: list[dict[str, Any]] = [
            {key: junk} for key in FAMILIES[model_type].defaults.keys() | nested
        ]
        shapes += [{"rope_scaling": {"type": kind, key: junk}} for kind in KINDS for key in inner]
        for changes in shapes:
            with contextlib.suppress(ConfigError):
                build_model_config({"model_type": model_type, "num_experts_per_tok": 2, **changes})
