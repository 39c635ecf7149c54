"""The layer against its formulas, token by token: output and every gradient, for everything that
a config can say.
"""

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from llmsys.config.moe import MoeConfig
from llmsys.errors import ConfigError
from llmsys.model import token_dispatcher
from llmsys.model.kv_cache import KeyValueCache
from llmsys.model.moe_layer import MoELayer
from llmsys.model.router import compute_capacity
from tests.helpers.rounding import assert_within_rounding
from tests.helpers.tiny_model import (
    build_tiny_model,
    build_tiny_moe_config,
    build_tiny_tokens,
    compute_relative_error,
)
from tests.reference import moe as plain

WIDTH = 16
EIGHT: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 8}
LOSS = {"kind": "auxiliary_loss", "weight": 0.5}
FREE = {"balance": {"kind": "none"}}
CHOICES: dict[str, dict[str, Any]] = {
    "softmax, whole": FREE,
    "softmax, as it is, scaled": {"norm_topk_prob": False, "routed_scaling_factor": 2.5, **FREE},
    "sigmoid": {"score": "sigmoid"},
    "sigmoid, not whole": {"score": "sigmoid", "norm_topk_prob": False},
    "router bias": {"router_bias": True},
    "groups by their best": {"groups": {"num_groups": 4, "groups_per_token": 2}, **FREE},
    "groups by their best, with bias": {"groups": {"num_groups": 4, "groups_per_token": 2}},
    "groups by two": {
        "score": "sigmoid",
        "groups": {"num_groups": 4, "groups_per_token": 2, "score": "top2"},
    },
    "groups by two, no bias": {
        "groups": {"num_groups": 2, "groups_per_token": 1, "score": "top2"},
        **FREE,
    },
    "sparsemixer": {"score": "sparsemixer", "num_experts_per_tok": 2, "jitter": 0.3, **FREE},
    "sparsemixer with bias": {"score": "sparsemixer", "num_experts_per_tok": 2, "jitter": 0.3},
    "sparsemixer in groups": {
        "score": "sparsemixer",
        "num_experts_per_tok": 2,
        "jitter": 0.3,
        "groups": {"num_groups": 4, "groups_per_token": 2},
    },
    "capacity": {"routing": {"kind": "capacity", "factor": 0.7}},
    "capacity, tight": {"routing": {"kind": "capacity", "factor": 0.1}, "score": "sigmoid"},
    "capacity for all": {"routing": {"kind": "capacity", "factor": 8.0}},
    "expert choice": {"routing": {"kind": "expert_choice", "factor": 2.0}},
    "expert choice, few": {"routing": {"kind": "expert_choice", "factor": 0.5}, "score": "sigmoid"},
    "expert choice, all": {
        "routing": {"kind": "expert_choice", "factor": 99.0},
        "routed_scaling_factor": 0.5,
    },
    "every expert": {"num_experts_per_tok": 8},
    "one expert": {"num_experts": 1, "num_experts_per_tok": 1},
    "shared": {"num_shared_experts": 2},
    "shared, gated": {"shared_intermediate_size": 12, "shared_gate": True},
    "relu with biases": {"expert": {"kind": "relu", "bias": True}, "num_shared_experts": 1},
    "geglu": {"expert": {"kind": "geglu"}},
    "clamped": {"expert": {"kind": "clamped_swiglu", "bias": True, "limit": 0.5}},
    "odd width": {
        "moe_intermediate_size": 5,
        "expert": {"kind": "clamped_swiglu", "bias": True, "limit": 0.5},
    },
    "odd width, no gate, drops": {
        "moe_intermediate_size": 5,
        "expert": {"kind": "relu"},
        "routing": {"kind": "capacity", "factor": 0.7},
    },
    "loss per sequence": {"balance": {**LOSS, "scope": "sequence"}, "z_loss_weight": 0.1},
    "loss per batch": {"balance": {**LOSS, "scope": "batch"}},
    "bias and loss per sequence": {
        "balance": {"kind": "bias", "sequence_weight": 0.5},
        "score": "sigmoid",
    },
    "z loss": {"z_loss_weight": 0.3, "router_bias": True, **FREE},
}
PLACES = {"many tokens": (2, 11), "one token": (1, 1), "rows of one": (3, 1)}


