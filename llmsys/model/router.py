"""The router of a mixture-of-experts layer: how well each expert suits each token, and which ones a token visits.

Everything here is float32, also under bfloat16 weights: top-k turns a rounding error into another expert. What happens
to a crowd, and experts that choose tokens, is in capacity.py and expert_choice.py; evenness is balance.py's business.

Group-limited routing: a token visits experts of its best few groups only, so that it travels to few devices.

DeepSeek-V2 (arXiv:2405.04434, 2.2.2) ranks a group by its best expert, DeepSeek-V3 (arXiv:2412.19437, 2.1.2, released
code) by the sum of its best two, balance bias included.

SparseMixer's two choices (Liu 2024, arXiv:2409.12136; Phi-3.5-MoE), in the deterministic form of evaluation.

Each choice takes the best expert that is left, weighted by a softmax over the experts that come close to it. The
random choice and the estimated gradient of the paper's training are not built; gradients flow through the weights.
"""

from dataclasses import dataclass
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.moe import GroupLimitedRoutingConfig, MoeConfig

# N tokens, D width, E experts, K experts per token

NO_EXPERT = -1
"""Stands in `experts_NK` where a token visits fewer than K experts."""


@dataclass(frozen=True)
class RouterScores:
    """How well every expert suits every token: the router's logits, and the logarithm of what becomes weights."""

    logits_NE: Tensor
    log_scores_NE: Tensor

    def compute_probabilities(self) -> Tensor:
        """Scores normalised over the experts, (N, E); bare sigmoid scores do not sum to 1 on their own."""
        return self.log_scores_NE.softmax(dim=-1)


@dataclass(frozen=True)
class RoutingDecision:
    """The decision for N tokens: experts and their weights in the sum.

    With `partial`, experts_NK may hold NO_EXPERT, whose weight is 0.
    """

    experts_NK: Tensor
    weights_NK: Tensor
    partial: bool = False


class TopKRouter(nn.Module):
    """Scores every expert for every token and keeps the best `num_experts_per_tok`."""

    def __init__(self, hidden_size: int, config: MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.num_experts)) if config.router_bias else None
        nn.init.normal_(self.weight, std=hidden_size**-0.5)

    def forward(self, x_ND: Tensor, balance_bias_E: Tensor | None = None) -> RoutingDecision:
        """Score and choose; see `select_experts`."""
        return self.select_experts(self.compute_scores(x_ND), balance_bias_E)

    def compute_scores(self, x_ND: Tensor) -> RouterScores:
        """Scores of N tokens, float32."""
        bias_E = None if self.bias is None else self.bias.float()
        logits_NE = F.linear(x_ND.float(), self.weight.float(), bias_E)
        match self.config.score:
            case "sigmoid":
                return RouterScores(logits_NE, F.logsigmoid(logits_NE))
            case "softmax" | "sparsemixer":
                return RouterScores(logits_NE, logits_NE.log_softmax(dim=-1))
            case unreachable:
                assert_never(unreachable)

    def select_experts(self, scores: RouterScores, balance_bias_E: Tensor | None = None) -> RoutingDecision:
        """The experts of each token, best first. The bias is added for the choice only, never to the weights."""
        preference_NE = self._compute_preference(scores, balance_bias_E)
        match self.config.score:
            case "softmax" | "sigmoid":
                experts_NK = preference_NE.topk(self.config.num_experts_per_tok, dim=-1).indices
                log_scores_NK = scores.log_scores_NE.gather(-1, experts_NK)
                # softmax(log s) = s / sum(s): normalised without a division that could be 0/0, and without an epsilon
                # that lets the router shrink all weights at once by driving its scores towards zero (Megatron-LM
                # #1545).
                weights_NK = log_scores_NK.softmax(dim=-1) if self.config.norm_topk_prob else log_scores_NK.exp()
            case "sparsemixer":
                experts_NK, weights_NK = select_sparsemixer_top2(scores.logits_NE, preference_NE, self.config.jitter)
            case unreachable:
                assert_never(unreachable)
        return RoutingDecision(experts_NK, self.scale_weights(weights_NK))

    def scale_weights(self, weights_NK: Tensor) -> Tensor:
        """Weights times `routed_scaling_factor`."""
        factor = self.config.routed_scaling_factor
        return weights_NK if factor == 1.0 else weights_NK * factor

    @torch.no_grad()
    def _compute_preference(self, scores: RouterScores, balance_bias_E: Tensor | None) -> Tensor:
        groups = self.config.groups
        # Without a bias the logits order the experts as the scores do, and do not saturate into ties.
        preference_NE = scores.logits_NE
        if balance_bias_E is not None:
            preference_NE = scores.log_scores_NE.exp() + balance_bias_E
        if groups is None:
            return preference_NE
        merit_NE = scores.log_scores_NE.exp() if balance_bias_E is None else preference_NE
        return preference_NE.masked_fill(mask_outside_top_groups(merit_NE, groups), -torch.inf)


