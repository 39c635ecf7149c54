"""Counts of published models, to the last parameter, against what was counted on their own
implementations.
"""

import json
from typing import Any

import pytest

from llmsys.config.loading.load import build_model_config, load_model_config
from llmsys.config.model import ModelConfig
from llmsys.estimate.model_tensors import ParameterCounts, count_parameters
from tests.helpers.paths import TEST_DATA

DATA = TEST_DATA / "estimate"
COUNTED: dict[str, dict[str, Any]] = {
    row["id"]: row for row in json.loads((DATA / "counted_parameters.json").read_text())
}
CONFIGS: dict[str, dict[str, Any]] = json.loads((DATA / "hugging_face_configs.json").read_text())
TRAPS: dict[str, dict[str, Any]] = json.loads((DATA / "trap_models.json").read_text())
COMPONENT_OF = {
    "embedding_in": "embedding",
    "position_or_type": "positions",
    "attn": "attention",
    "rel_pos": "attention",
    "mlp": "feed_forward",
    "routed_experts": "experts",
    "norm": "norms",
    "embedding_out": "head",
    "lm_head_bias": "head_bias",
    "pooler_or_head": "head_other",
}


def by_component(row: dict[str, Any]) -> dict[str, int]:
    """The row's components under our names."""
    counts: dict[str, int] = {}
    for name, count in row["by_component"].items():
        ours = COMPONENT_OF.get(name, name)
        counts[ours] = counts.get(ours, 0) + count
    return {name: count for name, count in counts.items() if count}


def agrees(counts: ParameterCounts, row: dict[str, Any]) -> None:
    assert counts.total == row["total"]
    assert counts.non_embedding == row["non_embedding"]
    assert counts.by_component == by_component(row)
    assert {name: getattr(counts.active, name) for name in row["active"]} == row["active"]


@pytest.mark.parametrize("name", COUNTED)
def test_named_models_are_counted_to_the_last_parameter(name: str) -> None:
    agrees(count_parameters(load_model_config(f"model/{name}")), COUNTED[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_models_from_hugging_face_are_counted_to_the_last_parameter(name: str) -> None:
    agrees(count_parameters(build_model_config(CONFIGS[name])), COUNTED[name])


@pytest.mark.parametrize("name", TRAPS)
def test_models_written_by_hand_are_counted_to_the_last_parameter(name: str) -> None:
    agrees(count_parameters(ModelConfig.model_validate(TRAPS[name])), COUNTED[name])


def test_prediction_modules_come_on_top() -> None:
    plain = count_parameters(ModelConfig.model_validate(TRAPS["deepseek-v3"]))
    more = count_parameters(
        ModelConfig.model_validate(TRAPS["deepseek-v3"] | {"multi_token_prediction": {}})
    )
    module = COUNTED["deepseek-v3"]["prediction_module"]
    assert (
        more.by_component["multi_token_prediction"]
        == more.per_layer["multi_token_prediction"]
        == module
    )
    assert more.total == plain.total + module == 682_636_472_320
