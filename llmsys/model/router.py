"""The router of a mixture-of-experts layer: scores and choice of the experts of each token.

Expert capacity drops tokens as GShard does (Lepikhin 2020, arXiv:2006.16668, 2.2); expert choice is
that of Zhou 2022 (arXiv:2202.09368). Load balancing is in load_balancing.py.

Invariants:
- Everything is float32, also under bfloat16 weights: top-k turns a rounding error into another
  expert.
- Capacity is counted per sequence, or per document of it, so that routing does not depend on ranks
  or micro-batches.
- Assignments are admitted by position, and a token's best expert before its others. GShard admits
  every first choice before any second one; then a token's output would depend on later tokens,
  which a decoder must not see.
- Expert choice looks at all positions of a sequence: for training and encoders, not for generation
  (KeyValueCache raises). It flatters a decoder's evaluation loss.
"""

from dataclasses import dataclass
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.moe import GroupLimitedRoutingConfig, MoeConfig
from llmsys.model.attention_mask import compute_document_positions
from llmsys.model.host_read import read_once

# N tokens, D width, E experts, K experts per token

# Entry of `experts_NK` where a token visits fewer than K experts.
NO_EXPERT = -1


@dataclass(frozen=True)
class RouterScores:
    """Router logits, and the logarithm of the scores that become weights."""

    logits_NE: Tensor
    log_scores_NE: Tensor

    def compute_probabilities(self) -> Tensor:
        """Return the scores normalized over the experts, (N, E); sigmoid scores do not sum to 1
        on their own.
        """
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
    """Router that scores every expert for every token and selects the best
    `num_experts_per_tok`.
    """

    def __init__(self, hidden_size: int, config: MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.num_experts)) if config.router_bias else None
        nn.init.normal_(self.weight, std=hidden_size**-0.5)

    def forward(self, x_ND: Tensor, balance_bias_E: Tensor | None = None) -> RoutingDecision:
        """Score and choose; see `select_experts`.

        Args:
            x_ND: states of the tokens.
            balance_bias_E: added to the scores that choose, not to the weights; None: none.
        """
        return self.select_experts(self.compute_scores(x_ND), balance_bias_E)

    def compute_scores(self, x_ND: Tensor) -> RouterScores:
        """Return the score of each expert for each token.

        Args:
            x_ND: states of the tokens.

        Returns:
            Logits and logarithms of scores, (N, E) float32.
        """
        bias_E = None if self.bias is None else self.bias.float()
        logits_NE = F.linear(x_ND.float(), self.weight.float(), bias_E)
        match self.config.score:
            case "sigmoid":
                return RouterScores(logits_NE, F.logsigmoid(logits_NE))
            case "softmax" | "sparsemixer":
                return RouterScores(logits_NE, logits_NE.log_softmax(dim=-1))
            case unreachable:
                assert_never(unreachable)

    def select_experts(
        self, scores: RouterScores, balance_bias_E: Tensor | None = None
    ) -> RoutingDecision:
        """Return the experts of each token, best first.

        Args:
            scores: from `compute_scores`.
            balance_bias_E: added to the scores that choose, never to the weights; None: none.
        """
        preference_NE = self._compute_preference(scores, balance_bias_E)
        match self.config.score:
            case "softmax" | "sigmoid":
                experts_NK = preference_NE.topk(self.config.num_experts_per_tok, dim=-1).indices
                log_scores_NK = scores.log_scores_NE.gather(-1, experts_NK)
                # softmax(log s) = s / sum(s): normalised without a division that could be 0/0, and
                # without an epsilon that lets the router shrink all weights at once by driving its
                # scores towards zero (Megatron-LM #1545).
                weights_NK = (
                    log_scores_NK.softmax(dim=-1)
                    if self.config.norm_topk_prob
                    else log_scores_NK.exp()
                )
            case "sparsemixer":
                experts_NK, weights_NK = select_sparsemixer_top2(
                    scores.logits_NE, preference_NE, self.config.jitter
                )
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
        # Without a bias the logits order the experts as the scores do, and do not saturate into
        # ties.
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
    # Bin 0 takes NO_EXPERT, which is -1.
    return count_bins(experts_NK.flatten() + 1, num_experts + 1)[1:]


def count_bins(bins_A: Tensor, num_bins: int) -> Tensor:
    """Count the occurrences of each number.

    Unlike `torch.bincount` it does not make a GPU wait for the largest number. Integers add up
    the same in any order.

    Args:
        bins_A: Numbers in [0, num_bins), int64.
        num_bins: Number of bins.

    Returns:
        int64 (num_bins,).
    """
    counts = torch.zeros(num_bins, dtype=torch.int64, device=bins_A.device)
    return counts.scatter_add_(0, bins_A, torch.ones_like(bins_A))


