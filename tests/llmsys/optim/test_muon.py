"""Muon against torch's own for whole matrices, and split matrices against whole ones."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from llmsys.config.optimizer import AdamWConfig, MuonConfig
from llmsys.doctor.pairs.plain_optimizers import compute_polar_express
from llmsys.optim.build_optimizer import build_optimizer
from llmsys.optim.muon import list_coefficients, orthogonalize_matrices
from llmsys.optim.parameter_groups import build_parameter_groups
from llmsys.parallel.distributed_muon import assign_matrices, map_full_matrices
from tests.helpers.ranks import run_ranks

CONFIG = MuonConfig(learning_rate=0.01, weight_decay=0.1, momentum=0.9)


def test_steps_on_whole_matrices_are_those_of_torchs_own_muon() -> None:
    torch.manual_seed(0)
    ours = {
        "up_proj.weight": nn.Parameter(torch.randn(24, 40)),
        "down_proj.weight": nn.Parameter(torch.randn(40, 24)),
    }
    start = [parameter.detach().clone() for parameter in ours.values()]
    theirs = [nn.Parameter(parameter.clone()) for parameter in start]
    optimizer = build_optimizer(ours, CONFIG, compute_dtype=torch.bfloat16)
    oracle = torch.optim.Muon(
        theirs, lr=0.01, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(4):
        for parameter, other in zip(ours.values(), theirs, strict=True):
            parameter.grad = torch.randn_like(parameter)
            other.grad = parameter.grad.clone()
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        optimizer.step()
        oracle.step()
    for parameter, other, before in zip(ours.values(), theirs, start, strict=True):
        apart, moved = (parameter - other).norm(), (other - before).norm()
        assert apart < 0.04 * moved, "bf16 matmuls in another order"


def test_orthogonal_makes_singular_values_near_one_for_each_matrix_of_a_stack() -> None:
    torch.manual_seed(0)
    stack = torch.randn(3, 16, 48) * torch.tensor([1e-3, 1.0, 1e3]).view(3, 1, 1)
    made = orthogonalize_matrices(stack, steps=5)
    values = torch.linalg.svdvals(made)
    assert values.min() > 0.6
    assert values.max() < 1.3
    torch.testing.assert_close(
        made[1], orthogonalize_matrices(stack[1], steps=5), rtol=1e-4, atol=1e-5
    )
    assert orthogonalize_matrices(torch.zeros(4, 4), steps=5).abs().max() == 0, (
        "no gradient, no step"
    )


def test_polar_express_has_the_best_polynomial_of_each_step() -> None:
    for ours, theirs in zip(
        list_coefficients("polar_express", 9), compute_polar_express(9), strict=True
    ):
        assert ours == pytest.approx(theirs, rel=1e-7)


def test_polar_express_lifts_small_singular_values_higher() -> None:
    torch.manual_seed(0)
    values = torch.logspace(-3, 0, 16)
    left, right = (torch.linalg.qr(torch.randn(16, 16))[0] for _ in range(2))
    matrix = left @ values.diag() @ right
    made = {
        method: torch.linalg.svdvals(orthogonalize_matrices(matrix, 5, method))
        for method in ("newton_schulz", "polar_express")
    }
    assert made["polar_express"].min() > 1.5 * made["newton_schulz"].min()
    many = torch.linalg.svdvals(orthogonalize_matrices(matrix, 9, "polar_express"))
    torch.testing.assert_close(many, torch.ones(16), rtol=0, atol=0.02)


def take_normuon_step(
    weight: Tensor, gradient: Tensor, momentum: Tensor, second: Tensor, beta: float
) -> Tensor:
    """Return the next weight (Li 2025, algorithm 1), with a polar factor by SVD."""
    momentum += 0.1 * (gradient - momentum)
    left, _, right = torch.linalg.svd(0.1 * gradient + 0.9 * momentum, full_matrices=False)
    polar = left @ right
    second += (1 - beta) * (polar.square().mean(-1) - second)
    update = polar / (second.sqrt()[:, None] + 1e-8)
    rate = 0.2 * 0.01 * polar.numel() ** 0.5 / update.norm()
    return weight - 0.01 * 0.1 * weight - rate * update


def test_normuon_divides_the_update_of_a_neuron_by_the_root_of_its_second_moment() -> None:
    """Ten steps of Polar Express are an SVD but for 2e-3; stacks of experts are (E, in, out)."""
    torch.manual_seed(0)
    start = torch.randn(12, 30)
    named = {
        "up_proj.weight": nn.Parameter(start.clone()),
        "experts.up_proj": nn.Parameter(start.T[None].clone()),
    }
    config = CONFIG.model_copy(
        update={
            "neuron_beta": 0.8,
            "orthogonalization": "polar_express",
            "newton_schulz_steps": 12,
        }
    )
    optimizer = build_optimizer(named, config, compute_dtype=torch.float32)
    weight = start.double()
    momentum, second = torch.zeros_like(weight), torch.zeros(12, dtype=torch.float64)
    for _ in range(3):
        # Neurons of very different gradients, which an orthogonal factor keeps apart.
        gradient = torch.randn(12, 30) * torch.linspace(0.1, 3, 12)[:, None]
        named["up_proj.weight"].grad = gradient
        named["experts.up_proj"].grad = gradient.T[None]
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        optimizer.step()
        weight = take_normuon_step(weight, gradient.double(), momentum, second, 0.8)
    moved = (weight - start).norm()
    assert (named["up_proj.weight"] - weight).norm() < 1e-4 * moved
    assert (named["experts.up_proj"][0].T - weight).norm() < 1e-4 * moved
    moments = {name: optimizer.state[one]["exp_avg_sq_neuron"] for name, one in named.items()}
    torch.testing.assert_close(moments["up_proj.weight"][:, 0].double(), second, rtol=1e-4, atol=0)
    assert moments["experts.up_proj"].shape == (1, 1, 12)


def test_normuon_does_not_divide_by_nothing() -> None:
    named = {"up_proj.weight": nn.Parameter(torch.ones(4, 6))}
    config = CONFIG.model_copy(update={"neuron_beta": 0.95, "weight_decay": 0.0})
    optimizer = build_optimizer(named, config, compute_dtype=torch.bfloat16)
    optimizer.step()
    assert named["up_proj.weight"].equal(torch.ones(4, 6))


def test_projections_are_muons_and_everything_else_is_adamws() -> None:
    shapes = {
        "embed.weight": (8, 4),
        "head.weight": (8, 4),
        "blocks.0.attention.q_proj.weight": (4, 4),
        "blocks.0.attention.q_proj.bias": (4,),
        "blocks.0.attention_norm.weight": (4,),
        "blocks.0.feed_forward.router.weight": (3, 4),
        "blocks.0.feed_forward.experts.up_proj": (3, 4, 8),
        "blocks.0.feed_forward.experts.up_bias": (3, 8),
    }
    named = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    muons = {
        name
        for group in build_parameter_groups(named.items(), CONFIG)
        if group.algorithm == "muon"
        for name in group.names
    }
    assert muons == {"blocks.0.attention.q_proj.weight", "blocks.0.feed_forward.experts.up_proj"}
    assert all(
        group.algorithm == "adamw" for group in build_parameter_groups(named.items(), AdamWConfig())
    )
    by_hand = build_optimizer(named, CONFIG, compute_dtype=torch.float32).state
    kept = {name: set(by_hand[parameter]) - {"step"} for name, parameter in named.items()}
    assert kept["embed.weight"] == {"exp_avg", "exp_avg_sq"}
    assert kept["blocks.0.feed_forward.experts.up_proj"] == {"exp_avg"}, "one moment for a matrix"


SHAPES = [(7, 5), (6, 9), (2, 3), (12, 4), (5, 5)]


def _function(whole: Tensor) -> Tensor:
    """Depends on all of a matrix, so that working on a part shows."""
    return orthogonalize_matrices(whole, steps=3)


def _split_ranks(rank: int) -> list[float]:
    torch.manual_seed(0)
    whole = [torch.randn(shape) for shape in SHAPES] + [torch.randn(5, 4, 6)]
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    differences = []
    for mesh, placements in (
        (line, [Shard(0)]),
        (square, [Replicate(), Shard(0)]),
        (square, [Shard(0), Shard(1)]),
        (line, [Replicate()]),
    ):
        stacked = [placement if not placement.is_shard() else Shard(0) for placement in placements]
        parts = [
            distribute_tensor(one, mesh, placements if one.ndim == 2 else stacked) for one in whole
        ]
        made = map_full_matrices(parts, _function)
        for one, part, result in zip(whole, parts, made, strict=True):
            assert isinstance(result, DTensor)
            assert result.placements == part.placements
            differences.append(float((result.full_tensor() - _function(one)).abs().max()))
    return differences


@pytest.mark.distributed
def test_split_matrices_give_what_whole_ones_give() -> None:
    """Uneven rows, ranks without a row, stacks, replicas, two axes; 4 ranks."""
    for differences in run_ranks(_split_ranks, 4):
        assert max(differences) < 1e-5


def test_work_is_dealt_evenly_and_the_same_everywhere() -> None:
    shapes = [torch.Size((64, 64))] * 6 + [torch.Size((8, 8))] * 3
    owners = assign_matrices(shapes, 3)
    assert sorted(owners[:6]) == [0, 0, 1, 1, 2, 2]
    assert owners == assign_matrices(list(shapes), 3)
