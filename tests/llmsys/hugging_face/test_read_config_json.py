"""A config.json of the Hub is the model that its weights belong to, in sizes and in everything
that is computed.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import transformers

from llmsys.config.loading.load import build_model_config, load_model_config
from llmsys.config.model import ModelConfig
from llmsys.estimate.model_tensors import count_parameters
from llmsys.hugging_face.families import FAMILIES
from tests.helpers.paths import TEST_DATA

DATA = TEST_DATA / "config"
# As they stand on the Hub: sparse, old spellings, keys of remote code, quantised storage.
PUBLISHED = {
    one.pop("id"): one for one in json.loads((DATA / "published_configs.json").read_text())
}
# Parameters of the published weights, without buffers.
COUNTS = {
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma2-2b": 2_614_341_888,
    "gemma2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-20b": 20_914_757_184,
    "pythia-70m": 70_426_624,
    "gpt-neox-20b": 20_554_567_680,
    "bloom-560m": 559_214_592,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "falcon-rw-1b": 1_311_625_216,
    "gpt2": 124_439_808,
    "opt-125m": 125_239_296,
    "bert-base-uncased": 109_514_298,
    "roberta-large": 355_412_057,
    "t5-small": 60_506_624,
    "t5-v1.1-base": 247_577_856,
    "bart-large": 406_291_456,
    "dbrx": 131_596_523_520,
    "phi-3.5-moe": 41_873_153_344,
    "olmo2-7b": 7_298_617_344,
    "olmoe-1b-7b": 6_919_161_856,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "glm-4.5-air": 106_852_245_504,
    "smollm3-3b": 3_075_098_624,
    # The index of its files counts 6,656 correction biases besides.
    "kimi-linear-48b-a3b": 49_122_675_072,
}


def published(name: str, **changes: Any) -> ModelConfig:
    return build_model_config(PUBLISHED[name] | changes, name)


def tiny(model_type: str, **changes: Any) -> ModelConfig:
    """A model of this type whose sizes are left to the defaults of the type."""
    return build_model_config({"model_type": model_type, **changes})


@pytest.mark.parametrize("name", COUNTS)
def test_a_published_file_has_the_parameters_of_its_weights(name: str) -> None:
    assert count_parameters(published(name)).total == COUNTS[name]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_key_that_is_left_out_means_what_transformers_takes_it_to_mean(model_type: str) -> None:
    theirs = transformers.AutoConfig.for_model(model_type)
    written = type(theirs).__dataclass_fields__
    for key, default in FAMILIES[model_type].defaults.items():
        spelled = theirs.attribute_map.get(key, key)
        own = written[spelled].default if spelled in written else getattr(theirs, key, None)
        assert own == default, key


# The defaults of these two are no model: experts per token are missing, and an odd number of
# channels is rotated.
@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - {"deepseek_v2", "dots1", "glm4_moe"}))
def test_a_file_that_names_its_type_alone_is_the_file_with_every_default_written_out(
    model_type: str,
) -> None:
    written = json.loads(json.dumps(transformers.AutoConfig.for_model(model_type).to_dict()))
    assert tiny(model_type) == build_model_config(written)


def test_llama_3_stretches_its_rotation() -> None:
    position = published("llama-3.1-8b").position
    assert position.kind == "rope"
    assert position.theta == 500_000
    assert position.scaling.model_dump() == {
        "kind": "llama3",
        "factor": 8,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 8192,
    }


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "deepseek-v3", "gpt-oss-20b", "phi-3.5-moe", "mistral-7b"]
)
def test_the_old_and_the_new_spelling_of_rotation_are_the_same(name: str) -> None:
    old = dict(PUBLISHED[name])
    scaling = dict(old.pop("rope_scaling", None) or {"rope_type": "default"})
    scaling["rope_type"] = scaling.pop("type", scaling.get("rope_type"))
    new = old | {"rope_parameters": scaling | {"rope_theta": old.pop("rope_theta")}}
    new.pop("rope_theta", None)
    assert build_model_config(new) == published(name)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "yarn", "factor": 8.0}])
def test_olmo3_scales_the_layers_that_see_everything(scaling: dict[str, Any] | None) -> None:
    values = {"model_type": "olmo3", "rope_theta": 3e5, "rope_scaling": scaling}
    position = build_model_config(values).position
    assert position.kind == "rope"
    assert position.theta == 3e5
    assert position.scaling.kind == ("none" if scaling is None else "yarn")
    assert position.sliding_theta == (None if scaling is None else 3e5)


def test_deepseek_v3_scales_its_scores_by_yarns_m_squared() -> None:
    model = published("deepseek-v3")
    assert model.attention.kind == "latent"
    assert model.attention.scale == pytest.approx((0.1 * math.log(40) + 1) ** 2 / math.sqrt(192))
    assert model.position.kind == "rope"
    assert model.position.pairing == "neighbours"
    assert model.moe is not None
    assert model.moe.groups is not None
    assert (model.moe.score, model.moe.groups.score, model.moe.first_dense_layers) == (
        "sigmoid",
        "top2",
        3,
    )
    assert model.moe.balance.model_dump() == {
        "kind": "bias",
        "rate": 0.001,
        "sequence_weight": 0.0001,
    }
    assert model.multi_token_prediction is None


def test_gemma_alternates_windows_and_bases() -> None:
    two, three = published("gemma2-27b"), published("gemma-3-1b")
    assert [two.get_attention_window(layer) for layer in range(4)] == [4096, None, 4096, None]
    assert two.attention.scale == pytest.approx(1 / 12)
    assert [three.get_attention_window(layer) for layer in range(7)] == [512] * 5 + [None, 512]
    assert three.position.kind == "rope"
    assert (three.position.theta, three.position.sliding_theta) == (1e6, 1e4)
    assert (two.embedding.scale, two.residual.kind, three.attention.model_dump()["qk_norm"]) == (
        "sqrt_hidden_size",
        "sandwich",
        "head",
    )


def test_falcons_come_in_three_shapes() -> None:
    seven, forty, rw = published("falcon-7b"), published("falcon-40b"), published("falcon-rw-1b")
    assert [one.num_key_value_heads for one in (seven, forty, rw)] == [1, 8, 32]
    assert seven.residual.model_dump() == {"kind": "parallel", "norms": 1}
    assert forty.residual.model_dump() == {"kind": "parallel", "norms": 2}
    assert rw.residual.kind == "pre"
    assert rw.position.model_dump() == {"kind": "alibi", "factor": 0.125}


@pytest.mark.parametrize(
    ("architecture", "head"),
    [
        (
            "BertForMaskedLM",
            {"kind": "mlm", "activation": "gelu", "pooler": False, "next_sentence": False},
        ),
        (
            "BertForPreTraining",
            {"kind": "mlm", "activation": "gelu", "pooler": True, "next_sentence": True},
        ),
        ("BertModel", {"kind": "features", "pooler": True}),
        (
            "BertForSequenceClassification",
            {"kind": "classification", "num_labels": 3, "pooling": None},
        ),
    ],
)
def test_the_class_decides_the_head(architecture: str, head: dict[str, Any]) -> None:
    labels = {"id2label": {"0": "a", "1": "b", "2": "c"}}
    assert (
        published("bert-base-uncased", architectures=[architecture], **labels).head.model_dump()
        == head
    )


def test_positions_of_roberta_begin_behind_the_padding_id() -> None:
    model = published("roberta-large")
    assert (model.max_position_embeddings, model.position.model_dump()) == (
        512,
        {"kind": "learned", "offset": 2},
    )


def test_the_old_and_the_new_t5() -> None:
    old, new = published("t5-small"), published("t5-v1.1-base")
    assert (old.tie_word_embeddings, old.head.model_dump()["scale"]) == (
        True,
        "inverse_sqrt_hidden_size",
    )
    assert (new.tie_word_embeddings, new.head.model_dump()["scale"]) == (False, 1.0)
    assert (old.feed_forward.kind, new.feed_forward.kind) == ("relu", "geglu_tanh")
    assert old.attention.scale == 1.0


def test_marian_starts_its_targets_with_the_padding_id() -> None:
    model = published("opus-mt-en-de")
    assert model.encoder is not None
    assert model.encoder.decoder_start_token_id == 58100
    assert (model.feed_forward.kind, model.embedding.scale) == ("silu", "sqrt_hidden_size")
    assert model.head.model_dump()["bias"] == "fixed"
    assert model.position.model_dump() == {"kind": "sinusoidal", "arrangement": "halves"}


@pytest.mark.parametrize(
    ("model_type", "changes", "windows"),
    [
        ("mistral", {}, [4096] * 4),
        ("mistral", {"sliding_window": None}, [None] * 4),
        ("qwen2", {"sliding_window": 8}, [None] * 4),
        (
            "qwen2",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
            [None, None, 8, 8],
        ),
        ("qwen2_moe", {"sliding_window": 8, "use_sliding_window": True}, [8, None, 8, None]),
        ("qwen3_moe", {"sliding_window": 8, "use_sliding_window": True}, [8] * 4),
        ("gpt_oss", {}, [128, None, 128, None]),
    ],
)
def test_windows_stand_where_each_type_puts_them(
    model_type: str, changes: dict[str, Any], windows: list[int | None]
) -> None:
    model = tiny(model_type, num_hidden_layers=4, **changes)
    assert [model.get_attention_window(layer) for layer in range(4)] == windows


GRANITE = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
    "embedding_multiplier": 12,
    "attention_multiplier": 0.0078125,
    "residual_multiplier": 0.22,
    "logits_scaling": 8,
}


def test_granite_multiplies_embedding_scores_branches_and_logits() -> None:
    model = tiny("granitemoehybrid", **GRANITE)
    assert model.residual.model_dump() == {"kind": "pre", "multiplier": 0.22}
    assert (model.embedding.scale, model.attention.scale) == (12, 0.0078125)
    assert model.head.model_dump()["scale"] == 1 / 8
    # The scale of a head's width is the usual one.
    assert (
        tiny("granite", num_attention_heads=64, attention_multiplier=0.125).attention.scale is None
    )


@pytest.mark.parametrize(("given", "kind"), [(None, "none"), ("nope", "none"), ("rope", "rope")])
def test_granite_4_has_positions_where_its_file_says_so(given: str | None, kind: str) -> None:
    changes = {"position_embedding_type": given, "rope_theta": 5e5}
    position = tiny("granitemoehybrid", **GRANITE, **changes).position
    assert position.model_dump().get("theta") == (5e5 if kind == "rope" else None)
    assert position.kind == kind


def test_granite_4_names_its_layers_in_two_ways_and_may_have_no_experts() -> None:
    own = ["mamba", "mamba", "mamba", "attention"]
    new = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    experts = tiny("granitemoehybrid", **GRANITE, layer_types=own)
    assert experts == tiny("granitemoehybrid", **GRANITE, layers_block_type=new)
    assert experts.linear_layers == [0, 1, 2]
    assert experts.moe is not None
    assert (experts.moe.moe_intermediate_size, experts.moe.shared_expert_size) == (11008, 1024)
    dense = tiny("granitemoehybrid", **GRANITE, num_local_experts=0, layer_types=["attention"] * 4)
    assert (dense.moe, dense.linear_attention, dense.intermediate_size) == (None, None, 1024)


def test_kimi_linear_is_one_model_as_published_and_as_transformers_writes_it() -> None:
    model = published("kimi-linear-48b-a3b")
    assert model == load_model_config("model/kimi-linear-48b-a3b").model_copy(
        update={"moe": model.moe, "num_key_value_heads": 32}
    )
    config = transformers.KimiLinearConfig(**PUBLISHED["kimi-linear-48b-a3b"])
    written = json.loads(config.to_json_string(use_diff=False))
    written.pop("linear_attn_config", None)
    assert build_model_config(written) == model
    assert [n + 1 for n in range(27) if not model.is_linear_layer(n)] == [4, 8, 12, 16, 20, 24, 27]
    assert model.moe_layers == list(range(1, 27))
    every = tiny("kimi_linear", num_hidden_layers=4, layer_types=["full_attention"] * 4)
    assert (every.linear_attention, every.position.kind) == (None, "none")
    dense = tiny("kimi_linear", num_hidden_layers=4, mlp_layer_types=["dense"] * 4)
    assert dense.moe is None


def test_positions_of_a_text_are_equal_on_every_axis_of_qwen3_5() -> None:
    rope = {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.5}
    axes = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    assert tiny("qwen3_5_text", rope_parameters=rope | axes) == tiny(
        "qwen3_5_text", rope_parameters=rope
    )


def test_smollm3_leaves_every_fourth_layer_unrotated() -> None:
    model = published("smollm3-3b")
    assert [model.uses_rope(layer) for layer in range(8)] == [True, True, True, False] * 2


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("marian", {"extra_pos_embeddings": 58101, "static_position_embeddings": True}),
        ("llama", {"architectures": ["LLaMAForCausalLM"], "max_sequence_length": 2048}),
        (
            "llama",
            {
                "is_llama_config": True,
                "rope_interleaved": False,
                "transformers.js_config": {"dtype": "q4"},
            },
        ),
        (
            "qwen3_moe",
            {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0},
        ),
        ("gemma2", {"sliding_window_size": 4096}),
        (
            "gpt_neox",
            {"custom_pipelines": {"text-generation": {}}, "num_steps": "global_step143000"},
        ),
        ("opt", {"learned_embeddings": True, "scale_embeddings": False}),
        (
            "bart",
            {"replacing_rate": 0, "student_encoder_layers": None, "student_decoder_layers": None},
        ),
    ],
)
def test_what_published_files_add_and_nothing_reads_changes_nothing(
    model_type: str, changes: dict[str, Any]
) -> None:
    assert tiny(model_type, **changes) == tiny(model_type)


def test_the_origin_of_stretched_weights_changes_nothing() -> None:
    yarn = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
    assert tiny("llama", rope_scaling=yarn | {"finetuned": True}) == tiny(
        "llama", rope_scaling=yarn
    )


def test_a_stored_format_is_left_out_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "llmsys"):
        published("deepseek-v3")
    assert "deepseek-v3: quantization_config: the storage format is ignored" in caplog.text


def test_a_folder_stands_for_its_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["gpt2"]))
    assert (
        load_model_config(str(tmp_path))
        == load_model_config(str(tmp_path / "config.json"))
        == published("gpt2")
    )


def test_layers_of_ernie_have_experts_from_a_first_to_a_last_one() -> None:
    model = tiny("ernie4_5_moe", num_hidden_layers=9, moe_layer_interval=2, moe_layer_end_index=6)
    assert model.moe_layers == [1, 3, 5]
    cut = tiny("ernie4_5_moe", num_hidden_layers=9, moe_layer_end_index=6)
    assert cut.moe_layers == [1, 2, 3, 4, 5, 6]
    assert tiny("ernie4_5_moe", num_hidden_layers=4, moe_layer_start_index=4).moe is None


def test_windows_of_exaone_have_rope_and_other_layers_none() -> None:
    model = tiny("exaone4", num_hidden_layers=4, sliding_window_pattern=2)
    assert [model.uses_rope(layer) for layer in range(4)] == [True, False, True, False]
    assert [model.get_attention_window(layer) for layer in range(4)] == [4096, None, 4096, None]
    plain = tiny("exaone4", num_hidden_layers=2, sliding_window=None)
    assert all(plain.uses_rope(layer) for layer in range(2))