def layer_of(changes: dict[str, Any], width: int = WIDTH) -> MoELayer:
    torch.manual_seed(0)
    layer = MoELayer(width, MoeConfig.model_validate(EIGHT | changes))
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * (1.0 if "router" in name else 0.5))
        layer.balance_bias_E.copy_(0.1 * torch.randn(layer.config.num_experts))
        if layer.expert_share_E is not None:
            layer.expert_share_E.copy_(torch.rand(layer.config.num_experts).softmax(0))
    return layer


def compare(layer: MoELayer, x: Tensor, real: Tensor | None = None) -> None:
    """Output and the gradient of everything, of output and auxiliary losses together."""
    with_loss = real is None and layer.config.routing.kind == "token_choice" and layer.training
    named = dict(layer.named_parameters())
    out_gradient = torch.randn(x.shape)
    p = named | dict(layer.named_buffers())
    everywhere = torch.ones(x.shape[:2], dtype=torch.bool) if real is None else real
    expected = plain.compute_mixture(layer.config, p, x, everywhere, training=layer.training)
    objective = (expected * out_gradient).sum()
    if with_loss:
        loss = plain.compute_balance_losses(layer.config, p, x, layer.expert_share_E)
        objective = objective + loss
    wanted = torch.autograd.grad(objective, [x, *named.values()], allow_unused=True)

    def compute(errors: AbstractContextManager[Any]) -> dict[str, Tensor]:
        again = deepcopy(layer)  # it counts tokens and collects losses
        with errors:
            y = again(x, real)
            objective = (y * out_gradient).sum()
            if with_loss:
                objective = objective + again.compute_auxiliary_loss()
            gradients = torch.autograd.grad(objective, [x, *again.parameters()], allow_unused=True)
        return {"y": y.detach()} | fill_gradients(gradients)

    def fill_gradients(gradients: Sequence[Tensor | None]) -> dict[str, Tensor]:
        pairs = zip(["x", *named], [x, *named.values()], gradients, strict=True)
        return {name: torch.zeros_like(p) if value is None else value for name, p, value in pairs}

    found = compute(contextlib.nullcontext())
    y = layer(x, real)
    if with_loss:
        torch.testing.assert_close(layer.compute_auxiliary_loss(), loss, rtol=1e-5, atol=1e-6)
    assert torch.equal(y, found["y"])
    expectation = {"y": expected.detach()} | fill_gradients(wanted)
    assert_within_rounding(found, expectation, compute, computations=2)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("changes", CHOICES.values(), ids=CHOICES.keys())
def test_layer_equals_its_formulas_forward_and_backward(
    changes: dict[str, Any], place: tuple[int, int]
) -> None:
    compare(layer_of(changes), torch.randn(*place, WIDTH, requires_grad=True))


@pytest.mark.parametrize("name", ["capacity", "expert choice", "softmax, whole"])
def test_padding_takes_no_room_and_changes_nobody(name: str) -> None:
    layer = layer_of(CHOICES[name])
    x = torch.randn(3, 9, WIDTH, requires_grad=True)
    real = torch.tensor([[True] * 9, [True] * 4 + [False] * 5, [False] * 9])
    compare(layer, x, real)
    alone = layer_of(CHOICES[name])
    torch.testing.assert_close(layer(x, real)[1:2, :4], alone(x[1:2, :4]))


@pytest.mark.parametrize(
    "name", ["capacity", "expert choice", "loss per sequence", "softmax, whole"]
)
def test_rows_are_on_their_own(name: str) -> None:
    layer, x = layer_of(CHOICES[name]), torch.randn(4, 7, WIDTH)
    whole = layer(x)
    loss = layer.compute_auxiliary_loss()
    parts = [(layer(part), layer.compute_auxiliary_loss()) for part in x.split([1, 3])]
    torch.testing.assert_close(whole, torch.cat([y for y, _ in parts]))
    torch.testing.assert_close(loss, parts[0][1] / 4 + parts[1][1] * 3 / 4)


