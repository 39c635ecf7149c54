"""What travels between ranks that share experts: how many rows, in which order with other work,
and to what effect.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from llmsys.config.expert_sharding import count_rank_visits
from llmsys.config.moe import MoeConfig
from llmsys.model.moe_layer import MoELayer
from llmsys.parallel.expert_parallel import AllToAllTokenDispatcher
from tests.helpers.ranks import run_ranks

WIDTH, SHARED, TOKENS = 16, 24, 12
BASE: dict[str, Any] = {
    "num_experts": 8,
    "moe_intermediate_size": 8,
    "shared_intermediate_size": SHARED,
}
CASES: dict[str, dict[str, Any]] = {
    "all experts": BASE | {"num_experts_per_tok": 8},
    "five of eight": BASE | {"num_experts_per_tok": 5, "norm_topk_prob": False},
    "five of eight, drops": BASE
    | {"num_experts_per_tok": 5, "routing": {"kind": "capacity", "factor": 0.6}},
    "one of eight": BASE | {"num_experts_per_tok": 1, "norm_topk_prob": False},
    "in latents": BASE | {"num_experts_per_tok": 3, "latent_size": 6},
    "biases": BASE | {"num_experts_per_tok": 3, "expert": {"kind": "clamped_swiglu", "bias": True}},
}


class ExchangeLog(TorchDispatchMode):
    """Lists the exchanges of rows, with their number, waits for them, and products of the shared
    expert.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.events: list[str] = []
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if (
            name == "all_to_all_single"
            and args[0].shape[1] == self.width
            and args[0].is_floating_point()
        ):
            self.events.append("start")
            self.rows.append(len(args[0]))
        elif (
            name == "wait_tensor" and args[0].shape[1] == self.width and args[0].is_floating_point()
        ):
            self.events.append("finish")
        elif name in ("mm", "addmm") and any(
            isinstance(arg, Tensor) and SHARED in arg.shape for arg in args
        ):
            self.events.append("shared")
        return func(*args, **(kwargs or {}))


def run_layer(
    config: MoeConfig, dispatcher: Any, first: int, count: int, shards: slice
) -> tuple[Tensor, dict[str, Tensor], ExchangeLog]:
    """Output and gradients of a layer with fixed weights for some of 2 · TOKENS tokens; the
    events of both passes.
    """
    torch.manual_seed(0)
    layer = MoELayer(WIDTH, config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for name, parameter in list(layer.experts.named_parameters()):
        layer.experts.register_parameter(name, torch.nn.Parameter(parameter.data[shards].clone()))
    x_BTD = torch.randn(2, TOKENS, WIDTH)[first : first + count].requires_grad_()
    weights_BTD = torch.randn(2, TOKENS, WIDTH)[first : first + count]
    if dispatcher is not None:
        layer.dispatcher = dispatcher
    with ExchangeLog(config.get_expert_channels(WIDTH)) as log:
        y_BTD = layer(x_BTD)
        log.events.append("backward")
        (y_BTD * weights_BTD).sum().backward()
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    assert x_BTD.grad is not None
    return y_BTD.detach(), gradients | {"x": x_BTD.grad}, log


def exchange(rank: int) -> dict[Any, Any]:
    found = {}
    for name, settings in CASES.items():
        config = MoeConfig.model_validate(settings)
        for once in (False, True):
            dispatcher = AllToAllTokenDispatcher(dist.group.WORLD, config)  # type: ignore[arg-type]
            chosen, dispatcher.sends_once_per_rank = dispatcher.sends_once_per_rank, once
            y, gradients, log = run_layer(
                config, dispatcher, rank, 1, slice(4 * rank, 4 * rank + 4)
            )
            numpy = {key: value.numpy() for key, value in gradients.items()}
            found[name, once] = y.numpy(), numpy, log.events, log.rows, chosen
    return found


@pytest.fixture(scope="module")
def by_rank() -> list[dict[Any, Any]]:
    return run_ranks(exchange, 2)


@pytest.mark.distributed
@pytest.mark.parametrize("once", [False, True], ids=["row per expert", "row per rank"])
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_the_output_and_gradients_of_one(
    name: str, once: bool, by_rank: list[dict[Any, Any]]
) -> None:
    y, gradients, _ = run_layer(MoeConfig.model_validate(CASES[name]), None, 0, 2, slice(None))
    parts = [found[name, once] for found in by_rank]
    torch.testing.assert_close(torch.cat([torch.from_numpy(part[0]) for part in parts]), y)
    for key, value in gradients.items():
        own = [torch.from_numpy(part[1][key]) for part in parts]
        # The ranks hold their own experts and rows, and all of what is left.
        found = torch.cat(own) if key == "x" or key.startswith("experts") else sum(own)
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.distributed
def test_a_token_is_sent_once_to_each_rank_of_its_experts(by_rank: list[dict[Any, Any]]) -> None:
    assert by_rank[0]["all experts", True][3] == [2 * TOKENS] * 4
    assert by_rank[0]["all experts", False][3] == [8 * TOKENS] * 4
    assert by_rank[0]["all experts", True][4]
    assert not by_rank[0]["one of eight", True][4]


@pytest.mark.distributed
@pytest.mark.parametrize("once", [False, True])
def test_the_shared_expert_is_computed_while_rows_travel_in_both_passes(
    once: bool, by_rank: list[dict[Any, Any]]
) -> None:
    forward, backward = " ".join(by_rank[0]["five of eight", once][2]).split(" backward ")
    assert forward == "start shared shared shared finish start finish"
    assert backward == "start finish start " + "shared " * 6 + "finish"


def test_visits_of_ranks_are_those_of_random_experts() -> None:
    plain = MoeConfig(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=8)
    assert count_rank_visits(plain, 1) == pytest.approx(1)
    assert count_rank_visits(plain, 128) == pytest.approx(8)
    generator = torch.Generator().manual_seed(0)
    ranks_NK = torch.rand(20_000, 128, generator=generator).argsort(dim=1)[:, :8] // 16
    drawn = torch.stack([(ranks_NK == rank).any(1) for rank in range(8)]).sum(0).double().mean()
    assert count_rank_visits(plain, 8) == pytest.approx(float(drawn), rel=0.01)
    groups = {"num_groups": 8, "groups_per_token": 4, "score": "top2"}
    deepseek = MoeConfig.model_validate(
        {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 8, "groups": groups}
    )
    assert count_rank_visits(deepseek, 8) == pytest.approx(3.63, rel=0.01)
    assert 7 < count_rank_visits(deepseek, 64) < 7.5
