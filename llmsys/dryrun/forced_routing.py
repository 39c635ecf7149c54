"""Replace the choice of experts by a forced one, so that rows and bytes of a dry run do not depend
on numbers.

Invariants:
- Every token of every rank chooses by the same rule, so all ranks of the expert axis are alike.
- The gradient of the weights is kept.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmsys.config.moe import MoeConfig
from llmsys.dryrun.known_values import attach_known, leave_fake_mode
from llmsys.errors import ConfigError
from llmsys.model import moe_layer
from llmsys.model.router import NO_EXPERT, RouterScores, RoutingDecision, TopKRouter
from llmsys.parallel.device_mesh import DeviceMeshes

GOLDEN = 0.6180339887498949  # multiples of it modulo 1 are spread evenly (Weyl 1916)


@dataclass
class ForcedRouting:
    """The experts that tokens choose.

    Attributes:
        skew: load of this rank's experts over the mean load; without an expert axis, of the first
            expert.
        ranks: ranks of the expert axis.
        rank: index of this rank on it.
    """

    skew: float
    ranks: int
    rank: int

    def choose_experts(self, num_tokens: int, num_experts: int, per_token: int) -> Tensor:
        """Return the experts of each token, int64 (N, K)."""
        assignments = torch.arange(num_tokens * per_token)
        if self.skew == 1.0:
            return (assignments % num_experts).view(num_tokens, per_token)
        groups = self.ranks if self.ranks > 1 else num_experts
        own_share = self.skew / groups
        others = torch.full((groups,), (1 - own_share) / max(1, groups - 1), dtype=torch.float64)
        others[self.rank] = own_share
        spread = (assignments.double() * GOLDEN) % 1
        group = torch.bucketize(spread, others.cumsum(0), right=True).clamp_(max=groups - 1)
        per_group = num_experts // groups
        return (group * per_group + assignments % per_group).view(num_tokens, per_token)


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
    num_experts = 1 if moe is None else moe.num_experts
    ranks = 1 if meshes.expert is None else meshes.expert.size()
    most = ranks if ranks > 1 else num_experts
    if not 0 < skew <= most:
        where = f"over layout.expert={ranks} ranks" if ranks > 1 else f"of {num_experts} experts"
        raise ConfigError(
            f"--expert-skew {skew:g} is not a load: the busiest {where} has more than 0 and at "
            f"most {most} times the mean. Use --expert-skew 1.0 for even loads, or a number up to "
            f"{most}."
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
                cache[key] = routing.choose_experts(key[0], key[2], key[1])
            # A copy, because later operations may overwrite it.
            values = cache[key].clone()
        attach_known(decision.experts_NK, values)
        return decision

    def choose_forced_tokens(
        scores: RouterScores, factor: float, real_BT: Tensor, _: Tensor
    ) -> RoutingDecision:
        num_experts = scores.log_scores_NE.shape[-1]
        with leave_fake_mode():
            values = _choose_expert_choice(real_BT.shape, num_experts, factor)
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


def _choose_expert_choice(shape: torch.Size, num_experts: int, factor: float) -> Tensor:
    """Return experts (N, K) where each expert takes ceil(factor · T / E) tokens of a row, in
    turn.
    """
    rows, length = shape
    capacity = min(length, -(-int(factor * length) // num_experts))
    taken = num_experts * capacity
    per_token = max(1, -(-taken // length))
    experts = torch.full((per_token * length,), NO_EXPERT, dtype=torch.int64)
    experts[:taken] = torch.arange(taken) // capacity
    return experts.view(per_token, length).T.repeat(rows, 1)