# N tokens, E experts, G groups


def mask_outside_top_groups(merit_NE: Tensor, groups: GroupLimitedRoutingConfig) -> Tensor:
    """Return True where an expert is in none of the token's best groups.

    Group-limited routing lets a token travel to few devices. DeepSeek-V2 (arXiv:2405.04434,
    2.2.2) ranks a group by its best expert, DeepSeek-V3 (arXiv:2412.19437, 2.1.2, released code)
    by the sum of its best two, balance bias included.

    Args:
        merit_NE: What experts are ranked by.
        groups: The section `model.moe.groups`.

    Returns:
        bool (N, E).
    """
    # DeepSeek's released inference code excludes other groups with −∞. Libraries that give them 0
    # may choose one of them where the bias makes every allowed score negative.
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


def select_sparsemixer_top2(
    logits_NE: Tensor, preference_NE: Tensor, jitter: float
) -> tuple[Tensor, Tensor]:
    """Return SparseMixer's two experts (N, 2) and their weights (N, 2), which do not sum to 1.

    Liu 2024, arXiv:2409.12136 (Phi-3.5-MoE), in the deterministic form of evaluation. Each choice
    takes the best remaining expert, weighted by a softmax over the experts close to it. The random
    choice and the gradient estimate of the paper's training are not built; gradients flow through
    the weights.

    Args:
        logits_NE: Router logits.
        preference_NE: The order of the experts: logits, or scores with a balance bias; −∞ excludes
            an expert.
        jitter: Experts further than twice this below the best, relatively, are left out of the
            softmax.
    """
    first_N1 = preference_NE.argmax(dim=-1, keepdim=True)
    open_NE = logits_NE.masked_fill(preference_NE == -torch.inf, -torch.inf)
    weight_N1 = _compute_choice_weight(logits_NE, open_NE, first_N1, jitter)
    second_N1 = preference_NE.scatter(-1, first_N1, -torch.inf).argmax(dim=-1, keepdim=True)
    left_NE = open_NE.scatter(-1, first_N1, -torch.inf)
    weights_N2 = torch.cat(
        [weight_N1, _compute_choice_weight(logits_NE, left_NE, second_N1, jitter)], dim=-1
    )
    return torch.cat([first_N1, second_N1], dim=-1), weights_N2


def _compute_choice_weight(
    logits_NE: Tensor, open_NE: Tensor, chosen_N1: Tensor, jitter: float
) -> Tensor:
    """Return the chosen expert's share among those whose logit is less than 2 · jitter,
    relatively, below its own.
    """
    with torch.no_grad():
        best_N1 = logits_NE.gather(-1, chosen_N1)
        far_NE = (best_N1 - logits_NE) / logits_NE.abs().maximum(best_N1) > 2 * jitter
    return open_NE.masked_fill(far_NE, -torch.inf).softmax(dim=-1).gather(-1, chosen_N1)


# B rows (sequences), T positions, N = B * T tokens, K experts per token, E experts, A = N * K
# assignments


def drop_overflow(
    routing: RoutingDecision, factor: float, num_experts: int, real_BT: Tensor, positions_BT: Tensor
) -> RoutingDecision:
    """Drop the assignments beyond the capacity of an expert.

    An expert keeps the first ceil(factor · T · K / E) assignments of each group. A group is a
    sequence, or a document of it; T counts its real tokens only.

    Args:
        routing: Experts and weights of each token.
        factor: Capacity over an even share.
        num_experts: Experts of the layer, E.
        real_BT: False at padding, which visits no expert and uses no capacity.
        positions_BT: Positions, counted from 0 in each group.

    Returns:
        The routing in which dropped assignments are NO_EXPERT with weight 0.
    """
    experts_NK = routing.experts_NK
    first_BT = _find_first_tokens(positions_BT)
    capacity_BT = _compute_group_capacity(
        first_BT, real_BT, factor * experts_NK.shape[1] / num_experts
    )
    # One queue per group and expert; padding's is without capacity.
    queue_NK = first_BT.view(-1, 1) * num_experts + experts_NK
    queue_A = queue_NK.where(real_BT.view(-1, 1), -1).flatten()
    kept_NK = _compute_queue_positions(queue_A).view_as(experts_NK) < capacity_BT.where(
        real_BT, 0
    ).view(-1, 1)
    return RoutingDecision(
        experts_NK.where(kept_NK, NO_EXPERT),
        routing.weights_NK.masked_fill(~kept_NK, 0.0),
        partial=True,
    )


