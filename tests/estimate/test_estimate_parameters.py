"""Counts equal published models to the last parameter, and the built module tensor by tensor."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from llmsys.config.model import ModelConfig
from llmsys.config.run import RunConfig
from llmsys.estimate.ledger import tensor_ledger
from llmsys.estimate.parameters import count_parameters
from llmsys.estimate.tensors import model_tensors
from llmsys.model.transformer import Transformer

PUBLISHED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "published_parameters.json").read_text())
SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"tie_word_embeddings": True},
    "own head width": {"head_dim": 10},
    "multi-query": {"num_key_value_heads": 1},
    "layernorm gelu": {"norm": {"kind": "layernorm"}, "feed_forward": {"kind": "gelu"}, "position": {"kind": "none"}},
    "relu": {"feed_forward": {"kind": "relu"}},
    "experts": {"moe": MOE},
    "experts without a dense width": {"moe": MOE, "intermediate_size": 0},
    "experts balanced by a loss": {"moe": {**MOE, "balance": {"kind": "auxiliary_loss"}, "score": "sigmoid"}},
    "shared experts, dense first, tied": {
        "moe": {**MOE, "num_shared_experts": 2, "first_dense_layers": 1},
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["id"])
def test_published_models_are_counted_to_the_last_parameter(row: dict[str, Any]) -> None:
    counts = count_parameters(ModelConfig.model_validate(row["model"]))
    assert counts.total == row["total"]
    assert counts.non_embedding == row["non_embedding"]
    assert counts.by_component == row["by_component"]
    assert {name: getattr(counts.active, name) for name in row["active"]} == row["active"]


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_every_tensor_is_one_of_the_built_module(changes: dict[str, Any]) -> None:
    config = ModelConfig.model_validate(SHAPE | changes)
    with torch.device("meta"):
        built = {name: tuple(parameter.shape) for name, parameter in Transformer(config).named_parameters()}
    assert {name: row.shape for row in model_tensors(config) for name in row.names()} == built


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_parts_sum_to_the_total(changes: dict[str, Any]) -> None:
    config = ModelConfig.model_validate(SHAPE | changes)
    counts = count_parameters(config)
    layers = {"dense": config.num_dense_layers, "moe": config.num_moe_layers}
    in_blocks = sum(count * layers[kind] for kind, count in counts.per_layer.items())
    outside = counts.by_component["embedding"] + counts.by_component.get("head", 0)
    last_norm = sum(row.count for row in model_tensors(config) if row.name.startswith("norm."))
    assert sum(counts.by_component.values()) == counts.total == in_blocks + last_norm + outside
    assert sum(one["count"] for one in tensor_ledger(RunConfig(model=config))) == counts.total


def test_a_token_meets_the_chosen_experts_only() -> None:
    config = ModelConfig.model_validate(SHAPE | {"moe": MOE})
    counts = count_parameters(config)
    one_expert = 3 * config.hidden_size * 16
    assert counts.total - counts.active.all == (6 - 2) * one_expert * config.num_hidden_layers
    everyone = count_parameters(ModelConfig.model_validate(SHAPE | {"moe": MOE | {"num_experts_per_tok": 6}}))
    assert everyone.active.all == everyone.total


def test_a_tied_embedding_stays_active_as_the_head() -> None:
    tied = count_parameters(ModelConfig.model_validate(SHAPE | {"tie_word_embeddings": True}))
    loose = count_parameters(ModelConfig.model_validate(SHAPE))
    assert tied.active.without_input_embedding == tied.active.all == loose.active.without_input_embedding
    assert tied.active.without_embeddings == loose.active.without_embeddings == loose.non_embedding


def test_textbook_rules_print_their_error() -> None:
    gpt = ModelConfig(
        vocab_size=50257,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        feed_forward={"kind": "gelu"},
    )
    short, long = count_parameters(gpt).textbook
    assert short.value == long.value == 12 * 12 * 768**2
    assert abs(short.error) < 0.001  # the rule leaves out the norms alone
    llama = count_parameters(ModelConfig.model_validate(PUBLISHED[0]["model"]))
    assert llama.textbook[1].error < -0.12
