"""Counted model types against transformers' classes on random sizes, and against the operations
that torch counts.
"""

import inspect
import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from jsonschema import Draft202012Validator
from torch.utils.flop_counter import FlopCounterMode

from llmsys.estimate.counted.counted_estimate import build_counted_model, estimate_counted_model
from llmsys.estimate.counted.families import COUNTED_FAMILIES
from llmsys.estimate.model_tensors import count_parameters
from llmsys.hugging_face.read_config_json import COUNTED_TYPES
from llmsys.launch.main import main
from tools.docs.json_reference import build_schema

Draw = random.Random


def draw_decoder(draw: Draw) -> dict[str, Any]:
    """Sizes that every decoder has; heads and their channels are odd on purpose."""
    pairs, width = draw.choice((1, 2, 3)), 2 * draw.randint(1, 9)
    heads = pairs * draw.choice((1, 2, 4))
    return {
        "vocab_size": draw.randint(50, 300), "hidden_size": heads * width,
        "intermediate_size": draw.randint(7, 90),
        "num_hidden_layers": draw.randint(1, 6), "num_attention_heads": heads,
        "num_key_value_heads": pairs,
        "tie_word_embeddings": draw.random() < 0.5, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip


def draw_flag(draw: Draw, *names: str) -> dict[str, bool]:
    return {name: draw.random() < 0.5 for name in names}


def draw_window(draw: Draw) -> dict[str, Any]:
    return {"sliding_window": draw.choice((None, 3, 5))}


def draw_mt5(draw: Draw) -> dict[str, Any]:
    return {
        "vocab_size": draw.randint(50, 300), "d_model": draw.randint(8, 60), "d_kv": draw.randint(2,
            9),
        "d_ff": draw.randint(7, 90), "num_layers": draw.randint(1, 4),
        "num_decoder_layers": draw.randint(1, 4),
        "num_heads": draw.randint(1, 4), "feed_forward_proj": draw.choice(("gated-gelu", "relu")),
        "relative_attention_num_buckets": 8, "pad_token_id": 0, "decoder_start_token_id": 0,
    }  # fmt: skip


def draw_mamba(draw: Draw) -> dict[str, Any]:
    return {
        "vocab_size": draw.randint(50, 300), "hidden_size": draw.randint(17, 70),
        "state_size": draw.randint(2, 9),
        "num_hidden_layers": draw.randint(1, 4), "expand": draw.choice((1, 2, 3)),
        "conv_kernel": draw.randint(2, 5),
        "time_step_rank": draw.choice(("auto", 3)),
    } | draw_flag(draw, "use_bias", "use_conv_bias", "tie_word_embeddings")  # fmt: skip


def draw_jamba(draw: Draw) -> dict[str, Any]:
    periods = {
        "attn_layer_period": 3,
        "attn_layer_offset": draw.randint(0, 2),
        "expert_layer_period": 2,
    }
    experts = {
        "num_experts": draw.choice((1, 4)),
        "num_experts_per_tok": 1,
        "expert_layer_offset": draw.randint(0, 1),
    }
    mamba = {
        "mamba_d_state": draw.randint(2, 9),
        "mamba_expand": draw.choice((1, 2)),
        "mamba_d_conv": 3,
    }
    mamba["num_hidden_layers"] = draw.randint(3, 6)
    return (
        draw_decoder(draw)
        | periods
        | experts
        | mamba
        | draw_flag(draw, "mamba_conv_bias", "mamba_proj_bias")
    )


def draw_experts(draw: Draw, **names: int) -> dict[str, Any]:
    return draw_decoder(draw) | draw_flag(draw, "attention_bias") | names


def draw_llama4(draw: Draw) -> dict[str, Any]:
    return draw_experts(draw, num_local_experts=4, num_experts_per_tok=1) | {
        "num_hidden_layers": 5, "head_dim": 2 * draw.randint(1, 9),
        "intermediate_size_mlp": draw.randint(7, 90), "attention_chunk_size": 3,
        "interleave_moe_layer_step": draw.choice((1, 2)),
    }  # fmt: skip


def draw_lfm2(draw: Draw) -> dict[str, Any]:
    return draw_decoder(draw) | draw_flag(draw, "conv_bias", "block_auto_adjust_ff_dim") | {
        "num_hidden_layers": 4, "full_attn_idxs": [1, 3], "conv_L_cache": draw.randint(2, 4),
        "block_multiple_of": draw.choice((1, 8)),
        "block_ffn_dim_multiplier": draw.choice((1.0, 1.3)),
    }  # fmt: skip


def draw_modernbert(draw: Draw) -> dict[str, Any]:
    flags = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
    values = draw_decoder(draw) | draw_flag(draw, *flags)
    del values["num_key_value_heads"]
    special = {"cls_token_id": 1, "sep_token_id": 2, "tie_word_embeddings": True}
    return values | special | {"local_attention": 4}


def draw_gemma4(draw: Draw) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    experts = {"enable_moe_block": draw.random() < 0.5, "num_experts": 4, "top_k_experts": 2}
    flags = draw_flag(draw, "attention_bias", "use_double_wide_mlp", "attention_k_eq_v")
    return draw_decoder(draw) | experts | flags | {
        "num_hidden_layers": 4, "layer_types": kinds, "head_dim": 2 * draw.randint(1, 9),
        "global_head_dim": 8 * draw.randint(1, 3), "num_global_key_value_heads": 1,
        "moe_intermediate_size": 9, "hidden_size_per_layer_input": draw.choice((0, 6)),
        "vocab_size_per_layer_input": 300, "num_kv_shared_layers": draw.choice((0, 2)),
        "sliding_window": 4, "tie_word_embeddings": True,
    }  # fmt: skip


def draw_esm(draw: Draw) -> dict[str, Any]:
    values = draw_decoder(draw) | draw_flag(draw, "emb_layer_norm_before")
    del values["num_key_value_heads"]
    kind = draw.choice(("rotary", "absolute"))
    return values | {"position_embedding_type": kind, "mask_token_id": 3, "pad_token_id": 1}


FAMILIES: dict[str, tuple[str, Any]] = {
    "gemma4_text": ("Gemma4ForCausalLM", draw_gemma4),
    "esm": ("EsmForMaskedLM", draw_esm),
    "apertus": (
        "ApertusForCausalLM",
        lambda d: draw_decoder(d) | draw_flag(d, "attention_bias"),
    ),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1ForCausalLM",
        lambda d: draw_experts(d) | {"head_dim": 10},
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1ForCausalLM",
        lambda d: draw_experts(d) | {"head_dim": 10, "num_experts": 4, "moe_topk": 2},
    ),
    "llama4_text": ("Llama4ForCausalLM", draw_llama4),
    "lfm2": ("Lfm2ForCausalLM", draw_lfm2),
    "modernbert": ("ModernBertForMaskedLM", draw_modernbert),
    "phi3": ("Phi3ForCausalLM", lambda d: draw_decoder(d) | draw_window(d)),
    "cohere": (
        "CohereForCausalLM",
        lambda d: draw_decoder(d) | draw_flag(d, "attention_bias", "use_qk_norm"),
    ),
    "ministral3": (
        "Ministral3ForCausalLM",
        lambda d: draw_decoder(d) | draw_window(d) | {"head_dim": 8},
    ),
    "mt5": ("MT5ForConditionalGeneration", draw_mt5),
    "mamba": ("MambaForCausalLM", draw_mamba),
    "jamba": ("JambaForCausalLM", draw_jamba),
}
SCANS = {"mamba", "jamba"}
SHORT_CONVOLUTIONS = {"lfm2"}
SEQUENCES, LENGTH = 2, 7