@pytest.mark.parametrize(
    "name", ["capacity", "capacity, tight", "expert choice", "expert choice, few"]
)
def test_packed_documents_are_routed_as_if_alone(name: str) -> None:
    layer = layer_of(CHOICES[name] | {"routing": CHOICES[name]["routing"] | {"scope": "document"}})
    x = torch.randn(2, 12, WIDTH, requires_grad=True)
    # a number is one document a row
    documents = torch.tensor([[4] * 5 + [5] * 6 + [-1], [0] * 1 + [4] * 9 + [5] * 2])
    y = layer(x, documents >= 0, documents)
    dropped, parts = float(layer.num_dropped), []
    layer.reset_counts()
    for row, begin, end in [(0, 0, 5), (0, 5, 11), (1, 0, 1), (1, 1, 10), (1, 10, 12)]:
        alone = layer(x[row : row + 1, begin:end])[0]
        torch.testing.assert_close(y[row, begin:end], alone)
        parts.append((alone.square().sum(), y[row, begin:end].square().sum()))
    assert float(layer.num_dropped) == dropped
    assert (dropped > 0) == name.startswith("capacity")
    alone, packed = (
        torch.autograd.grad(torch.stack(sums).sum(), x)[0] for sums in zip(*parts, strict=True)
    )
    assert compute_relative_error(packed, alone) < 1e-6
    # Without document numbers a row is one document.
    assert torch.equal(layer(x), layer_of(CHOICES[name])(x))


def test_a_model_gives_packed_documents_the_outputs_that_they_have_alone() -> None:
    config = build_tiny_moe_config(
        {"routing": {"kind": "capacity", "factor": 0.5, "scope": "document"}}
    )
    model, tokens = build_tiny_model(config), build_tiny_tokens(1, 12)
    packed = model(tokens, documents_BT=torch.tensor([[0] * 7 + [1] * 5]))
    assert float(model.list_moe_layers()[0].num_dropped) > 0
    alone = torch.cat([model(tokens[:, :7]), model(tokens[:, 7:])], dim=1)
    assert compute_relative_error(packed, alone) < 1e-6


def test_capacity_is_rounded_up_but_not_for_the_error_of_a_product() -> None:
    tokens_B = torch.tensor([0, 1, 9, 10, 11, 50])
    # 1.1 · 50 is above 55 in float64
    assert compute_capacity(tokens_B, 1.1).tolist() == [0, 2, 10, 11, 13, 55]


def test_the_balance_factor_scales_the_balance_loss_and_not_the_z_loss() -> None:
    layer, x = layer_of(CHOICES["loss per sequence"]), torch.randn(2, 6, WIDTH)
    losses = []
    for factor in (0.0, 1.0, 3.0):
        layer.balance_factor = factor
        layer(x)
        losses.append(layer.compute_auxiliary_loss())
    z_loss = (
        layer.config.z_loss_weight
        * layer.router.compute_scores(x.flatten(0, 1)).logits_NE.logsumexp(-1).square()
    )
    torch.testing.assert_close(losses[0], z_loss.mean())
    torch.testing.assert_close(losses[2] - losses[0], 3 * (losses[1] - losses[0]))


def test_capacity_drops_by_position_and_only_in_training() -> None:
    layer = layer_of(
        {"num_experts": 2, "num_experts_per_tok": 1, "routing": {"kind": "capacity", "factor": 1.0}}
    )
    with torch.no_grad():
        layer.router.weight.copy_(torch.tensor([1.0, -1.0])[:, None].expand(2, WIDTH))
    x = torch.rand(1, 5, WIDTH)
    y = layer(x)
    assert y[0, :3].any(-1).all()  # ceil(5 / 2) find room
    assert not y[0, 3:].any()
    assert (float(layer.num_dropped), float(layer.expert_tokens_E[0])) == (2, 5)
    assert layer.eval()(x).any(-1).all()
    assert float(layer.num_dropped) == 2


@pytest.mark.parametrize(
    "name", ["capacity", "expert choice", "clamped", "odd width", "relu with biases"]
)
def test_all_tokens_on_one_expert_and_experts_without_tokens(name: str) -> None:
    layer = layer_of(CHOICES[name] | {"num_experts_per_tok": 1})
    with torch.no_grad():
        layer.router.weight[5] += 2.0  # far ahead, and exp() in the plain twin stays finite
    compare(layer, torch.rand(2, 6, WIDTH, requires_grad=True))


