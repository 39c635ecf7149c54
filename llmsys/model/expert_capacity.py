"""Expert capacity with dropped tokens (GShard, Lepikhin 2020, arXiv:2006.16668, 2.2), and expert choice (Zhou 2022,
arXiv:2202.09368).

Invariants:
- Capacity is counted per sequence, so that routing does not depend on ranks or micro-batches.
- Assignments are admitted by position, and a token's best expert before its others. GShard admits every first choice
  before any second one; then a token's output would depend on later tokens, which a decoder must not see.
- Expert choice looks at all positions of a sequence: for training and encoders, not for generation (KeyValueCache
  raises). It flatters a decoder's evaluation loss.
"""

import torch
from torch import Tensor

from llmsys.model.router import NO_EXPERT, RouterScores, RoutingDecision, count_bins

# B rows (sequences), T positions, N = B * T tokens, K experts per token, E experts, A = N * K assignments


def drop_overflow(routing: RoutingDecision, factor: float, num_experts: int, real_BT: Tensor) -> RoutingDecision:
    """Keep the first ceil(factor · T · K / E) assignments of each expert and sequence; T counts real tokens only.

    Padding (False in real_BT) visits no expert and uses no capacity. Dropped assignments become NO_EXPERT with weight
    0.
    """
    experts_NK = routing.experts_NK
    rows, experts_per_token = real_BT.shape[0], experts_NK.shape[1]
    capacity_B = compute_capacity(real_BT.sum(1), factor * experts_per_token / num_experts)
    row_NK = torch.arange(rows, device=experts_NK.device).repeat_interleave(real_BT.shape[1])[:, None]
    queue_A = (row_NK * num_experts + experts_NK).where(real_BT.view(-1, 1), rows * num_experts).flatten()
    # One queue per sequence and expert; the last queue is padding's, without capacity.
    capacity_A = torch.cat([capacity_B.repeat_interleave(num_experts), capacity_B.new_zeros(1)])[queue_A]
    kept_NK = (_compute_queue_positions(queue_A, rows * num_experts + 1) < capacity_A).view_as(experts_NK)
    return RoutingDecision(
        experts_NK.where(kept_NK, NO_EXPERT), routing.weights_NK.masked_fill(~kept_NK, 0.0), partial=True
    )


def compute_capacity(tokens_B: Tensor, per_token: float) -> Tensor:
    """Return ceil(tokens · per_token), tolerant of float64 rounding: 1.1 · 50 is 55, not 56."""
    # 1e-9 is far below one token and far above the rounding error of the product.
    return (tokens_B.double() * per_token - 1e-9).ceil().long()


def _compute_queue_positions(queue_A: Tensor, num_queues: int) -> Tensor:
    """Count the earlier assignments in the same queue, (A,)."""
    order_A = queue_A.argsort(stable=True)
    lengths = count_bins(queue_A, num_queues)
    starts = lengths.cumsum(0) - lengths
    position_A = torch.empty_like(queue_A)
    position_A[order_A] = torch.arange(len(queue_A), device=queue_A.device) - starts[queue_A[order_A]]
    return position_A


# Expert choice: K is the largest number of experts of any token.


def choose_tokens(scores: RouterScores, factor: float, real_BT: Tensor) -> RoutingDecision:
    """Let each expert take the ceil(factor · T / E) real tokens of a sequence that score highest with it.

    Weights are the scores themselves (Zhou 2022, 3.2), whatever `norm_topk_prob` is: the weights of a token may sum to
    0.
    """
    chosen_NE = _compute_choice_mask(
        scores.log_scores_NE.detach().unflatten(0, real_BT.shape), factor, real_BT
    ).flatten(0, 1)
    most = max(1, int(chosen_NE.sum(-1).max())) if len(chosen_NE) else 1
    # Stable: chosen experts come first, by number.
    experts_NK = chosen_NE.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[:, :most]
    kept_NK = chosen_NE.gather(-1, experts_NK)
    weights_NK = scores.log_scores_NE.gather(-1, experts_NK).exp().masked_fill(~kept_NK, 0.0)
    return RoutingDecision(experts_NK.where(kept_NK, NO_EXPERT), weights_NK, partial=True)


def _compute_choice_mask(merit_BTE: Tensor, factor: float, real_BT: Tensor) -> Tensor:
    """Return True where an expert takes a token, bool (B, T, E)."""
    length, num_experts = merit_BTE.shape[1:]
    tokens_B = real_BT.sum(1)
    capacity_B = compute_capacity(tokens_B, factor / num_experts).minimum(tokens_B)
    best_BTE = merit_BTE.masked_fill(~real_BT[..., None], -torch.inf).argsort(dim=1, descending=True, stable=True)
    admitted_BT1 = (torch.arange(length, device=merit_BTE.device) < capacity_B[:, None])[..., None]
    chosen_BTE = torch.zeros_like(merit_BTE, dtype=torch.bool)
    return chosen_BTE.scatter_(1, best_BTE, admitted_BT1.expand_as(best_BTE))
