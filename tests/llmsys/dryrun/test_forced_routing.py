"""Laws of the forced choice of experts: loads are even, or as skewed as asked, and a token visits
as many ranks as a router with even loads makes it visit.
"""

import pytest
import torch
from torch import Tensor

from llmsys.config.expert_sharding import count_rank_visits
from llmsys.config.moe import GroupLimitedRoutingConfig, MoeConfig
from llmsys.dryrun.forced_routing import ForcedRouting

TOKENS = 8_192


def count_visits(experts_NK: Tensor, per_rank: int) -> float:
    """The mean number of ranks that hold a token's experts, counted token by token."""
    rows = (experts_NK // per_rank).tolist()
    return sum(len(set(row)) for row in rows) / len(rows)


@pytest.mark.parametrize(("experts", "chosen"), [(8, 2), (128, 8), (60, 4), (7, 5), (6, 6)])
def test_even_loads_differ_by_one_token_at_most_and_a_token_visits_different_experts(
    experts: int, chosen: int
) -> None:
    found = ForcedRouting(1.0, ranks=1, rank=0).choose_experts(101, experts, chosen)
    counts = torch.bincount(found.flatten(), minlength=experts)
    assert found.shape == (101, chosen)
    assert int(counts.max() - counts.min()) <= 1
    assert all(len(set(row)) == chosen for row in found.tolist())


@pytest.mark.parametrize(
    ("experts", "chosen", "ranks"), [(128, 8, 8), (64, 8, 4), (60, 4, 4), (8, 2, 8)]
)
def test_a_token_visits_as_many_ranks_as_an_even_router_makes_it_visit(
    experts: int, chosen: int, ranks: int
) -> None:
    moe = MoeConfig(num_experts=experts, num_experts_per_tok=chosen, moe_intermediate_size=8)
    found = ForcedRouting(1.0, ranks, rank=0).choose_experts(TOKENS, experts, chosen)
    assert count_visits(found, experts // ranks) == pytest.approx(
        count_rank_visits(moe, ranks), rel=0.01
    )


def test_experts_of_a_token_are_of_as_many_groups_as_the_model_allows() -> None:
    """DeepSeek-V3: 8 of 256 experts, of 4 of 8 groups."""
    groups = GroupLimitedRoutingConfig(num_groups=8, groups_per_token=4)
    moe = MoeConfig(num_experts=256, num_experts_per_tok=8, moe_intermediate_size=8, groups=groups)
    found = ForcedRouting(1.0, 64, rank=0).choose_experts(TOKENS, 256, 8, groups)
    assert max(len(set(row)) for row in (found // 32).tolist()) == 4
    assert all(len(set(row)) == 8 for row in found.tolist())
    counts = torch.bincount(found.flatten(), minlength=256)
    assert int(counts.max() - counts.min()) <= 4
    assert count_visits(found, 4) == pytest.approx(count_rank_visits(moe, 64), rel=0.01)


@pytest.mark.parametrize(("ranks", "rank", "own"), [(4, 2, slice(4, 6)), (1, 0, slice(0, 1))])
@pytest.mark.parametrize("skew", [0.5, 2.0, 4.0])
def test_this_ranks_experts_have_the_load_that_is_asked(
    ranks: int, rank: int, own: slice, skew: float
) -> None:
    experts = ForcedRouting(skew, ranks, rank).choose_experts(4_000, 8, 2)
    counts = torch.bincount(experts.flatten(), minlength=8).float()
    assert float(counts[own].mean() / counts.mean()) == pytest.approx(skew, rel=0.01)
    others = torch.cat([counts[: own.start], counts[own.stop :]])
    assert float(others.max()) <= 1.1 * float(others.min())
    assert bool((experts[:, 0] != experts[:, 1]).all())
