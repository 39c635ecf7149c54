"""Laws of the counts: parts sum to totals, a token meets what it visits, rules of thumb say how
wrong they are.
"""

from collections import Counter
from typing import Any, Literal

import pytest

from llmsys.config.batch import BatchConfig
from llmsys.config.feed_forward import SwigluConfig
from llmsys.config.model import ModelConfig
from llmsys.config.module_tensors import ParameterTensor
from llmsys.config.run import RunConfig
from llmsys.estimate.model_tensors import count_parameters, list_model_tensors
from llmsys.estimate.run_estimate import list_tensor_counts
from tests.helpers.model_sections import MOE, SHAPE, VARIANTS
from tests.helpers.tensor_names import list_parameter_names


def _name_layer(config: ModelConfig, layer: int) -> str:
    kind = "moe" if config.is_moe_layer(layer) else "dense"
    if layer in config.embedding.value_layers:
        return f"{kind}_values"
    match config.get_layer_type(layer), config.has_feed_forward(layer):
        case "feed_forward", _:
            return f"{kind}_feed_forward"
        case "linear_attention", False:
            return "linear_attention"
        case "hybrid", False:
            return "hybrid_attention"
        case _, False:
            return "attention"
        case "linear_attention", _:
            return f"{kind}_linear"
        case "hybrid", _:
            return f"{kind}_hybrid"
    return kind


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_parts_sum_to_the_total(changes: dict[str, Any]) -> None:
    config = ModelConfig.model_validate(SHAPE | changes)
    counts = count_parameters(config)
    layers = Counter(_name_layer(config, layer) for layer in range(config.num_hidden_layers)) | {
        "encoder": config.encoder_model.num_hidden_layers,
        "multi_token_prediction": config.multi_token_prediction.depth
        if config.multi_token_prediction
        else 0,
    }
    if config.recurrence is not None:  # all layers share one block
        layers = {kind: min(count, 1) for kind, count in layers.items()}
    in_blocks = sum(count * layers[kind] for kind, count in counts.per_layer.items())
    outside = sum(row.num_elements for row in list_model_tensors(config) if not row.layers)
    assert sum(counts.by_component.values()) == counts.total == in_blocks + outside
    scope: Literal["window", "document"] = "window" if config.mixes_documents else "document"
    run = RunConfig(model=config, batch=BatchConfig(sequence_length=16, attention_scope=scope))
    assert sum(one.count for one in list_tensor_counts(run)) == counts.total


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_every_name_stands_once(changes: dict[str, Any]) -> None:
    names = [
        name
        for row in list_model_tensors(ModelConfig.model_validate(SHAPE | changes))
        for name in list_parameter_names(row)
    ]
    assert len(names) == len(set(names))


def test_a_token_meets_the_chosen_experts_only() -> None:
    config = ModelConfig.model_validate(SHAPE | {"moe": MOE})
    counts = count_parameters(config)
    one_expert = 3 * config.hidden_size * 16
    assert counts.total - counts.active.all == (6 - 2) * one_expert * config.num_hidden_layers
    everyone = count_parameters(
        ModelConfig.model_validate(SHAPE | {"moe": MOE | {"num_experts_per_tok": 6}})
    )
    assert everyone.active.all == everyone.total


def test_a_tied_embedding_stays_active_as_the_head() -> None:
    tied = count_parameters(ModelConfig.model_validate(SHAPE | {"tie_word_embeddings": True}))
    loose = count_parameters(ModelConfig.model_validate(SHAPE))
    assert (
        tied.active.without_input_embedding
        == tied.active.all
        == loose.active.without_input_embedding
    )
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
    swiglu = count_parameters(gpt.model_copy(update={"feed_forward": SwigluConfig()}))
    assert swiglu.textbook[1].error < -0.2


def test_expert_choice_visits_its_factor_on_average() -> None:
    chosen = {"moe": MOE | {"routing": {"kind": "expert_choice", "factor": 1.5}}}
    counts = count_parameters(ModelConfig.model_validate(SHAPE | chosen))
    assert counts.total - counts.active.all == 4.5 * 3 * 24 * 16 * 3


@pytest.mark.parametrize(
    ("layers", "title"),
    [
        ((3,), "a.3.b"),
        ((0, 1, 2), "a.{0..2}.b"),
        ((1, 3, 5), "a.{1..5..2}.b"),
        ((0, 2, 3, 4, 9), "a.{0,2..4,9}.b"),
        ((), "a.{i}.b"),
    ],
    ids=str,
)
def test_titles_name_their_blocks(layers: tuple[int, ...], title: str) -> None:
    assert ParameterTensor("a.{i}.b", (2, 3), "norms", layers).display_name == title
