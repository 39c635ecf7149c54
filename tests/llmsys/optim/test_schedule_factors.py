"""Laws of factors over the run: points and lines between them, what they scale, and that 1 is no
penalty.
"""

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from llmsys.config.optimizer import AdamWConfig
from llmsys.config.run import RunConfig
from llmsys.config.schedule import MultiplierScheduleConfig, interpolate_multiplier
from llmsys.model.transformer import Transformer
from llmsys.optim.bitwise_optimizer import BitwiseOptimizer
from llmsys.optim.lr_schedule import (
    LearningRate,
    compute_balance_factor,
    compute_learning_rate,
    set_rates,
)
from llmsys.train.expert_load import set_balance_factor, update_expert_balance
from tests.helpers.tiny_training import build_sequences, build_tiny_config


def test_factors_are_lines_between_points_and_jump_where_two_meet() -> None:
    points = ((100, 1.0), (200, 0.5), (300, 0.5), (300, 0.0))
    wanted = {0: 1.0, 100: 1.0, 150: 0.75, 200: 0.5, 299: 0.5, 300: 0.0, 10**9: 0.0}
    assert {tokens: interpolate_multiplier(points, tokens) for tokens in wanted} == wanted
    assert interpolate_multiplier((), 7) == 1.0


def test_points_out_of_order_are_refused() -> None:
    with pytest.raises(
        ValidationError, match=r"(?s)balance.*: the points are at 9, 3 tokens\. Sort them"
    ):
        MultiplierScheduleConfig(balance=((9, 1.0), (3, 0.0)))


def test_factors_follow_the_tokens_of_the_run_and_belong_to_its_trajectory() -> None:
    run = RunConfig.model_validate(
        {
            "batch": {"sequence_length": 5, "sequences": 2},
            "train": {"tokens": 1000, "precision": "fp32"},
            "schedule": {"kind": "constant"},
            "factors": {"weight_decay": [[0, 1], [1000, 0]], "balance": [[500, 1], [500, 0]]},
        }
    )
    assert compute_learning_rate(run, 25).decay_share == pytest.approx(0.75)
    assert compute_learning_rate(run, 25) == run.optimizer.learning_rate
    assert [compute_balance_factor(run, step) for step in (49, 50)] == [1.0, 0.0]
    assert run.trajectory_settings["factors"]["balance"] == [[500, 1.0], [500, 0.0]]
    assert "factors" not in RunConfig().resolve_precision("fp32").trajectory_settings


def test_a_share_of_weight_decay_is_taken_and_given_back() -> None:
    weights = nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.AdamW([{"params": [weights], "weight_decay": 0.5, "rate_scale": 1.0}])
    exact = BitwiseOptimizer(
        {"weights": nn.Parameter(torch.ones(2, 2))}, AdamWConfig(weight_decay=0.5)
    )
    expected = 1.0
    for rate, share in ((LearningRate(0.1, 0.5), 0.5), (LearningRate(0.1, 0.0), 0.0), (0.1, 1.0)):
        weights.grad = torch.zeros_like(weights)
        set_rates(optimizer.param_groups, rate)
        optimizer.step()
        exact.step([torch.zeros(2, 2)], rate, 1.0)
        expected *= 1 - 0.1 * 0.5 * share
        for found in (weights, exact.named["weights"]):
            torch.testing.assert_close(found.detach(), torch.full((2, 2), expected))


@pytest.mark.parametrize("kind", ["bias", "auxiliary_loss"])
def test_balance_counts_as_often_as_its_factor_says_and_z_loss_stays(kind: str) -> None:
    def losses(factor: float) -> tuple[float, float]:
        balance = {"kind": kind} if kind == "bias" else {"kind": kind, "weight": 0.5}
        moe = {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "z_loss_weight": 0.25,
        }
        torch.manual_seed(0)
        model = Transformer(build_tiny_config(moe=moe | {"balance": balance})).train()
        set_balance_factor(model, factor)
        model(**build_sequences(0, 0, 4).to_model_inputs())
        loss = float(model.compute_auxiliary_loss().detach())
        update_expert_balance(model)
        return loss, float(
            sum(layer.balance_bias_E.abs().sum() for layer in model.list_moe_layers())
        )

    (none, still), (once, moved), (twice, far) = losses(0.0), losses(1.0), losses(2.0)
    assert still == 0.0
    if kind == "bias":
        assert none == once == twice > 0  # the z-loss alone
        assert far == pytest.approx(2 * moved)
        assert moved > 0
    else:
        assert twice - once == pytest.approx(once - none, rel=1e-4)
        assert once > none > 0
