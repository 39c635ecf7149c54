"""Lists of layers and factors on projections that fit no model are refused with the value, the rule
and the next step.
"""

from typing import Any

import pytest
from pydantic import ValidationError

from llmsys.config.model import ModelConfig
from tests.helpers.model_sections import DUAL, KIMI, LATENT, MOE, SHAPE

SINGLE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "feed_forward"],
    "feed_forward_layers": [False, True],
}
KEYS = {"multipliers": {"attention": {"k_proj": 0.5}}}
GATES = {"multipliers": {"linear_attention": {"g_proj": 0.5}}}
OUTPUTS = {"multipliers": {"feed_forward": {"down_proj": 0.5}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            SINGLE | {"feed_forward_layers": [True, False]},
            "layer 1 of type feed_forward has none. Set its entry to true, or give the layer",
        ),
        (
            SINGLE | {"layer_types": ["feed_forward"], "feed_forward_layers": []},
            "no layer mixes positions. Add full_attention or linear_attention.",
        ),
        (
            SINGLE | {"feed_forward_layers": [True] * 5},
            "feed_forward_layers: 5 entries for num_hidden_layers=4. Give 4, or a shorter list",
        ),
        (
            SINGLE | {"residual": {"kind": "parallel"}},
            "residual.kind: it is not proven with layers",
        ),
        (
            SINGLE | {"multi_token_prediction": {"depth": 1}},
            "multi_token_prediction: it is not proven with layers that lack a sub-layer. Use null.",
        ),
        (SINGLE | {"family": "encoder", "head": {"kind": "mlm"}}, "family: it is not proven"),
        (
            SINGLE | {"parametrization": {"kind": "mup", "base_hidden_size": 12}},
            "parametrization.kind: it is not proven",
        ),
        (
            {"layer_types": ["hybrid"]},
            "layers of linear attention, but the section is missing. Set linear_attention.kind=",
        ),
        (
            KEYS | {"attention": LATENT, "num_key_value_heads": 4},
            "multipliers.attention.k_proj: 0.5 has no effect: attention.kind=latent has other",
        ),
        (GATES, "multipliers.linear_attention.g_proj: 0.5 has no effect: no layer has linear"),
        (GATES | KIMI, "linear_attention.kind=kimi_delta has other projections. Leave it out."),
        (OUTPUTS | {"moe": MOE}, "it is proven with dense feed-forwards that are built in."),
        (
            {"feed_forward": {"kind": "relu"}}
            | {"multipliers": {"feed_forward": {"gate_proj": 0.5}}},
            "multipliers.feed_forward.gate_proj: 0.5 has no effect: the feed-forward has no gate",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:30],
)
def test_a_model_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ModelConfig.model_validate(SHAPE | changes)
    assert message in str(refused.value)


def test_layers_count_by_what_they_have() -> None:
    model = ModelConfig.model_validate(
        SHAPE
        | DUAL
        | {"num_hidden_layers": 7, "moe": MOE | {"dense_layers": [1, 4]}}
        | {"layer_types": ["hybrid", "feed_forward", "full_attention"]}
        | {"feed_forward_layers": [False, True, True]}
    )
    assert model.linear_layers == [0, 3, 6]
    assert model.num_attention_layers == 5
    # Layers 0, 3 and 6 have no feed-forward.
    assert model.moe_layers == [n for n in range(7) if model.is_moe_layer(n)] == [2, 5]
    assert model.num_dense_layers == 2
    assert model.num_branches == 5 + 4


def test_norms_stand_before_the_branches_of_linear_attention_alone() -> None:
    residual = {"kind": "output", "linear_layers": "pre"}
    model = ModelConfig.model_validate(SHAPE | DUAL | {"residual": residual})
    assert [model.get_residual(layer).kind for layer in range(4)] == ["pre", "output"] * 2
