"""Limited room at each expert: what exceeds it in a sequence is dropped (GShard, Lepikhin 2020, arXiv:2006.16668, 2.2).

Room is counted per sequence, so a token's fate depends neither on the rank nor on the micro-batch that it is dealt to.
Assignments are admitted by position, and a token's best expert before its others. GShard admits everybody's first
choice before any second one; then a token's output would depend on later tokens, which a decoder must not see.

Experts choose their tokens (Zhou 2022, arXiv:2202.09368): every expert is equally busy, tokens are not.

The choice is made within each sequence, so it does not depend on ranks or micro-batches. It looks at all positions: for
training and encoders, not for generation (KeyValueCache refuses it); a decoder's evaluation loss is flattered by it.
"""

import torch
from torch import Tensor

from llmsys.model.router import NO_EXPERT, RouterScores, RoutingDecision, count_bins

# B rows (sequences), T positions, N = B * T tokens, K experts per token, E experts, A = N * K assignments


def drop_overflow(routing: RoutingDecision, factor: float, num_experts: int, real_BT: Tensor) -> RoutingDecision:
    """Keep the first ceil(factor · T · K / E) assignments of each expert and sequence; T counts real tokens only.

    Padding (False in real_BT) visits nobody and takes no room. Dropped assignments become NO_EXPERT with weight 0.
    """
    experts_NK = routing.experts_NK
    rows, visits = real_BT.shape[0], experts_NK.shape[1]
    room_B = compute_capacity(real_BT.sum(1), factor * visits / num_experts)
    row_NK = torch.arange(rows, device=experts_NK.device).repeat_interleave(real_BT.shape[1])[:, None]
    queue_A = (row_NK * num_experts + experts_NK).where(real_BT.view(-1, 1), rows * num_experts).flatten()
    room_A = torch.cat([room_B.repeat_interleave(num_experts), room_B.new_zeros(1)])[queue_A]
    kept_NK = (_compute_queue_positions(queue_A, rows * num_experts + 1) < room_A).view_as(experts_NK)
    return RoutingDecision(
        experts_NK.where(kept_NK, NO_EXPERT), routing.weights_NK.masked_fill(~kept_NK, 0.0), partial=True
    )


def compute_capacity(tokens_B: Tensor, per_token: float) -> Tensor:
    """ceil(tokens · per_token), forgiving float64's last digits: 1.1 · 10 is 11, not 12."""
    return (tokens_B.double() * per_token - 1e-9).ceil().long()


def _compute_queue_positions(queue_A: Tensor, num_queues: int) -> Tensor:
    """How many earlier assignments wait in the same queue, (A,)."""
    order_A = queue_A.argsort(stable=True)
    lengths = count_bins(queue_A, num_queues)
    starts = lengths.cumsum(0) - lengths
    place_A = torch.empty_like(queue_A)
    place_A[order_A] = torch.arange(len(queue_A), device=queue_A.device) - starts[queue_A[order_A]]
    return place_A


# B rows (sequences), T positions, N = B * T tokens, E experts, R room of an expert, K most experts of any token


def choose_tokens(scores: RouterScores, factor: float, real_BT: Tensor) -> RoutingDecision:
    """Each expert takes the ceil(factor · T / E) real tokens of a sequence that score highest with it.

    Weights are the scores themselves (Zhou 2022, 3.2), whatever `norm_topk_prob` says: a token's sum over the experts
    that took it may be 0.
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
    """Which expert takes which token, bool (B, T, E)."""
    length, num_experts = merit_BTE.shape[1:]
    tokens_B = real_BT.sum(1)
    room_B = compute_capacity(tokens_B, factor / num_experts).minimum(tokens_B)
    best_BTE = merit_BTE.masked_fill(~real_BT[..., None], -torch.inf).argsort(dim=1, descending=True, stable=True)
    admitted_BT1 = (torch.arange(length, device=merit_BTE.device) < room_B[:, None])[..., None]
    chosen_BTE = torch.zeros_like(merit_BTE, dtype=torch.bool)
    return chosen_BTE.scatter_(1, best_BTE, admitted_BT1.expand_as(best_BTE))
