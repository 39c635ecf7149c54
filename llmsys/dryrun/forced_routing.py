"""Replace the choice of experts by a forced one, so that rows and bytes of a dry run do not depend
on numbers.

Invariants:
- Every token of every rank chooses by the same rule, so all ranks of the expert axis are alike.
- The gradient of the weights is kept.
"""

from dataclasses import dataclass
from math import ceil, gcd
from typing import Any

import torch
from torch import Tensor

from llmsys.config.moe import GroupLimitedRoutingConfig, MoeConfig
from llmsys.dryrun.known_values import attach_known, leave_fake_mode
from llmsys.errors import ConfigError
from llmsys.model import moe_layer
from llmsys.model.router import NO_EXPERT, RouterScores, RoutingDecision, TopKRouter
from llmsys.parallel.device_mesh import DeviceMeshes

SEED = 20_261_129
# Tokens whose experts are drawn from one order of the experts, where loads are skewed: their
# counts are then exact to one.
TOKENS_PER_ORDER = 64


@dataclass
class ForcedRouting:
    """The experts that tokens choose: drawn at random with a fixed seed, with loads that are given.

    Attributes:
        skew: load of this rank's experts over the mean load; without an expert axis, of the first
            expert.
        ranks: ranks of the expert axis.
        rank: index of this rank on it.
    """

    skew: float
    ranks: int
    rank: int

    def choose_experts(
        self,
        num_tokens: int,
        num_experts: int,
        per_token: int,
        groups: GroupLimitedRoutingConfig | None = None,
    ) -> Tensor:
        """Draw the experts of each token.

        Args:
            num_tokens: Tokens, N.
            num_experts: Experts, E.
            per_token: Experts of a token, K, which are different.
            groups: Groups that the experts of a token are limited to. Skewed loads ignore them.

        Returns:
            int64 (N, K). Even loads differ by one token at most, with groups by as many as a token
            has groups.
        """
        generator = torch.Generator().manual_seed(SEED)
        if self.skew != 1.0:
            return self._draw_skewed_experts(num_tokens, num_experts, per_token, generator)
        if groups is None:
            return draw_balanced_choices(num_tokens, num_experts, per_token, generator)
        return _draw_grouped_experts(num_tokens, num_experts, per_token, groups, generator)

    def _draw_skewed_experts(
        self, num_tokens: int, num_experts: int, per_token: int, generator: torch.Generator
    ) -> Tensor:
        """Draw by systematic sampling: an expert has an interval as long as the share of tokens
        that choose it, and a token chooses the experts at K points a distance of 1 apart (Madow
        1949).
        """
        own = num_experts // self.ranks if self.ranks > 1 else 1
        share = per_token * self.skew / num_experts
        rest = (per_token - own * share) / max(1, num_experts - own)
        shares_E = torch.full((num_experts,), rest, dtype=torch.float64)
        shares_E[self.rank * own : (self.rank + 1) * own] = share
        orders = -(-num_tokens // TOKENS_PER_ORDER)
        order_OE = torch.rand(orders, num_experts, generator=generator).argsort(dim=1)
        ends_OE = shares_E[order_OE].cumsum(1)
        starts_O1 = torch.rand(orders, 1, generator=generator, dtype=torch.float64)
        # Tokens of one order start in turn, so every expert gets its share of them, rounded.
        starts_OS = (starts_O1 + torch.arange(TOKENS_PER_ORDER)) / TOKENS_PER_ORDER
        points_OSK = starts_OS[:, :, None] + torch.arange(per_token)
        found = torch.searchsorted(ends_OE, points_OSK.flatten(1), right=True)
        experts = order_OE.gather(1, found.clamp_(max=num_experts - 1))
        return experts.view(-1, per_token)[:num_tokens]


def draw_balanced_choices(
    num_tokens: int, num_choices: int, per_token: int, generator: torch.Generator
) -> Tensor:
    """Draw different choices for each token, so that all choices are taken equally often.

    Tokens take their choices from a row of random permutations, one after another. Where a token
    takes the end of one and the beginning of the next, that beginning has none of that end.

    Args:
        num_tokens: Tokens, N.
        num_choices: Numbers that are chosen from, E.
        per_token: Choices of a token, K of E.
        generator: The source of randomness.

    Returns:
        int64 (N, K) of 0 to E - 1. A token's choices are a random subset; the counts of two choices
        differ by one at most.
    """
    # After as many permutations a token begins where a permutation does.
    cycle = per_token // gcd(num_choices, per_token)
    rows = -(-num_tokens * per_token // (cycle * num_choices))
    permutations: list[Tensor] = []
    for number in range(cycle):
        begun = number * num_choices % per_token
        keys_SE = torch.rand(rows, num_choices, generator=generator)
        if begun:
            missing = per_token - begun
            taken_SE = permutations[-1][:, num_choices - begun :]
            order_SE = keys_SE.scatter_add(1, taken_SE, torch.ones(taken_SE.shape)).argsort(dim=1)
            rest_SE = order_SE[:, missing:]
            shuffled = torch.rand(rest_SE.shape, generator=generator).argsort(dim=1)
            permutations.append(
                torch.cat([order_SE[:, :missing], rest_SE.gather(1, shuffled)], dim=1)
            )
        else:
            permutations.append(keys_SE.argsort(dim=1))
    return torch.stack(permutations, dim=1).view(-1, per_token)[:num_tokens]


def _draw_grouped_experts(
    num_tokens: int,
    num_experts: int,
    per_token: int,
    groups: GroupLimitedRoutingConfig,
    generator: torch.Generator,
) -> Tensor:
    """Draw a token's experts from the groups that it chooses.

    As many tokens as there are groups share a choice within their groups, and take each group in
    turn, so groups have equal loads.
    """
    num_groups = groups.num_groups
    size = num_experts // num_groups
    sets = -(-num_tokens // num_groups)
    within_SK = draw_balanced_choices(sets, groups.groups_per_token * size, per_token, generator)
    order_SG = torch.rand(sets, num_groups, generator=generator).argsort(dim=1)
    turn_SGK = (within_SK // size)[:, None] + torch.arange(num_groups)[:, None]
    group_SGK = order_SG.gather(1, (turn_SGK % num_groups).flatten(1)).view(turn_SGK.shape)
    experts_SGK = group_SGK * size + (within_SK % size)[:, None]
    return experts_SGK.view(-1, per_token)[:num_tokens]


def build_forced_routing(meshes: DeviceMeshes, skew: float, moe: MoeConfig | None) -> ForcedRouting:
    """Build the forced choice of experts of this rank.

    Args:
        meshes: The sub-meshes.
        skew: Load of this rank's experts over the mean.
        moe: The section `model.moe`; None: a dense model.

    Returns:
        The choice, which gives every rank's experts their number of rows.

    Raises:
        ConfigError: The skew is larger than all tokens on this rank's experts, or there are no
            experts.
    """
    if moe is None and skew != 1:
        raise ConfigError(
            f"--expert-skew {skew:g} is for experts, and the model is dense. Leave it out."
        )
    ranks = 1 if meshes.expert is None else meshes.expert.size()
    # A token chooses an expert at most once.
    most = 1.0 if moe is None else moe.num_experts / moe.num_experts_per_tok
    if ranks > 1:
        most = min(most, ranks)
    if not 0 < skew <= most:
        experts = 1 if moe is None else moe.num_experts
        where = f"over layout.expert={ranks} ranks" if ranks > 1 else f"of {experts} experts"
        raise ConfigError(
            f"--expert-skew {skew:g} is not a load: the busiest {where} has more than 0 and at "
            f"most {most:g} times the mean. Use --expert-skew 1.0 for even loads, or a number up "
            f"to {most:g}."
        )
    return ForcedRouting(
        skew, ranks, 0 if meshes.expert is None else meshes.expert.get_local_rank()
    )


def replace_routing(routing: ForcedRouting) -> None:
    """Make every router of this process choose by a forced routing.

    Args:
        routing: The forced choice of experts.
    """
    select_experts = TopKRouter.select_experts
    cache: dict[tuple[int, ...], Tensor] = {}

    def select_forced_experts(
        self: TopKRouter, scores: RouterScores, *arguments: Any
    ) -> RoutingDecision:
        decision = select_experts(self, scores, *arguments)
        key = (*decision.experts_NK.shape, self.config.num_experts)
        with leave_fake_mode():
            if key not in cache:
                cache[key] = routing.choose_experts(key[0], key[2], key[1], self.config.groups)
            # A copy, because later operations may overwrite it.
            values = cache[key].clone()
        attach_known(decision.experts_NK, values)
        return decision

    def choose_forced_tokens(
        scores: RouterScores, factor: float, real_BT: Tensor, _: Tensor
    ) -> RoutingDecision:
        num_experts = scores.log_scores_NE.shape[-1]
        with leave_fake_mode():
            rows, tokens = real_BT.shape
            values = choose_for_experts((rows, tokens), num_experts, factor)
        experts_NK = real_BT.new_empty(values.shape, dtype=torch.int64)
        attach_known(experts_NK, values)
        kept_NK = experts_NK >= 0
        weights_NK = (
            scores.log_scores_NE.gather(-1, experts_NK.clamp(min=0))
            .exp()
            .masked_fill(~kept_NK, 0.0)
        )
        return RoutingDecision(experts_NK, weights_NK, partial=True)

    TopKRouter.select_experts = select_forced_experts  # type: ignore[assignment,method-assign]
    vars(moe_layer)["choose_tokens"] = choose_forced_tokens


def choose_for_experts(shape: tuple[int, int], num_experts: int, factor: float) -> Tensor:
    """Let each expert take ceil(factor · T / E) tokens of a row, in turn (Zhou 2022).

    Args:
        shape: Rows and their tokens, (B, T).
        num_experts: E.
        factor: Experts of a token, on average.

    Returns:
        int64 (N, K) with NO_EXPERT where a token has fewer than K experts.
    """
    rows, length = shape
    # 1e-9 is far below one token and far above the rounding of the product.
    capacity = min(length, ceil(factor * length / num_experts - 1e-9))
    taken = num_experts * capacity
    per_token = max(1, -(-taken // length))
    experts = torch.full((per_token * length,), NO_EXPERT, dtype=torch.int64)
    experts[:taken] = torch.arange(taken) // capacity
    return experts.view(per_token, length).T.repeat(rows, 1)
