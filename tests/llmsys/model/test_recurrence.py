"""Positions that halt by themselves: the ponder cost, its gradient and the mean depth; and what
cannot repeat.

Outputs and gradients are compared with the formulas in test_matches_reference.py, caches in
test_kv_cache.py.
"""

import math

import pytest
import torch

from llmsys.config.model import ModelConfig
from llmsys.config.run import RunConfig
from llmsys.model.forward_context import ForwardContext
from llmsys.model.recurrence import AdaptiveRecurrence
from llmsys.model.transformer import Transformer
from llmsys.train.expert_load import measure_mean_depth
from tests.helpers.model_choices import ARCHITECTURES
from tests.helpers.tiny_model import build_tiny_config, build_tiny_model, build_tiny_tokens

WEIGHT, THRESHOLD, STEPS = 0.5, 0.9, 4
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, -1, -1], [0, 0, 0, 0, 0, 0, -1]])  # padding is negative
REAL = 11


def build_model(probability: float) -> Transformer:
    """A model in which every position has one halting probability in every step."""
    model = build_tiny_model(build_tiny_config(**ARCHITECTURES["universal, adaptive"])).train()
    halting = model.get_submodule("recurrence.halting")
    with torch.no_grad():
        halting.weight.zero_()
        halting.bias.fill_(math.log(probability / (1 - probability)))
    return model


# Steps n and remainder R of Graves 2016, equations 6 to 8: the first n with n · p > 0.9, at most 4,
# and 1 - (n - 1) p.
@pytest.mark.parametrize(
    ("probability", "steps"), [(0.95, 1), (0.5, 2), (0.4, 3), (0.29, 4), (0.1, 4)]
)
def test_ponder_cost_is_steps_and_remainder_of_real_tokens(probability: float, steps: int) -> None:
    model = build_model(probability)
    model(build_tiny_tokens(), documents_BT=DOCUMENTS)
    [layer] = model.list_auxiliary_layers()
    cost = steps + 1 - (steps - 1) * probability
    total = layer.sum_auxiliary_losses()
    assert total.item() == pytest.approx(WEIGHT * REAL * cost)
    assert model.compute_auxiliary_loss().item() == pytest.approx(WEIGHT * cost)
    share = model.compute_auxiliary_share(torch.tensor(2 * REAL), torch.tensor(0))
    assert share.item() == pytest.approx(WEIGHT * cost / 2)
    total.backward()
    bias = model.get_submodule("recurrence.halting").bias
    slope = -WEIGHT * REAL * (steps - 1) * probability * (1 - probability)
    assert float(bias.grad) == pytest.approx(slope, abs=1e-6)  # type: ignore[arg-type]
    assert {name: float(depth) for name, depth in measure_mean_depth(model).items()} == {
        "mean_depth": steps
    }
    assert float(measure_mean_depth(model)["mean_depth"]) == 0, "the counts of the step are reset"


def test_what_runs_on_reads_the_state_in_which_another_position_halted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recurrence = build_model(0.5).get_submodule("recurrence").eval()
    assert isinstance(recurrence, AdaptiveRecurrence)
    width = recurrence.halting.in_features
    monkeypatch.setattr(recurrence, "_begin_step", lambda x_BTD, positions_BTD, step: x_BTD)
    # channel 0 decides: position 0 halts after one step, position 1 after the last
    with torch.no_grad():
        recurrence.halting.weight.zero_()
        recurrence.halting.weight[0, 0] = 100.0
        recurrence.halting.bias.zero_()
    x_BTD = torch.zeros(1, 2, width)
    x_BTD[0, :, 0] = torch.tensor([1.0, -1.0])
    x_BTD[0, :, 1] = torch.tensor([8.0, 0.0])
    context = ForwardContext({}, torch.arange(2)[None])

    class ShareNext(torch.nn.Module):
        """Adds half of the second channel of position 0 to both positions."""

        def forward(self, state_BTD: torch.Tensor, _: ForwardContext) -> torch.Tensor:
            added_BTD = torch.zeros_like(state_BTD)
            added_BTD[..., 1] = state_BTD[:, :1, 1] / 2
            return state_BTD + added_BTD

    y_BTD = recurrence(ShareNext(), x_BTD, None, context)
    # Position 0 ends its only step with 12, and position 1 reads 8 in the first step and 12 in each
    # later one.
    expected = [12.0, 4.0 + (recurrence.num_steps - 1) * 6.0]
    assert y_BTD[0, :, 1].tolist() == pytest.approx(expected)


def test_depth_is_counted_by_stack_and_in_training_alone() -> None:
    config = build_tiny_config(**ARCHITECTURES["universal"])
    model, source = build_tiny_model(config), {"source_BS": build_tiny_tokens(2, 5)}
    model.eval()(build_tiny_tokens(), **source)
    assert [float(depth) for depth in measure_mean_depth(model).values()] == [0, 0]
    model.train()(build_tiny_tokens(), **source)
    found = measure_mean_depth(model)
    assert 1 <= float(found["mean_depth"]) <= 3
    assert 1 <= float(found["encoder_mean_depth"]) <= 4
    assert measure_mean_depth(build_tiny_model(build_tiny_config())) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}}, "moe"),
        ({"multi_token_prediction": {"depth": 1}}, "multi_token_prediction"),
        (
            {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
            "layer_types",
        ),
        ({"position": {"kind": "rope", "layers": [True, False]}}, "position.layers"),
    ],
)
def test_layers_that_differ_cannot_be_one_block(changes: dict[str, object], message: str) -> None:
    with pytest.raises(
        ValueError, match=f"recurrence=fixed repeats one block. Leave {message} out"
    ):
        build_tiny_config(recurrence={"kind": "fixed"}, **changes)


def test_steps_need_an_even_width() -> None:
    values = {
        "recurrence": {"kind": "fixed"},
        "hidden_size": 15,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
    }
    with pytest.raises(
        ValueError, match=r"15 is odd, but the sinusoids of steps come in pairs\. Use 16"
    ):
        ModelConfig.model_validate(build_tiny_config().model_dump() | values | {"head_dim": 4})


def test_zero_3_cannot_repeat_a_block() -> None:
    values = {
        "model": build_tiny_config(recurrence={"kind": "fixed"}),
        "engine": {"kind": "deepspeed", "zero_stage": 3},
    }
    with pytest.raises(
        ValueError, match=r"recurrence\.kind=fixed repeats one\. Use zero_stage=2, or engine"
    ):
        RunConfig.model_validate(values)
    allowed = {"engine": {"kind": "deepspeed", "zero_stage": 2}, "batch": {"sequence_length": 64}}
    RunConfig.model_validate(values | allowed)
