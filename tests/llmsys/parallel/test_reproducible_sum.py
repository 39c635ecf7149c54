"""Sums in one order, whoever holds what, and experts whose bits do not depend on who else is
there.
"""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from llmsys.config.feed_forward import (
    ClampedSwigluConfig,
    FeedForwardConfig,
    GeluConfig,
    SwigluConfig,
)
from llmsys.model.experts import GroupedExperts
from llmsys.parallel.reproducible_sharding import SequentialExperts
from llmsys.parallel.reproducible_sum import (
    StreamingTreeSum,
    compute_gradient_norm,
    compute_row_squared_norms,
    sum_rows_pairwise,
    sum_tree,
)


def by_recursion(leaves: list[Tensor]) -> Tensor:
    """The tree, written down: the largest power of two of leaves on the left, split in halves."""
    if len(leaves) == 1:
        return leaves[0]
    left = 1 << ((len(leaves) - 1).bit_length() - 1)
    return by_recursion(leaves[:left]) + by_recursion(leaves[left:])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 8, 12, 13, 24])
def test_leaves_one_by_one_or_in_whole_subtrees_give_the_bits_of_the_tree(count: int) -> None:
    leaves = list(torch.randn(count, 1000, generator=torch.Generator().manual_seed(count)))
    expected = by_recursion(leaves)
    for ranks in (n for n in (1, 2, 4, 8) if count % n == 0):
        sums = StreamingTreeSum()
        for first in range(0, count, ranks):
            sums.add_leaf([sum_tree(torch.stack(leaves[first : first + ranks]))])
        assert torch.equal(sums.compute_total()[0], expected), f"{ranks} ranks"
    if count > 3:
        assert not torch.equal(sum(leaves[1:], leaves[0]), expected), (
            "the order of these sums does not show"
        )


def test_pending_sums_keep_one_sum_of_each_size() -> None:
    sums = StreamingTreeSum()
    for _ in range(13):
        sums.add_leaf([torch.ones(3)])
    assert [level for level, _ in sums._sums] == [3, 2, 0]
    assert sums.compute_total()[0].tolist() == [13.0] * 3


@pytest.mark.parametrize("shape", [(1,), (37,), (5, 1), (7, 33), (3, 4, 5), (2, 70_001), (9, 8192)])
def test_squares_of_a_row_do_not_depend_on_the_rows_beside_it(shape: tuple[int, ...]) -> None:
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    whole = compute_row_squared_norms(gradient)
    cut = random.Random(0).randint(0, shape[0])
    assert torch.equal(
        torch.cat(
            [compute_row_squared_norms(gradient[:cut]), compute_row_squared_norms(gradient[cut:])]
        ),
        whole,
    )
    torch.testing.assert_close(whole, gradient.double().square().view(shape[0], -1).sum(1))


def test_the_norm_is_that_of_all_gradients() -> None:
    gradients = [torch.randn(5, 3), torch.randn(7)]
    expected = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    rows: dict[str, Any] = {"first_rows": [0, 5], "num_rows": 12}
    assert compute_gradient_norm(gradients, gradients, counts=True, **rows) == pytest.approx(
        float(expected), rel=1e-6
    )
    assert compute_gradient_norm(gradients, gradients, counts=False, **rows) == 0


def test_fold_adds_every_column_once() -> None:
    for columns in range(1, 40):
        assert sum_rows_pairwise(torch.arange(columns).double()[None].clone()).tolist() == [
            columns * (columns - 1) / 2
        ]


def answers(
    weights: dict[str, Tensor],
    config: FeedForwardConfig,
    rows: Tensor,
    counts_RL: Tensor,
    dy: Tensor,
) -> dict[str, Tensor]:
    """What the experts with these weights answer, and all gradients."""
    experts = GroupedExperts(
        counts_RL.shape[1], rows.shape[1], weights["down_proj"].shape[1], config
    )
    for name, value in weights.items():
        experts.register_parameter(name, torch.nn.Parameter(value.clone()))
    rows = rows.clone().requires_grad_()
    y = SequentialExperts(experts, rows.dtype)(rows, counts_RL)
    y.backward(dy.clone())
    return {
        "y": y.detach(),
        "dx": rows.grad,  # type: ignore[dict-item]
        **{f"d{n}": p.grad for n, p in experts.named_parameters()},
    }


def part(weights: dict[str, Tensor], experts: slice) -> dict[str, Tensor]:
    return {name: value[experts] for name, value in weights.items()}


@pytest.mark.parametrize("seed", range(12))
def test_an_expert_gives_the_same_bits_with_any_others_beside_it(seed: int) -> None:
    """Two micro-batches through four experts: each on a rank with all experts, or both on two
    ranks with two each.
    """
    choose, _ = random.Random(seed), torch.manual_seed(seed)
    dtype = choose.choice([torch.float32, torch.bfloat16])
    width, inside = choose.randint(1, 70), choose.randint(1, 70)
    choices: list[FeedForwardConfig] = [
        SwigluConfig(),
        GeluConfig(bias=True),
        ClampedSwigluConfig(bias=True),
    ]
    config = choose.choice(choices)
    shapes: dict[str, Any] = {
        name: p.shape for name, p in GroupedExperts(4, width, inside, config).named_parameters()
    }
    weights = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    counts = torch.tensor(
        [[choose.choice([0, 1, choose.randint(2, 40)]) for _ in range(4)] for _ in range(2)]
    )
    x, dy = torch.randn(2, int(counts.sum()), width, dtype=dtype)
    ends = counts.flatten().cumsum(0).tolist()
    groups = [slice(end - n, end) for end, n in zip(ends, counts.flatten().tolist(), strict=True)]
    apart = [
        answers(weights, config, x[: ends[3]], counts[:1], dy[: ends[3]]),
        answers(weights, config, x[ends[3] :], counts[1:], dy[ends[3] :]),
    ]
    whole = {key: torch.cat([one[key] for one in apart]) for key in ("y", "dx")}
    for half in (slice(0, 2), slice(2, 4)):
        mine = groups[half] + groups[4:][half]
        there = torch.cat([torch.arange(len(x))[rows] for rows in mine])
        met = answers(part(weights, half), config, x[there], counts[:, half], dy[there])
        assert torch.equal(met["y"], whole["y"][there])
        assert torch.equal(met["dx"], whole["dx"][there])
        for name in weights:
            expected = (apart[0][f"d{name}"].float() + apart[1][f"d{name}"].float())[half].to(dtype)
            assert torch.equal(met[f"d{name}"], expected), name
