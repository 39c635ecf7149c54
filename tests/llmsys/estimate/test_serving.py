"""Serving: published sizes of caches, what transformers keeps and torch counts, and laws of time
and cost.
"""

import json
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from llmsys.config.loading.load import build_model_config, load_model_config
from llmsys.config.serving import ServingConfig
from llmsys.estimate.cluster_costs import ClusterCosts
from llmsys.estimate.device_profile import load_device_profile
from llmsys.estimate.model_tensors import count_parameters
from llmsys.estimate.serving import ServingBench, estimate_serving
from llmsys.estimate.serving_memory import (
    count_cached_values,
    estimate_serving_memory,
    find_largest_batch,
)
from llmsys.estimate.serving_output import TimedServingOutput
from llmsys.launch.main import main

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
H100 = load_device_profile("h100-sxm")


def serve(name: str = "model/llama3.1-8b", gpus: int = 1, **load: object) -> TimedServingOutput:
    model, config = load_model_config(name), ServingConfig.model_validate(load)
    result = estimate_serving(model, config, H100, ClusterCosts(), gpus)
    assert isinstance(result, TimedServingOutput)
    return result


# DeepSeek-AI 2025, arXiv:2505.09343, table 1: bytes of cached keys and values of one token in bf16.
@pytest.mark.parametrize(("name", "size"), [("deepseek-v3", 70_272), ("llama3.1-405b", 516_096)])
def test_a_cached_token_has_its_published_size(name: str, size: int) -> None:
    assert 2 * count_cached_values(load_model_config(f"model/{name}"), ServingConfig(), 1) == size


@pytest.mark.parametrize("window", [None, 5])
def test_cached_values_and_operations_are_those_of_transformers(window: int | None) -> None:
    values = LLAMA | ({"model_type": "mistral", "sliding_window": window} if window else {})
    config = transformers.AutoConfig.for_model(**values)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    prompt = torch.full((1, 8), 5)
    ours, load = build_model_config(values), ServingConfig(prompt=8, output=2)
    with torch.no_grad():
        with FlopCounterMode(display=False) as counter:
            out = model(prompt, use_cache=True, logits_to_keep=1)
        prompt_flops = counter.get_total_flops()
        # transformers keeps one position less than the window between two steps
        kept = sum(
            layer.keys.numel() + layer.values.numel() for layer in out.past_key_values.layers
        )
        assert kept == count_cached_values(ours, load, 8 if window is None else window - 1)
        with FlopCounterMode(display=False) as counter:
            model(prompt[:, :1], past_key_values=out.past_key_values, use_cache=True)
    bench = ServingBench(ours, load, H100, 1)
    assert bench.count_token_flops() == counter.get_total_flops()
    if window is None:  # torch counts all of s², a prompt needs the half that is visible
        masked = 3 * 4 * 24 * (8 * 8 - 8 * 9 // 2)
        assert bench.count_prompt_flops() == prompt_flops - masked


def test_memory_is_weights_and_cache_divided_by_devices() -> None:
    model = load_model_config("model/llama3.1-8b")
    load = ServingConfig(batch=4, prompt=1000, output=24)
    one, four = (estimate_serving_memory(model, load, gpus) for gpus in (1, 4))
    assert one.weights == 2 * count_parameters(model).total
    assert one.cache == 4 * 1024 * 32 * 2 * 8 * 128 * 2
    assert four.cache == one.cache / 4
    assert four.weights == pytest.approx(one.weights / 4, rel=1e-3), "norms are on every device"
    small = estimate_serving_memory(
        model, load.model_copy(update={"weights": "int4", "cache": "fp8"}), 1
    )
    assert small.cache == one.cache / 2
    tables = 2 * 2 * 128256 * 4096
    assert small.weights == pytest.approx(tables + (one.weights - tables) * 4.125 / 16, rel=1e-3)


def test_the_largest_batch_is_the_last_that_fits() -> None:
    model, load = load_model_config("model/llama3.1-8b"), ServingConfig(prompt=4096, output=512)
    most = find_largest_batch(model, load, H100, 1)
    for batch, fits in ((most, True), (most + 1, False)):
        assert serve(batch=batch, prompt=4096, output=512).fits is fits
    assert find_largest_batch(load_model_config("model/llama3.1-70b"), load, H100, 1) == 0
    assert find_largest_batch(load_model_config("model/llama3.1-70b"), load, H100, 4) > 0


def test_time_and_cost_follow_the_load() -> None:
    one, many = serve(batch=1), serve(batch=64)
    assert many.tokens_per_second.decoding > 20 * one.tokens_per_second.decoding, (
        "weights are read once"
    )
    assert many.tokens_per_second.one_request < one.tokens_per_second.one_request
    assert many.money.per_million_output_tokens < one.money.per_million_output_tokens / 20
    # A step cannot be faster than reading the weights at the peak of the memory.
    assert one.step_seconds > 2 * 7.5e9 / 3.35e12
    assert serve(batch=1, weights="int4").step_seconds < 0.6 * one.step_seconds
    assert serve(batch=64, prompt=16384).step_seconds > many.step_seconds
    assert serve(batch=1, gpus=4).step_seconds < one.step_seconds
    assert serve(prompt=8192).first_token_seconds > 4 * serve(prompt=2048).first_token_seconds
    seconds = 64 * many.first_token_seconds + 256 * many.step_seconds
    assert many.money.per_million_tokens == pytest.approx(
        2.5 / 3600 * seconds * 1e6 / (64 * (1024 + 256))
    )
    # A few requests visit a few experts, many visit all of them.
    mixture = {batch: serve("model/mixtral-8x7b", 2, batch=batch).step_seconds for batch in (1, 64)}
    assert mixture[64] > 2 * mixture[1]


def test_the_command_prints_what_the_function_returns(capsys) -> None:
    words = ["estimate", "model/llama3.1-8b", "--serve", "batch=8,prompt=512,output=64"]
    assert main([*words, "--device", "h100-sxm", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == serve(batch=8, prompt=512, output=64).model_dump()
    assert main([*words, "--device", "h100-sxm", "--price-per-hour", "4"]) == 0
    text = capsys.readouterr().out
    for title in (
        "first token",
        "tokens per second",
        "million output tokens",
        "at 4 per accelerator-hour",
    ):
        assert title in text
    assert main(words) == 0
    assert "time and cost: unknown (need a device: --device NAME)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "words", "message"),
    [
        ("model/bert-base", ["--serve", "batch=2"], "family=encoder generates no tokens"),
        ("model/lstm-seq2seq", ["--serve", "batch=2"], "lstm has no known cache"),
        ("model/deepseek-v3", ["attention.sparse={}", "--serve", "batch=2"],
            "attention.sparse keeps keys of an indexer and reads those that it chooses"),
        ("model/deepseek-v3", ["attention.sparse={}", "--finetune", "rank=4"],
            "--finetune: attention.sparse has a loss of its own"),
        ("model/llama3.1-8b", ["--serve", "batch=0"], "batch"),
        ("model/llama3.1-8b", ["--serve", "batches=3"],
            "batches: unknown key. Did you mean batch?"),
        ("model/llama3.1-8b", ["--serve", "batch=2", "--device", "h100-sxm", "--gpus", "5"],
            "5 devices do not divide"),
        ("model/gpt2-small", ["--serve", "prompt=1000,output=100"], "but positions are learned up "
        "to 1024"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused(config, words, message, capsys) -> None:
    assert main(["estimate", config, *words]) == 2
    assert message in capsys.readouterr().err