def _find_first_tokens(positions_BT: Tensor) -> Tensor:
    """Return the first token of each token's group, counted over all rows, (B, T)."""
    return (
        torch.arange(positions_BT.numel(), device=positions_BT.device).view_as(positions_BT)
        - positions_BT
    )


def _compute_group_capacity(first_BT: Tensor, real_BT: Tensor, per_token: float) -> Tensor:
    """Return the real tokens that an expert takes at most in the group of each token, (B, T)."""
    tokens_N = (
        torch.zeros_like(first_BT)
        .flatten()
        .scatter_add_(0, first_BT.flatten(), real_BT.flatten().long())
    )
    return compute_capacity(tokens_N, per_token).minimum(tokens_N)[first_BT]


def compute_capacity(tokens_B: Tensor, per_token: float) -> Tensor:
    """Return ceil(tokens · per_token), tolerant of float64 rounding: 1.1 · 50 is 55, not 56.

    Args:
        tokens_B: Tokens of each group.
        per_token: Capacity per token.

    Returns:
        int64, in the shape of `tokens_B`.
    """
    # 1e-9 is far below one token and far above the rounding error of the product.
    return (tokens_B.double() * per_token - 1e-9).ceil().long()


def _compute_queue_positions(queue_A: Tensor) -> Tensor:
    """Count the earlier assignments in the same queue, (A,)."""
    # Stable, so that a queue is in the order of positions.
    order_A = queue_A.argsort(stable=True)
    position_A = torch.empty_like(queue_A)
    # a queue is a run of equal numbers
    position_A[order_A] = compute_document_positions(queue_A[order_A][None])[0]
    return position_A


# Expert choice: K is the largest number of experts of any token.


def choose_tokens(
    scores: RouterScores, factor: float, real_BT: Tensor, positions_BT: Tensor
) -> RoutingDecision:
    """Let each expert choose its tokens (Zhou 2022, arXiv:2202.09368).

    An expert takes the ceil(factor · T / E) real tokens of a group that score highest with it. A
    group is a sequence, or a document of it. A token may be chosen by no expert, or by many.

    Args:
        scores: Scores of the router.
        factor: Mean number of experts of a token.
        real_BT: False at padding, which is not chosen.
        positions_BT: Positions, counted from 0 in each group.

    Returns:
        The routing. Weights are the scores themselves (3.2 there), whatever `norm_topk_prob` is:
        those of a token may sum to 0.
    """
    merit_BTE = scores.log_scores_NE.detach().unflatten(0, real_BT.shape)
    chosen_NE = _compute_choice_mask(merit_BTE, factor, real_BT, positions_BT).flatten(0, 1)
    most = max(1, read_once(lambda: int(chosen_NE.sum(-1).max()))) if len(chosen_NE) else 1
    # Stable: chosen experts come first, by number.
    experts_NK = chosen_NE.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[:, :most]
    kept_NK = chosen_NE.gather(-1, experts_NK)
    weights_NK = scores.log_scores_NE.gather(-1, experts_NK).exp().masked_fill(~kept_NK, 0.0)
    return RoutingDecision(experts_NK.where(kept_NK, NO_EXPERT), weights_NK, partial=True)


def _compute_choice_mask(
    merit_BTE: Tensor, factor: float, real_BT: Tensor, positions_BT: Tensor
) -> Tensor:
    """Return True where an expert takes a token, bool (B, T, E)."""
    best_BTE = merit_BTE.masked_fill(~real_BT[..., None], -torch.inf).argsort(
        dim=1, descending=True, stable=True
    )
    first_BT = _find_first_tokens(positions_BT)
    # Best first within each group, and groups in order: place t then belongs to the group of token
    # t.
    first_BTE = first_BT[..., None].expand_as(best_BTE).gather(1, best_BTE)
    best_BTE = best_BTE.gather(1, first_BTE.argsort(dim=1, stable=True))
    capacity_BT = _compute_group_capacity(first_BT, real_BT, factor / merit_BTE.shape[-1])
    admitted_BT1 = (positions_BT < capacity_BT)[..., None]
    chosen_BTE = torch.zeros_like(merit_BTE, dtype=torch.bool)
    return chosen_BTE.scatter_(1, best_BTE, admitted_BT1.expand_as(best_BTE))
