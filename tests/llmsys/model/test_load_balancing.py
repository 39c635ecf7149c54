"""What a layer counts, and the losses that pull towards even use: the same with accumulation and
recomputation.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from llmsys.config.moe import MoeConfig
from llmsys.errors import ConfigError
from llmsys.model.load_balancing import (
    compute_load_balancing_loss,
    compute_router_z_loss,
    count_tokens_by_row,
)
from llmsys.model.moe_layer import MoELayer
from llmsys.model.router import RouterScores
from llmsys.model.transformer import Transformer
from llmsys.train.expert_load import ExpertLoadReport, update_expert_balance
from tests.helpers.tiny_model import (
    EXPERTS,
    build_tiny_config,
    build_tiny_model,
    build_tiny_moe_config,
    build_tiny_tokens,
)

LOSSES: dict[str, dict[str, Any]] = {
    "sequence": {
        "balance": {"kind": "auxiliary_loss", "weight": 0.5, "scope": "sequence"},
        "z_loss_weight": 0.1,
    },
    "batch": {"balance": {"kind": "auxiliary_loss", "weight": 0.5, "scope": "batch"}},
    "bias and sequence": {"balance": {"kind": "bias", "sequence_weight": 0.5}, "score": "sigmoid"},
}
ROUTINGS: dict[str, dict[str, Any]] = {
    "token choice": {},
    "capacity": {"routing": {"kind": "capacity", "factor": 0.7}},
    "expert choice": {"routing": {"kind": "expert_choice"}},
}


def evenness_of(probabilities: list[list[float]], shares: list[float]) -> float:
    scores = RouterScores(torch.zeros(2, 4), torch.tensor(probabilities).log())
    return (
        float(
            compute_load_balancing_loss(
                scores, torch.tensor([shares]), torch.ones(1, 2, dtype=torch.bool)
            )
        )
        / 2
    )


def test_evenness_is_one_when_even_and_counts_experts_when_collapsed() -> None:
    assert evenness_of([[0.25] * 4] * 2, [0.25] * 4) == pytest.approx(1.0)
    assert evenness_of([[1.0, 0.0, 0.0, 0.0]] * 2, [1.0, 0.0, 0.0, 0.0]) == pytest.approx(4.0)
    # Bare sigmoid scores are normalised first: lowering all of them gains nothing.
    assert evenness_of([[0.01] * 4] * 2, [0.25] * 4) == pytest.approx(1.0)


def test_padding_is_neither_counted_nor_in_a_loss() -> None:
    scores = RouterScores(torch.randn(6, 4), torch.randn(6, 4).log_softmax(-1))
    real = torch.tensor([[True, True, False], [False, True, True]])
    kept = [0, 1, 4, 5]
    trimmed = RouterScores(scores.logits_NE[kept], scores.log_scores_NE[kept])
    everything, shares = torch.ones(2, 2, dtype=torch.bool), torch.rand(2, 4)
    torch.testing.assert_close(
        compute_load_balancing_loss(scores, shares, real),
        compute_load_balancing_loss(trimmed, shares, everything),
    )
    torch.testing.assert_close(
        compute_router_z_loss(scores, real), compute_router_z_loss(trimmed, everything)
    )
    experts = torch.tensor([[0, 1], [2, -1], [3, 3], [3, 3], [1, 0], [-1, 1]])
    assert count_tokens_by_row(experts, 4, real).tolist() == [[1, 1, 1, 0], [1, 2, 0, 0]]


def test_losses_are_weighted_summed_over_layers_and_reach_the_routers_only() -> None:
    model = build_tiny_model(build_tiny_moe_config(LOSSES["sequence"]))
    assert float(model.compute_auxiliary_loss()) == 0.0
    model(build_tiny_tokens())
    loss = model.compute_auxiliary_loss()
    torch.testing.assert_close(
        loss, sum(layer.compute_auxiliary_loss() for layer in model.list_moe_layers())
    )
    loss.backward()
    last = model.list_moe_layers()[-1]
    assert last.router.weight.grad is not None
    assert last.router.weight.grad.any()
    assert all(parameter.grad is None for parameter in last.experts.parameters())
    assert float(build_tiny_model(build_tiny_moe_config()).compute_auxiliary_loss()) == 0.0


def step(model: Transformer, parts: list[Tensor]) -> tuple[ExpertLoadReport, dict[str, Tensor]]:
    """Micro-batches of one step, weighted by their tokens as engines do; the report, and all
    gradients and counts.
    """
    model.zero_grad()
    tokens = sum(part.numel() for part in parts)
    for part in parts:
        loss = model(part).square().mean(-1).sum() / tokens
        (loss + model.compute_auxiliary_loss() * part.numel() / tokens).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    # Reports are shares, in which counting everything twice would not show.
    counts = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return update_expert_balance(model).read_report(), gradients | counts


def assert_same(
    one: tuple[ExpertLoadReport, dict[str, Tensor]],
    other: tuple[ExpertLoadReport, dict[str, Tensor]],
) -> None:
    for name, value in one[0].to_dict().items():
        torch.testing.assert_close(
            torch.tensor(other[0].to_dict()[name]), torch.tensor(value), msg=name
        )
    for name, gradient in one[1].items():
        torch.testing.assert_close(other[1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS.keys())
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_reports_and_gradients_do_not_depend_on_accumulation(
    loss: dict[str, Any], routing: dict[str, Any]
) -> None:
    whole, parted = (build_tiny_model(build_tiny_moe_config(loss | routing)) for _ in range(2))
    tokens = build_tiny_tokens(6, 9)
    for _ in range(2):  # the second step knows the loads of the first
        assert_same(step(whole, [tokens]), step(parted, list(tokens.split([1, 3, 2]))))


def recompute(model: Transformer, *, use_reentrant: bool) -> Transformer:
    for block in model.blocks:
        plain = block.forward
        block.forward = lambda x, context, plain=plain: checkpoint(
            plain, x, context, use_reentrant=use_reentrant
        )
    return model


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS.keys())
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_reports_and_gradients_do_not_depend_on_recomputation(
    loss: dict[str, Any], routing: dict[str, Any]
) -> None:
    config = build_tiny_moe_config(loss | routing)
    kept, repeated = (
        build_tiny_model(config),
        recompute(build_tiny_model(config), use_reentrant=False),
    )
    for part in (build_tiny_tokens(4, 9), build_tiny_tokens(4, 9, seed=1)):
        assert_same(step(kept, [part]), step(repeated, [part]))


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS.keys())
def test_reentrant_recomputation_counts_once_too(routing: dict[str, Any]) -> None:
    config = build_tiny_moe_config(routing)
    kept, repeated = (
        build_tiny_model(config),
        recompute(build_tiny_model(config), use_reentrant=True),
    )
    assert_same(step(kept, [build_tiny_tokens(4, 9)]), step(repeated, [build_tiny_tokens(4, 9)]))


def test_reentrant_recomputation_would_lose_the_loss_and_is_refused() -> None:
    model = recompute(build_tiny_model(build_tiny_moe_config(LOSSES["batch"])), use_reentrant=True)
    with pytest.raises(ConfigError, match=r"have no gradient\. Use use_reentrant=False"):
        step(model, [build_tiny_tokens()])


def test_entropy_is_that_of_the_load_and_dead_experts_are_counted() -> None:
    model = build_tiny_model(build_tiny_moe_config({"num_experts_per_tok": 1, "router_bias": True}))
    even = update_expert_balance(model).read_report()  # no step at all: nobody was asked
    assert even.dead == [layer.config.num_experts for layer in model.list_moe_layers()]
    for layer in model.list_moe_layers():
        torch.nn.init.zeros_(layer.router.weight)
        layer.router.bias.data[0] = 1.0
    one, _ = step(model, [build_tiny_tokens()])
    assert one.entropy == [0.0] * len(one.load)
    assert one.to_dict()["dead_experts"] == sum(len(load) - 1 for load in one.load)
    mixed, _ = step(
        build_tiny_model(build_tiny_moe_config({"num_experts_per_tok": 2})), [build_tiny_tokens()]
    )
    for load, entropy in zip(mixed.load, mixed.entropy, strict=True):
        assert entropy == pytest.approx(
            -sum(p * math.log(p) for p in load if p) / math.log(len(load))
        )


def test_report_says_how_even_the_experts_worked() -> None:
    model = build_tiny_model(
        build_tiny_moe_config(
            {"num_experts_per_tok": 1, "routing": {"kind": "capacity", "factor": 1.0}}
        )
    )
    for layer in model.list_moe_layers():
        torch.nn.init.zeros_(layer.router.weight)
        layer.balance_bias_E.copy_(torch.tensor([3.0, 2.0, 1.0, 0.0]))
    model(build_tiny_tokens(2, 8))
    report = update_expert_balance(model).read_report()
    assert report.load == [[1.0, 0.0, 0.0, 0.0]] * 2
    assert report.imbalance == [4.0, 4.0]
    assert report.dropped == [0.75, 0.75]  # 2 of 8 tokens find room
    assert report.balance == pytest.approx([1.0, 1.0])  # scores are even, only the bias is not
    assert report.router_z == pytest.approx([torch.tensor(4.0).log().item() ** 2] * 2)
    assert report.to_dict()["busiest"] == 4.0
    assert update_expert_balance(model).read_report().load == [[0.0] * 4] * 2


def test_dense_models_report_nothing() -> None:
    report = update_expert_balance(build_tiny_model(build_tiny_config()))
    assert not report
    assert report.to_dict()["load"] == []


def test_the_loss_over_a_batch_begins_even_and_takes_the_shares_of_the_step_before() -> None:
    model = build_tiny_model(build_tiny_moe_config(LOSSES["batch"]))
    layer = model.list_moe_layers()[0]
    assert layer.expert_share_E.tolist() == [0.25] * 4
    model(build_tiny_tokens())
    assert float(layer.compute_auxiliary_loss().detach()) == pytest.approx(0.5)
    load = update_expert_balance(model).read_report().load
    torch.testing.assert_close(layer.expert_share_E, torch.tensor(load[0]))
    assert "expert_share_E" in layer.state_dict()
    assert "expert_share_E" not in MoELayer(16, MoeConfig.model_validate(EXPERTS)).state_dict()
