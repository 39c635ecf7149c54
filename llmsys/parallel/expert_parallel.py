"""Expert parallel token dispatch: tokens are sent to the ranks that hold their experts, and back.

The same contract as the model's local dispatcher. One small all-to-all of counts, and one
all-to-all of rows in each direction, with uneven splits. The host reads the counts once per layer;
a pass that activation checkpointing repeats uses the counts of the first.

Where a token's experts tend to share ranks (`must_send_once_per_rank`), it is sent once to each
rank, which returns the weighted sum of its experts' outputs; else once to each expert. The shared
experts are computed while rows travel, in backward too.

Invariants:
- Stable sorts fix the order, so results are deterministic to the bit.
- Dropped assignments are not sent.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from llmsys.config.expert_sharding import must_send_once_per_rank
from llmsys.config.moe import MoeConfig
from llmsys.model.experts import GroupedExperts
from llmsys.model.host_read import read_once
from llmsys.model.router import NO_EXPERT, RoutingDecision, count_tokens
from llmsys.model.token_dispatcher import (
    ComputeShared,
    build_permutation,
    combine_expert_outputs,
    compute_experts,
    gather_tokens,
    permute_rows,
)
from llmsys.parallel.collectives import RowExchange, exchange_rows

# N tokens of this rank, K experts per token, D width, R ranks, L experts of a rank, M rows sent or
# received


class ExchangePlan(NamedTuple):
    """The rows that this rank exchanges with each rank of the group.

    Attributes:
        send: Rows to each rank.
        receive: Rows from each rank.
        num_assigned: Assignments of the received rows to experts of this rank.
        received_RL: Numbers that each rank sent along: its assignments to each of the L experts.
    """

    send: list[int]
    receive: list[int]
    num_assigned: int
    received_RL: Tensor


class AllToAllTokenDispatcher:
    """Dispatcher over the ranks of `group`. Rank r of it holds experts r · L to (r + 1) · L - 1."""

    def __init__(self, group: dist.ProcessGroup, config: MoeConfig) -> None:
        """Choose between a row for each assignment and a row for each rank that a token visits.

        Args:
            group: The ranks that share the experts; their number divides that of the experts.
            config: The `model.moe:` section.
        """
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.num_experts = config.num_experts
        self.sends_once_per_rank = must_send_once_per_rank(config, self.ranks)

    def __call__(
        self,
        x_ND: Tensor,
        routing: RoutingDecision,
        experts: GroupedExperts,
        shared: ComputeShared | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Implement `TokenDispatcher`. Collective."""
        send = self._send_to_ranks if self.sends_once_per_rank else self._send_to_experts
        return send(x_ND, routing, experts, shared)

    def _send_to_experts(
        self,
        x_ND: Tensor,
        routing: RoutingDecision,
        experts: GroupedExperts,
        shared: ComputeShared | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Send one row for each assignment."""
        counts_E = count_tokens(routing.experts_NK, self.num_experts, partial=routing.partial)
        counts_RL = counts_E.view(self.ranks, -1)
        plan = read_once(lambda: self._exchange_counts(counts_RL, counts_RL.sum(1)))
        # Where nothing is dropped, shapes give the number without a read by the host.
        num_assigned = sum(plan.send) if routing.partial else None
        permutation = build_permutation(routing.experts_NK, self.num_experts, num_assigned)
        exchange = RowExchange(plan.send, plan.receive, self.group)
        pending_MD = exchange.start(gather_tokens(x_ND, permutation))
        # Computed while the rows travel.
        shared_ND = None if shared is None else shared()
        arrived_MD = exchange.finish(pending_MD)
        outputs_MD = self._compute_expert_outputs(arrived_MD, plan.received_RL, experts)
        returned_MD = exchange_rows(outputs_MD, plan.receive, plan.send, self.group)
        return combine_expert_outputs(returned_MD, routing.weights_NK, permutation), shared_ND

    def _send_to_ranks(
        self,
        x_ND: Tensor,
        routing: RoutingDecision,
        experts: GroupedExperts,
        shared: ComputeShared | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Send one row for each rank that holds experts of a token, with their numbers and
        weights.
        """
        experts_NK = routing.experts_NK
        weights_NK = routing.weights_NK
        # Floored: NO_EXPERT is -1, which truncation would make rank 0.
        ranks_NK = experts_NK.div(self.num_experts // self.ranks, rounding_mode="floor")
        visits_NK = ranks_NK.where(_mask_first_visits(ranks_NK), NO_EXPERT)
        counts_E = count_tokens(experts_NK, self.num_experts, partial=True)
        rows_R = count_tokens(visits_NK, self.ranks, partial=True)
        plan = read_once(lambda: self._exchange_counts(counts_E.view(self.ranks, -1), rows_R))
        permutation = build_permutation(visits_NK, self.ranks, sum(plan.send))
        local_MK = self._number_local_experts(
            experts_NK, ranks_NK, permutation.order_M[: permutation.num_rows]
        )
        local_MK = exchange_rows(local_MK, plan.send, plan.receive, self.group)
        weights_MK = exchange_rows(
            gather_tokens(weights_NK, permutation), plan.send, plan.receive, self.group
        )
        exchange = RowExchange(plan.send, plan.receive, self.group)
        pending_MD = exchange.start(gather_tokens(x_ND, permutation))
        # Computed while the rows travel.
        shared_ND = None if shared is None else shared()
        arrived_MD = exchange.finish(pending_MD)
        arrived = RoutingDecision(local_MK, weights_MK, partial=True)
        counts_L = plan.received_RL.sum(0)
        outputs_MD = compute_experts(arrived_MD, arrived, counts_L, experts, plan.num_assigned)
        returned_MD = exchange_rows(outputs_MD, plan.receive, plan.send, self.group)
        # The ranks have weighted their outputs; they are only added.
        ones_NK = torch.ones_like(weights_NK)
        return combine_expert_outputs(returned_MD, ones_NK, permutation), shared_ND

    def _exchange_counts(self, counts_RL: Tensor, rows_R: Tensor) -> ExchangePlan:
        """Tell each rank how many rows and assignments it gets. The one place where the host
        waits in a layer.
        """
        sent = torch.cat([rows_R[:, None], counts_RL], dim=1).long()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        # One copy to the host, thus one wait, for all three.
        send, receive, assigned = torch.stack(
            [rows_R, received[:, 0], received[:, 1:].sum(1)]
        ).tolist()
        return ExchangePlan(send, receive, sum(assigned), received[:, 1:])

    def _number_local_experts(
        self, experts_NK: Tensor, ranks_NK: Tensor, order_M: Tensor
    ) -> Tensor:
        """Return the experts of each row's token that its rank holds, by their number there;
        else NO_EXPERT.
        """
        local_experts = self.num_experts // self.ranks
        token_M = order_M // experts_NK.shape[1]
        rank_M = ranks_NK.flatten()[order_M]
        experts_MK = experts_NK[token_M]
        is_there_MK = ranks_NK[token_M] == rank_M[:, None]
        return (experts_MK - local_experts * rank_M[:, None]).where(is_there_MK, NO_EXPERT)

    def _compute_expert_outputs(
        self, arrived_MD: Tensor, received_RL: Tensor, experts: GroupedExperts
    ) -> Tensor:
        """Return the outputs of this rank's experts for the received rows, in the order of
        arrival.
        """
        regroup, ungroup = _compute_expert_permutation(received_RL, len(arrived_MD))
        outputs_MD = experts(permute_rows(arrived_MD, regroup, ungroup), received_RL.sum(0))
        return permute_rows(outputs_MD, ungroup, regroup)


def _mask_first_visits(ranks_NK: Tensor) -> Tensor:
    """Return True at the first of a token's assignments to each rank, bool (N, K); False where
    there is no expert.
    """
    same_NKK = ranks_NK[:, :, None] == ranks_NK[:, None, :]
    return ~same_NKK.tril(diagonal=-1).any(-1) & (ranks_NK >= 0)


def _compute_expert_permutation(received_RL: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the permutation from (source rank, expert) order to expert order, and its inverse."""
    ranks, local_experts = received_RL.shape
    expert_of_group = torch.arange(local_experts, device=received_RL.device).repeat(ranks)
    # Without `output_size` torch would wait for the device to sum the counts.
    expert_of_row = torch.repeat_interleave(
        expert_of_group, received_RL.flatten(), output_size=num_rows
    )
    regroup = torch.argsort(expert_of_row, stable=True)
    ungroup = torch.empty_like(regroup)
    ungroup[regroup] = torch.arange(len(regroup), device=regroup.device)
    return regroup, ungroup
