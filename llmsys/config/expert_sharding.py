"""Sharding of the experts of a layer: the ranks they are divided over, the dim, and the ranks that
a token visits.

llmsys/parallel applies it, llmsys/estimate counts with it.
"""

from collections.abc import Sequence
from math import ceil, comb
from typing import assert_never

from llmsys.config.moe import ExpertCapacityConfig, ExpertChoiceConfig, MoeConfig, TokenChoiceConfig

# Largest shard over the mean shard from which on another dim is sharded.
MAX_IMBALANCE = 1.05


def select_shard_dim(shape: Sequence[int], shards: int) -> int:
    """Return the dim along which a stack of experts is sharded.

    FSDP2 pads dim 0 and refuses to pad others: 8 experts on 64 ranks would fill 8 ranks and leave
    56 empty. There each expert is split instead, along the first dim inside it that the shards
    divide.

    Args:
        shape: (experts of a rank, …) of one parameter.
        shards: Ranks that share these experts.

    Returns:
        0 where whole experts make even shards, or no other dim can be divided; else 1 or 2.
    """
    if compute_dim_imbalance(shape[0], shards) <= MAX_IMBALANCE:
        return 0
    return next((dim for dim in range(1, len(shape)) if shape[dim] % shards == 0), 0)


def compute_dim_imbalance(size: int, shards: int) -> float:
    """Return the largest shard of a dim over the mean shard.

    Args:
        size: Size of the dim.
        shards: Number of shards.

    Returns:
        The ratio, at least 1.
    """
    return ceil(size / shards) * shards / size


# Least share of the rows that sending once per rank must save: it costs a second sort, and weights
# travel too.
MIN_SAVED_SHARE = 0.1


def must_send_once_per_rank(config: MoeConfig, ranks: int) -> bool:
    """Return whether a token is sent once to each rank that holds some of its experts, not once to
    each expert.

    Args:
        config: The experts and their routing.
        ranks: Ranks that the experts are assigned to.

    Returns:
        True where that saves enough of the rows.
    """
    return count_rank_visits(config, ranks) <= (1 - MIN_SAVED_SHARE) * config.visits_per_token


def count_rank_visits(config: MoeConfig, ranks: int) -> float:
    """Count the ranks that hold experts of a token, on average, if the router is even.

    Args:
        config: The experts and their routing; K of E experts, possibly of g of G groups.
        ranks: Ranks that the experts are assigned to, in their order; R.

    Returns:
        R · (1 - C(E - E / R, K) / C(E, K)); with groups, of the ranks and experts that g groups
        hold. The visits of experts where each expert chooses its tokens.
    """
    match config.routing:
        case ExpertChoiceConfig():
            return config.visits_per_token
        case TokenChoiceConfig() | ExpertCapacityConfig():
            pass
        case unreachable:
            assert_never(unreachable)
    experts, groups, most = config.num_experts, config.groups, ranks
    per_rank = experts // ranks
    if groups is not None:
        # Groups smaller than a rank's share lie on at most as many ranks as there are groups.
        most = min(
            ranks,
            max(groups.groups_per_token, ranks * groups.groups_per_token // groups.num_groups),
        )
        experts = min(
            experts, max(most * per_rank, experts * groups.groups_per_token // groups.num_groups)
        )
    chosen = config.num_experts_per_tok
    return min(
        most, experts / per_rank * (1 - comb(experts - per_rank, chosen) / comb(experts, chosen))
    )
