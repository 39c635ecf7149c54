"""The router of a mixture-of-experts layer: scores and choice of the experts of each token.

Invariants:
- Everything is float32, also under bfloat16 weights: top-k turns a rounding error into another expert.

Expert capacity and expert choice are in expert_capacity.py, load balancing in load_balancing.py.
"""

from dataclasses import dataclass
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.moe import GroupLimitedRoutingConfig, MoeConfig

# N tokens, D width, E experts, K experts per token

NO_EXPERT = -1
"""Entry of `experts_NK` where a token visits fewer than K experts."""


@dataclass(frozen=True)
class RouterScores:
    """Router logits, and the logarithm of the scores that become weights."""

    logits_NE: Tensor
    log_scores_NE: Tensor

    def compute_probabilities(self) -> Tensor:
        """Return the scores normalized over the experts, (N, E); sigmoid scores do not sum to 1 on their own."""
        return self.log_scores_NE.softmax(dim=-1)


@dataclass(frozen=True)
class RoutingDecision:
    """The experts of N tokens and their weights in the sum.

    With `partial`, experts_NK may hold NO_EXPERT, with weight 0.
    """

    experts_NK: Tensor
    weights_NK: Tensor
    partial: bool = False


class TopKRouter(nn.Module):
    """Router that scores every expert for every token and selects the best `num_experts_per_tok`."""

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
        """Return the scores of N tokens, float32."""
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
        """Return the experts of each token, best first. The bias affects the choice only, never the weights."""
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
        """Return the weights times `routed_scaling_factor`."""
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
    """Count the assignments to each expert.

    Args:
        experts_NK: Expert of each assignment.
        num_experts: E.
        partial: Whether NO_EXPERT may be among them; it is not counted.

    Returns:
        Counts, int64 (E,).
    """
    if not partial:
        return count_bins(experts_NK.flatten(), num_experts)
    return count_bins(experts_NK.flatten() + 1, num_experts + 1)[1:]


def count_bins(bins_A: Tensor, num_bins: int) -> Tensor:
    """Count the occurrences of each number below `num_bins`, int64.

    Unlike bincount it does not make a GPU wait for the largest number. Integers add up the same in any order.
    """
    counts = torch.zeros(num_bins, dtype=torch.int64, device=bins_A.device)
    return counts.scatter_add_(0, bins_A, torch.ones_like(bins_A))


# N tokens, E experts, G groups


def mask_outside_top_groups(merit_NE: Tensor, groups: GroupLimitedRoutingConfig) -> Tensor:
    """Return True where an expert is in none of the token's best groups, bool (N, E).

    Group-limited routing lets a token travel to few devices. DeepSeek-V2 (arXiv:2405.04434, 2.2.2) ranks a group by its
    best expert, DeepSeek-V3 (arXiv:2412.19437, 2.1.2, released code) by the sum of its best two, balance bias included.
    """
    # DeepSeek's released inference code excludes other groups with −∞. Libraries that give them 0 may choose one of
    # them where the bias makes every allowed score negative.
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
    """Return SparseMixer's two experts (N, 2) and their weights (N, 2), which do not sum to 1.

    Liu 2024, arXiv:2409.12136 (Phi-3.5-MoE), in the deterministic form of evaluation. Each choice takes the best
    remaining expert, weighted by a softmax over the experts close to it. The random choice and the gradient estimate of
    the paper's training are not built; gradients flow through the weights.

    Args:
        logits_NE: Router logits.
        preference_NE: The order of the experts: logits, or scores with a balance bias; −∞ excludes an expert.
        jitter: Experts further than twice this below the best, relatively, are left out of the softmax.
    """
    first_N1 = preference_NE.argmax(dim=-1, keepdim=True)
    open_NE = logits_NE.masked_fill(preference_NE == -torch.inf, -torch.inf)
    weight_N1 = _compute_choice_weight(logits_NE, open_NE, first_N1, jitter)
    second_N1 = preference_NE.scatter(-1, first_N1, -torch.inf).argmax(dim=-1, keepdim=True)
    left_NE = open_NE.scatter(-1, first_N1, -torch.inf)
    weights_N2 = torch.cat([weight_N1, _compute_choice_weight(logits_NE, left_NE, second_N1, jitter)], dim=-1)
    return torch.cat([first_N1, second_N1], dim=-1), weights_N2


def _compute_choice_weight(logits_NE: Tensor, open_NE: Tensor, chosen_N1: Tensor, jitter: float) -> Tensor:
    """Return the chosen expert's share among those whose logit is less than 2 · jitter, relatively, below its own."""
    with torch.no_grad():
        best_N1 = logits_NE.gather(-1, chosen_N1)
        far_NE = (best_N1 - logits_NE) / logits_NE.abs().maximum(best_N1) > 2 * jitter
    return open_NE.masked_fill(far_NE, -torch.inf).softmax(dim=-1).gather(-1, chosen_N1)