def build_oracle(name: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """The config of transformers with random sizes, and the values of its config.json."""
    config = transformers.AutoConfig.for_model(name, **FAMILIES[name][1](random.Random(seed)))
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # grouped products are not counted
    return config, json.loads(config.to_json_string(use_diff=False))


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_equal_those_of_the_class_on_random_sizes(name: str) -> None:
    for seed in range(3):
        config, values = build_oracle(name, seed)
        with torch.device("meta"):
            model = getattr(transformers, FAMILIES[name][0])(config)
        model.tie_weights()
        counted = build_counted_model(values, "config.json")
        result = estimate_counted_model(counted, 1, 8, None).parameters
        assert result.total == sum(one.numel() for one in model.parameters()), (seed, values)
        assert sum(result.by_component.values()) == result.total >= result.active.all


@pytest.mark.parametrize("name", FAMILIES)
def test_operations_equal_those_that_torch_counts(name: str) -> None:
    config, values = build_oracle(name, 1)
    model = getattr(transformers, FAMILIES[name][0])(config).eval()
    tokens = torch.full((SEQUENCES, LENGTH), 5)
    inputs = {"input_ids": tokens, "use_cache": False} | (
        {"decoder_input_ids": tokens[:, :5]} if name == "mt5" else {}
    )
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs)
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    ours = build_counted_model(values, "config.json")
    length = 5 if name == "mt5" else LENGTH
    linear = ours.count_linear_flops(SEQUENCES * length, SEQUENCES * LENGTH)
    attention = SEQUENCES * ours.count_attention_flops(length, LENGTH, full=True)
    if name == "llama4_text":  # the class multiplies every token with every expert
        linear = replace(ours, visits=ours.experts).count_linear_flops(SEQUENCES * LENGTH, 0)
    if name not in SCANS | SHORT_CONVOLUTIONS:
        assert linear + attention == sum(counts.values())
        return
    # The scans are plain sums in transformers, which FlopCounterMode does not see, or chunks that
    # do more than needed. Its convolutions run over the padding too.
    convolutions = sum(row.elements_per_vector for row in ours.rows if "conv1d.weight" in row.name)
    assert linear - 2 * SEQUENCES * LENGTH * convolutions == counts["aten.mm"] + counts.get(
        "aten.addmm", 0
    )
    assert (ours.scan > 0) == (name in SCANS)
    if name in SHORT_CONVOLUTIONS:
        assert attention == counts["aten.bmm"]


