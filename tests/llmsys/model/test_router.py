"""Routing under the worst distributions, its gradients, the balancing rules, and what the layer
counts.
"""

import pytest
import torch

from llmsys.config.moe import MoeConfig
from llmsys.model.experts import GroupedExperts
from llmsys.model.load_balancing import update_balance_bias
from llmsys.model.moe_layer import MoELayer
from llmsys.model.router import RoutingDecision, TopKRouter
from llmsys.model.token_dispatcher import LocalTokenDispatcher
from tests.helpers.tiny_model import (
    EXPERTS,
    build_tiny_model,
    build_tiny_moe_config,
    build_tiny_tokens,
    compute_relative_error,
)

ASSIGNMENTS = {
    "one token": [[2, 0]],
    "one expert gets all": [[3], [3], [3], [3], [3]],
    "an expert gets none": [[0, 2], [2, 0], [0, 3], [3, 2], [0, 2]],
    "only the first and last": [[0, 3], [3, 0], [0, 3]],
    "every expert for every token": [[0, 1, 2, 3], [3, 2, 1, 0]],
}


def loop(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: GroupedExperts
) -> torch.Tensor:
    rows = []
    for token in range(x.shape[0]):
        total = torch.zeros_like(x[token])
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            gate, up = x[token] @ experts.gate_proj[expert], x[token] @ experts.up_proj[expert]
            total = total + weight * ((gate / (1 + (-gate).exp()) * up) @ experts.down_proj[expert])
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("assignment", ASSIGNMENTS.values(), ids=ASSIGNMENTS.keys())
def test_dispatch_equals_a_loop_over_tokens_and_experts(
    assignment: list[list[int]], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    chosen = torch.tensor(assignment)
    experts = GroupedExperts(4, 16, 8)
    x = torch.randn(len(assignment), 16, requires_grad=True)
    weights = torch.rand(chosen.shape, requires_grad=True)
    out_gradient = torch.randn(len(assignment), 16)
    leaves = [x, weights, *experts.parameters()]
    expected = loop(x, chosen, weights, experts)
    expected_gradients = torch.autograd.grad(expected, leaves, out_gradient)

    experts = experts.to(dtype)
    leaves = [x.detach().to(dtype).requires_grad_(), weights, *experts.parameters()]
    y, _ = LocalTokenDispatcher()(leaves[0], RoutingDecision(chosen, weights), experts)
    gradients = torch.autograd.grad(y, leaves, out_gradient.to(dtype))

    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    assert y.dtype == dtype
    assert compute_relative_error(y, expected) < tolerance
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        assert compute_relative_error(gradient, other) < tolerance


def test_experts_without_tokens_get_a_gradient_of_exactly_zero() -> None:
    torch.manual_seed(0)
    experts = GroupedExperts(4, 16, 8)
    x, chosen = torch.randn(5, 16), torch.full((5, 1), 2)
    y, _ = LocalTokenDispatcher()(x, RoutingDecision(chosen, torch.ones(5, 1)), experts)
    y.sum().backward()
    for weight in experts.parameters():
        assert weight.grad is not None
        assert not weight.grad[[0, 1, 3]].any()
        assert weight.grad[2].any()


def test_experts_accept_no_rows_at_all_and_an_expanded_gradient() -> None:
    experts = GroupedExperts(4, 16, 8)
    empty = experts(torch.zeros(0, 16), torch.zeros(4, dtype=torch.int64))
    assert empty.shape == (0, 16)
    empty.sum().backward()
    assert all(not weight.grad.any() for weight in experts.parameters())
    # its gradient has stride 0
    experts(torch.randn(3, 16), torch.tensor([1, 0, 2, 0])).sum().backward()
    assert experts.down_proj.grad is not None
    assert experts.down_proj.grad.any()


def config_of(**changes: object) -> MoeConfig:
    return MoeConfig.model_validate(EXPERTS | changes)


def router_of(config: MoeConfig) -> TopKRouter:
    torch.manual_seed(0)
    router = TopKRouter(8, config)
    with torch.no_grad():
        router.weight.normal_(std=1.0)
    return router


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_bias_changes_the_choice_and_never_the_weights(score: str) -> None:
    router, x = router_of(config_of(score=score)), torch.randn(6, 8)
    forced = router(x, torch.tensor([0.0, 5.0, 0.0, 5.0]))
    assert (forced.experts_NK.sort(-1).values == torch.tensor([1, 3])).all()
    scores = router.compute_scores(x).log_scores_NE.exp().gather(-1, forced.experts_NK)
    torch.testing.assert_close(forced.weights_NK, scores / scores.sum(-1, keepdim=True))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_weights_are_whole_even_when_every_score_vanishes(score: str) -> None:
    # sigmoid(-300) is 0 in float32: dividing by the sum would give NaN, an epsilon would give
    # weights of 0.
    router = router_of(config_of(score=score))
    with torch.no_grad():
        router.weight.copy_(torch.full((4, 8), -40.0) - torch.arange(4)[:, None] / 8)
    weights = router(torch.ones(3, 8)).weights_NK
    torch.testing.assert_close(weights.sum(-1), torch.ones(3))
    assert (weights > 0.1).all()


def test_router_is_float32_under_bfloat16_weights() -> None:
    router = router_of(config_of()).bfloat16()
    x = torch.randn(64, 8).bfloat16()
    routing = router(x)
    exact = (x.double() @ router.weight.double().T).log_softmax(-1)
    assert routing.weights_NK.dtype == torch.float32
    torch.testing.assert_close(
        router.compute_scores(x).log_scores_NE.double(), exact, rtol=1e-5, atol=1e-5
    )


def test_bias_moves_by_the_sign_of_the_shortfall() -> None:
    bias, tokens = torch.tensor([0.0, 0.1, -0.1, 0.0]), torch.tensor([10.0, 2.0, 0.0, 4.0])
    torch.testing.assert_close(
        update_balance_bias(bias, tokens, 0.01), torch.tensor([-0.01, 0.11, -0.09, 0.0])
    )
    assert torch.equal(update_balance_bias(bias, torch.full((4,), 7.0), 0.01), bias)


def test_bias_balances_a_router_that_prefers_one_expert() -> None:
    router = router_of(config_of(score="sigmoid"))
    x = torch.randn(512, 8) + 0.5
    bias = torch.zeros(4)
    loads = []
    for _ in range(200):
        counts = torch.bincount(router(x, bias).experts_NK.flatten(), minlength=4)
        loads.append(float(counts.max() / counts.float().mean()))
        bias = update_balance_bias(bias, counts, 0.01)
    assert loads[0] > 1.2
    assert max(loads[-10:]) < 1.1


def test_tokens_are_counted_in_training_and_not_in_evaluation() -> None:
    model, tokens = build_tiny_model(build_tiny_moe_config()), build_tiny_tokens()
    model(tokens)
    model(tokens)
    model.eval()
    model(tokens)
    for layer in model.list_moe_layers():
        assert float(layer.expert_tokens_E.sum()) == 2 * tokens.numel() * 2
        assert "expert_tokens_E" not in layer.state_dict()
        assert "balance_bias_E" in layer.state_dict()


def test_the_dispatcher_can_be_replaced_from_outside() -> None:
    layer = MoELayer(16, config_of(num_shared_experts=1))
    layer.dispatcher = lambda x, routing, experts, shared: (shared(), None)  # type: ignore[assignment]
    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(layer(x), layer.shared(x))
