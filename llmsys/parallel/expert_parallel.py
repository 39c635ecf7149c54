"""Expert parallel token dispatch: tokens are sent to the rank that holds their expert, and back.

The same contract as the model's local dispatcher. Each direction has two all-to-alls: one of counts (small), one of
rows with uneven splits.

Invariants:
- Stable sorts fix the order, so results are deterministic to the bit.
- Dropped assignments are not sent.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from llmsys.model.experts import GroupedExperts
from llmsys.model.router import count_tokens
from llmsys.model.token_dispatcher import combine_expert_outputs, dispatch_to_experts, gather_tokens, sort_assignments


class AllToAllTokenDispatcher:
    """Dispatcher that sends each of N tokens, K times, to the ranks of `group` that hold its experts.

    Rank r of the group holds experts r·L to (r+1)·L - 1. Legend: N tokens of this rank, K experts per token, D width, R
    ranks, L experts of a rank, M rows received.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.num_experts = num_experts

    def __call__(
        self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, experts: GroupedExperts, *, partial: bool = False
    ) -> Tensor:
        """Return the weighted sum of each token's experts, (N, D). Collective."""
        counts_E = count_tokens(experts_NK, self.num_experts, partial=partial)
        if partial:
            return dispatch_to_experts(
                x_ND,
                experts_NK,
                weights_NK,
                counts_E,
                lambda rows_MD: self._dispatch_to_ranks(rows_MD, counts_E, experts),
            )
        order_M, slot_NK = sort_assignments(experts_NK)
        returned_MD = self._dispatch_to_ranks(gather_tokens(x_ND, order_M, slot_NK), counts_E, experts)
        return combine_expert_outputs(returned_MD, weights_NK, order_M, slot_NK)

    def _dispatch_to_ranks(self, leaving_MD: Tensor, counts_E: Tensor, experts: GroupedExperts) -> Tensor:
        """Send rows sorted by expert to the ranks of their experts; return the outputs in the same order."""
        sent_RL = counts_E.long().view(self.ranks, -1)
        received_RL = torch.empty_like(sent_RL)
        dist.all_to_all_single(received_RL, sent_RL, group=self.group)
        # The host waits for the counts here: uneven splits are Python lists.
        send, receive = sent_RL.sum(1).tolist(), received_RL.sum(1).tolist()
        arrived_MD = all_to_all_single_autograd(leaving_MD, receive, send, self.group)
        outputs_MD = self._compute_expert_outputs(arrived_MD, received_RL, experts)
        return all_to_all_single_autograd(outputs_MD, send, receive, self.group)

    def _compute_expert_outputs(self, arrived_MD: Tensor, received_RL: Tensor, experts: GroupedExperts) -> Tensor:
        """Return the outputs of this rank's experts for the received rows, in the order of arrival."""
        regroup, ungroup = _compute_expert_permutation(received_RL)
        outputs_MD: Tensor = experts(arrived_MD[regroup], received_RL.sum(0))[ungroup]
        return outputs_MD


def _compute_expert_permutation(received_RL: Tensor) -> tuple[Tensor, Tensor]:
    """Return the permutation from (source rank, expert) order to expert order, and its inverse."""
    ranks, local_experts = received_RL.shape
    expert_of_group = torch.arange(local_experts, device=received_RL.device).repeat(ranks)
    expert_of_row = torch.repeat_interleave(expert_of_group, received_RL.flatten())
    regroup = torch.argsort(expert_of_row, stable=True)
    ungroup = torch.empty_like(regroup)
    ungroup[regroup] = torch.arange(len(regroup), device=regroup.device)
    return regroup, ungroup