@pytest.mark.parametrize("name", ["clamped", "capacity", "expert choice", "odd width"])
def test_experts_of_every_kind_in_bfloat16_stay_close_to_float32(name: str) -> None:
    layer = layer_of(CHOICES[name] | {"num_experts_per_tok": 8})
    x = torch.randn(2, 6, WIDTH).bfloat16()
    exact = layer(x.float())
    rounded = layer.bfloat16()(x)
    assert rounded.dtype == torch.bfloat16
    assert compute_relative_error(rounded, exact) < (
        0.02 if "choice" not in name and name != "capacity" else 0.2
    )


@pytest.mark.parametrize("name", ["capacity", "expert choice"])
def test_padding_of_a_batch_reaches_the_experts_of_a_model(name: str) -> None:
    config = build_tiny_moe_config(CHOICES[name], family="encoder", head={"kind": "features"})
    model, tokens = build_tiny_model(config), build_tiny_tokens(2, 7)
    documents = torch.tensor([[0] * 7, [0] * 4 + [-1] * 3])
    padded = model(tokens, documents_BT=documents)
    torch.testing.assert_close(padded[1:, :4], model(tokens[1:, :4]))
    assert float(model.list_moe_layers()[0].num_tokens) == 11 + 4


def test_generation_with_experts_that_choose_is_refused() -> None:
    config = build_tiny_moe_config({"routing": {"kind": "expert_choice"}})
    with pytest.raises(
        ConfigError, match=r"routing\.kind=expert_choice cannot generate: .* Use token_choice"
    ):
        KeyValueCache(config, 1, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"groups": {"num_groups": 2, "groups_per_token": 1}},
            "groups: expert groups restrict the choice of tokens",
        ),
        (
            {"score": "sparsemixer", "num_experts_per_tok": 2},
            "score: sparsemixer routes by token choice",
        ),
    ],
)
def test_expert_choice_refuses_what_belongs_to_tokens(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        MoeConfig.model_validate(EIGHT | changes | {"routing": {"kind": "expert_choice"}})


@pytest.mark.parametrize(
    "name", ["softmax, whole", "capacity", "expert choice, few", "shared, gated"]
)
def test_the_one_kernel_sum_of_accelerators_follows_the_formulas(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_dispatcher, "is_on_host", lambda x: False)
    compare(layer_of(CHOICES[name]), torch.randn(2, 11, WIDTH, requires_grad=True))
    own = torch.randn(6, WIDTH).bfloat16()
    slot_NK, weights_NK = torch.tensor([[0, 5], [3, 3], [2, 1]]), torch.rand(3, 2)
    plain_ND = (own.float()[slot_NK] * weights_NK[..., None]).sum(1)
    sums_ND = token_dispatcher._sum_over_assignments(own, slot_NK, weights_NK)
    assert compute_relative_error(sums_ND.float(), plain_ND) < 1e-2


def test_counts_of_a_whole_sequence_are_for_its_loss_alone() -> None:
    """Where ranks share a sequence, the balance loss sees the assignments of all, and the
    counters those of a rank.
    """
    balance = {**LOSS, "scope": "sequence"}
    routing = {"kind": "capacity", "factor": 0.7}
    layer = MoELayer(
        WIDTH, MoeConfig.model_validate({**EIGHT, "balance": balance, "routing": routing})
    ).train()
    asked: list[Tensor] = []

    def add_other_rank(counts_BE: Tensor) -> Tensor:
        asked.append(counts_BE.clone())
        return counts_BE + torch.arange(8)

    layer.reduce_row_counts = add_other_rank
    torch.manual_seed(0)
    layer(torch.randn(2, 12, WIDTH))
    assert int(layer.num_tokens) == 24
    assert layer.expert_tokens_E.tolist() == asked[0].sum(0).tolist()
    assert int(layer.expert_tokens_E.sum()) == 24 * 3
    # Of 3 · 12 assignments of a sequence, each of 8 experts takes at most ⌈0.7 · 36 / 8⌉.
    kept = asked[0].clamp(max=4).sum()
    assert kept < asked[0].sum()
    assert int(layer.num_dropped) == 24 * 3 - int(kept)
