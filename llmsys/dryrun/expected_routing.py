"""The experts that the tokens of a rank choose in a dry run, and what is left of them under a
capacity.

Invariants:
- The choice is the one that a dry run forces; capacities follow from the formulas of the papers.
"""

from itertools import cycle
from math import ceil
from typing import assert_never

import torch
from torch import Tensor

from llmsys.config.moe import (
    ExpertCapacityConfig,
    ExpertChoiceConfig,
    MoeConfig,
    TokenChoiceConfig,
)
from llmsys.dryrun.expected_messages import RankContext
from llmsys.dryrun.forced_routing import ForcedRouting, choose_for_experts
from llmsys.model.router import NO_EXPERT

# Below a token, above the rounding of a product: 1.1 · 50 is 55.
ROUNDING = 1e-9


def choose_expected_experts(context: RankContext, moe: MoeConfig) -> Tensor:
    """Return the experts of each token of a micro-batch of a rank.

    Args:
        context: The rank and its config.
        moe: The section `model.moe`.

    Returns:
        int64 (N, K), NO_EXPERT where a token visits fewer than K experts.
    """
    layout = context.layout
    match moe.routing:
        case ExpertChoiceConfig(factor=factor):
            shape = context.sequences, context.length
            return choose_for_experts(shape, moe.num_experts, factor)
        case TokenChoiceConfig() | ExpertCapacityConfig():
            pass
        case unreachable:
            assert_never(unreachable)
    tokens = context.sequences * context.length // (layout.tensor * layout.context)
    ranks = layout.expert
    place = context.list_ranks("expert").index(context.rank) if ranks > 1 else 0
    routing = ForcedRouting(context.expert_skew, ranks, place)
    chosen_NK = routing.choose_experts(tokens, moe.num_experts, moe.num_experts_per_tok, moe.groups)
    if isinstance(moe.routing, ExpertCapacityConfig):
        groups = list_capacity_groups(context, moe.routing.scope) * context.sequences
        return drop_beyond_capacity(chosen_NK, groups, moe.routing.factor, moe.num_experts)
    return chosen_NK


def count_routed_rows(context: RankContext, moe: MoeConfig) -> int:
    """Count the rows that the experts of a rank compute in a forward pass of one layer.

    Args:
        context: The rank and its config.
        moe: The section `model.moe`.

    Returns:
        Assignments of tokens to this rank's experts. Every rank is taken to choose as this one
        does.
    """
    chosen_NK = choose_expected_experts(context, moe)
    ranks = context.layout.expert
    if ranks == 1:
        return int((chosen_NK >= 0).sum())
    own = moe.num_experts // ranks
    first = own * context.list_ranks("expert").index(context.rank)
    return ranks * int(((chosen_NK >= first) & (chosen_NK < first + own)).sum())


def list_capacity_groups(context: RankContext, scope: str) -> list[int]:
    """Return the tokens of each group of a row that shares the capacity of an expert.

    Args:
        context: The rank and its config.
        scope: `scope` of the routing: a sequence, or a document.

    Returns:
        Lengths that add up to a row.
    """
    left = context.length
    if scope == "sequence" or context.config.batch.attention_scope != "document":
        return [left]
    groups = []
    for size in cycle(context.documents or (left,)):
        groups.append(min(size, left))
        left -= groups[-1]
        if not left:
            return groups
    raise AssertionError("an endless cycle of lengths fills a row")


def drop_beyond_capacity(
    chosen_NK: Tensor, groups: list[int], factor: float, num_experts: int
) -> Tensor:
    """Drop what is beyond the capacity of experts: each keeps the first ceil(factor · T · K / E) of
    a group (Lepikhin 2020, 2.2).

    Args:
        chosen_NK: Experts of each token.
        groups: Tokens of each group, T, in the order of the tokens.
        factor: Capacity over an even share.
        num_experts: E.

    Returns:
        The experts that are left, NO_EXPERT in the place of others.
    """
    per_token = chosen_NK.shape[1]
    kept: list[Tensor] = []
    for part_NK in chosen_NK.split(groups):
        size = len(part_NK)
        most = min(size, ceil(factor * size * per_token / num_experts - ROUNDING))
        flat_A = part_NK.flatten()
        counts_AE = torch.nn.functional.one_hot(flat_A, num_experts).cumsum(0)
        place_A = counts_AE.gather(1, flat_A[:, None])[:, 0]
        kept.append(flat_A.where(place_A <= most, NO_EXPERT).view(size, per_token))
    return torch.cat(kept)