def test_the_types_that_are_counted_are_those_that_are_refused_elsewhere() -> None:
    assert set(COUNTED_FAMILIES) == COUNTED_TYPES == set(FAMILIES)


# A file always has it, and the class has no default.
NEEDED = {"esm": {"vocab_size": 33}}


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_are_those_of_transformers(name: str) -> None:
    needed = NEEDED.get(name, {})
    config = transformers.AutoConfig.for_model(name, **needed)
    written = json.loads(config.to_json_string(use_diff=False))
    for key, value in COUNTED_FAMILIES[name].defaults.items():
        if key in written and value not in (None, "auto"):
            assert written[key] == value, key
    # A config.json that says nothing has the defaults, also those that the class works out.
    full, empty = (
        build_counted_model(one, "x") for one in (written, needed | {"model_type": name})
    )
    assert full.rows == empty.rows
    assert full.attention == empty.attention


# Total parameters as transformers' classes have them on published sizes.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "jamba": ({}, 51_570_323_328),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    changes, total = PUBLISHED[name]
    model = build_counted_model({"model_type": name, **changes}, "config.json")
    assert sum(row.num_elements for row in model.rows) == total


def test_estimate_counts_a_folder_and_others_refuse_it(tmp_path, capsys) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "apertus", "num_hidden_layers": 2})
    )
    words = ["estimate", str(tmp_path), "batch.sequence_length=8192", "batch.sequences=3"]
    assert main([*words, "--explain", "--json"]) == 0
    schema = Draft202012Validator(build_schema("estimate-counted"))
    printed = json.loads(capsys.readouterr().out)
    assert [error.message for error in schema.iter_errors(printed)] == []
    assert not schema.is_valid(printed | {"surprise": 1})
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["batch"]["tokens"] == 3 * 8192
    assert result["weights_bytes"]["bf16"] == 2 * result["parameters"]["total"]
    assert main(["estimate", str(tmp_path), "--explain"]) == 0
    text = capsys.readouterr().out
    assert "weights in int4" in text
    assert "layers.{0..1}.self_attn.q_proj.weight" in text
    assert main(["estimate", str(tmp_path), "--device", "h100-sxm"]) == 2
    assert "--device: apertus is counted and not priced" in capsys.readouterr().err
    assert main(["show", str(tmp_path)]) == 2
    assert (
        "'apertus' can be counted and not built: use llmsys estimate. Known: arcee"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": 10**20}, "hidden_size: 100000000000000000000 is not a size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0 is not a size. Use a whole number from 1"),
        (
            {"num_key_value_heads": 5},
            "num_key_value_heads: 5 does not divide num_attention_heads=32",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types: has 1 entries for 34 layers"),
        (
            {"hiden_size": 3},
            "hiden_size: unknown field, which may change the computation. Did you mean "
            "hidden_size?",
        ),
    ],
)
def test_a_wrong_size_is_refused(values: dict[str, Any], message: str, tmp_path, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ministral3", **values}))
    assert main(["estimate", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_kimi_k2_is_deepseek_v3_under_another_name() -> None:
    from llmsys.config.loading.load import build_model_config

    sizes: dict[str, float] = {
        "num_attention_heads": 64,
        "n_routed_experts": 384,
        "first_k_dense_replace": 1,
        "n_group": 1,
    }
    sizes |= {
        "topk_group": 1,
        "vocab_size": 163840,
        "routed_scaling_factor": 2.827,
        "num_key_value_heads": 64,
    }
    sizes |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "q_lora_rank": 1536}
    kimi = build_model_config(
        {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], **sizes}
    )
    # The published files have 23,040 more: the biases of balancing, which are no parameters here as
    # in deepseek_v3.
    assert count_parameters(kimi).total == 1_026_408_209_408


def test_the_reader_of_a_family_is_listed_with_its_keys() -> None:
    for family in COUNTED_FAMILIES.values():
        assert not set(family.ignored.split()) & set(family.defaults)
        assert inspect.getdoc(family.build)
