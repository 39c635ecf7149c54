"""Experts choose their tokens (Zhou 2022, arXiv:2202.09368): every expert is equally busy, tokens are not.

The choice is made within each sequence, so it does not depend on ranks or micro-batches. It looks at all positions: for
training and encoders, not for generation (KeyValueCache refuses it); a decoder's evaluation loss is flattered by it.
"""

import torch
from torch import Tensor

from llmsys.model.capacity import compute_capacity
from llmsys.model.router import NO_EXPERT, RoutingDecision, RouterScores

# B rows (sequences), T positions, N = B * T tokens, E experts, R room of an expert, K most experts of any token


def choose_tokens(scores: RouterScores, factor: float, real_BT: Tensor) -> RoutingDecision:
    """Each expert takes the ceil(factor · T / E) real tokens of a sequence that score highest with it.

    Weights are the scores themselves (Zhou 2022, 3.2), whatever `norm_topk_prob` says: a token's sum over the experts
    that took it may be 0.
    """
    chosen_NE = _compute_choice_mask(scores.log_scores_NE.detach().unflatten(0, real_BT.shape), factor, real_BT).flatten(0, 1)
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
