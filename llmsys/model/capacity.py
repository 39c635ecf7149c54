"""Limited room at each expert: what exceeds it in a sequence is dropped (GShard, Lepikhin 2020, arXiv:2006.16668, 2.2).

Room is counted per sequence, so a token's fate depends neither on the rank nor on the micro-batch that it is dealt to.
Assignments are admitted by position, and a token's best expert before its others. GShard admits everybody's first
choice before any second one; then a token's output would depend on later tokens, which a decoder must not see.
"""

import torch
from torch import Tensor

from llmsys.model.router import NO_EXPERT, RoutingDecision, count_bins

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
    return RoutingDecision(experts_NK.where(kept_NK, NO_EXPERT), routing.weights_NK.masked_fill(~kept_NK, 0.0), partial=True)


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
