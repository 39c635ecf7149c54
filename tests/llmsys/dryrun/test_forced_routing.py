"""Laws of the forced choice of experts: loads are even, or as skewed as asked."""

import pytest
import torch

from llmsys.dryrun.forced_routing import ForcedRouting


def test_even_loads_differ_by_one_token_at_most_and_a_token_visits_different_experts() -> None:
    experts = ForcedRouting(1.0, ranks=4, rank=1).choose_experts(101, 8, 2)
    counts = torch.bincount(experts.flatten(), minlength=8)
    assert int(counts.max() - counts.min()) <= 1
    assert bool((experts[:, 0] != experts[:, 1]).all())


@pytest.mark.parametrize(("ranks", "rank", "own"), [(4, 2, slice(4, 6)), (1, 0, slice(0, 1))])
@pytest.mark.parametrize("skew", [0.5, 2.0])
def test_this_ranks_experts_have_the_load_that_is_asked(
    ranks: int, rank: int, own: slice, skew: float
) -> None:
    experts = ForcedRouting(skew, ranks, rank).choose_experts(4_000, 8, 2)
    counts = torch.bincount(experts.flatten(), minlength=8).float()
    assert float(counts[own].mean() / counts.mean()) == pytest.approx(skew, rel=0.02)
    others = torch.cat([counts[: own.start], counts[own.stop :]])
    assert float(others.max() / others.min()) < 1.1