def count_tokens(experts_NK: Tensor, num_experts: int, *, partial: bool = False) -> Tensor:
    """How many of the assignments go to each expert, int64 of shape (E,). `partial`: NO_EXPERT may be among them."""
    if not partial:
        return count_bins(experts_NK.flatten(), num_experts)
    return count_bins(experts_NK.flatten() + 1, num_experts + 1)[1:]


def count_bins(bins_A: Tensor, num_bins: int) -> Tensor:
    """How often each number below `num_bins` occurs, int64.

    Unlike bincount it does not make a GPU wait to learn the largest number; integers add up the same in any order.
    """
    counts = torch.zeros(num_bins, dtype=torch.int64, device=bins_A.device)
    return counts.scatter_add_(0, bins_A, torch.ones_like(bins_A))


# N tokens, E experts, G groups


def mask_outside_top_groups(merit_NE: Tensor, groups: GroupLimitedRoutingConfig) -> Tensor:
    """True where an expert belongs to none of the token's best groups, bool (N, E).

    DeepSeek's released inference code gives such experts −∞; libraries that give them 0 may choose one of them where
    bias makes every allowed merit negative.
    """
    merit_NGM = merit_NE.unflatten(-1, (groups.num_groups, -1))
    match groups.score:
        case "max":
            merit_NG = merit_NGM.amax(-1)
        case "top2":
            merit_NG = merit_NGM.topk(2, dim=-1).values.sum(-1)
        case unreachable:
            assert_never(unreachable)
    best = merit_NG.topk(groups.groups_per_token, dim=-1).indices
    outside_NG = torch.ones_like(merit_NG, dtype=torch.bool).scatter_(-1, best, False)
    return outside_NG.repeat_interleave(merit_NGM.shape[-1], dim=-1, output_size=merit_NE.shape[-1])


# N tokens, E experts


def select_sparsemixer_top2(logits_NE: Tensor, preference_NE: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Experts (N, 2) and their weights (N, 2), which do not sum to 1.

    `preference_NE` orders the experts (the logits, or scores with a balance bias); −∞ closes an expert.
    """
    first_N1 = preference_NE.argmax(dim=-1, keepdim=True)
    open_NE = logits_NE.masked_fill(preference_NE == -torch.inf, -torch.inf)
    weight_N1 = _compute_choice_weight(logits_NE, open_NE, first_N1, jitter)
    second_N1 = preference_NE.scatter(-1, first_N1, -torch.inf).argmax(dim=-1, keepdim=True)
    left_NE = open_NE.scatter(-1, first_N1, -torch.inf)
    weights_N2 = torch.cat([weight_N1, _compute_choice_weight(logits_NE, left_NE, second_N1, jitter)], dim=-1)
    return torch.cat([first_N1, second_N1], dim=-1), weights_N2


def _compute_choice_weight(logits_NE: Tensor, open_NE: Tensor, chosen_N1: Tensor, jitter: float) -> Tensor:
    """The chosen expert's share among those whose logit is less than 2 · jitter, relatively, below its own."""
    with torch.no_grad():
        best_N1 = logits_NE.gather(-1, chosen_N1)
        far_NE = (best_N1 - logits_NE) / logits_NE.abs().maximum(best_N1) > 2 * jitter
    return open_NE.masked_fill(far_NE, -torch.inf).softmax(dim=-1).gather(-1, chosen_N1)
