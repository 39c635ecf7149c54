"""Token dispatch in one process: gather tokens by expert, compute, and combine the weighted
outputs.

A distributed dispatcher has the same signature and is assigned to `MoELayer.dispatcher` from
outside; the layer never learns about ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from llmsys.model.experts import GroupedExperts
from llmsys.model.host_read import is_on_host, read_once
from llmsys.model.router import RoutingDecision, count_tokens

# N tokens, K experts per token, M = N * K assignments, D width


# Returns the output of the shared experts, (N, channels of the model).
ComputeShared = Callable[[], Tensor]


class TokenDispatcher(Protocol):
    """A callable that sends tokens through their experts and returns the weighted sum per token."""

    def __call__(
        self,
        x_ND: Tensor,
        routing: RoutingDecision,
        experts: GroupedExperts,
        shared: ComputeShared | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return y_ND with y_n = sum_k weights_nk · expert_{experts_nk}(x_n), and the output of
        `shared`.

        Args:
            x_ND: Tokens of this rank.
            routing: Experts of each token, numbered over all ranks, and their weights. An
                assignment to NO_EXPERT is not computed and contributes nothing.
            experts: The experts of this rank.
            shared: Computes the shared experts. Called once, while tokens travel if they
                do. None: there are none.

        Returns:
            (N, D), in the order of the tokens, and what `shared` returned.
        """
        ...


class LocalTokenDispatcher:
    """Dispatcher of one process, which holds all experts. Deterministic to the bit."""

    def __call__(
        self,
        x_ND: Tensor,
        routing: RoutingDecision,
        experts: GroupedExperts,
        shared: ComputeShared | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Implement `TokenDispatcher`; the sum has the dtype of `x_ND`."""
        counts_E = count_tokens(routing.experts_NK, experts.num_experts, partial=routing.partial)
        num_assigned = read_once(lambda: int(counts_E.sum())) if routing.partial else None
        y_ND = compute_experts(x_ND, routing, counts_E, experts, num_assigned)
        return y_ND, None if shared is None else shared()


def compute_experts(
    x_ND: Tensor,
    routing: RoutingDecision,
    counts_E: Tensor,
    experts: GroupedExperts,
    num_assigned: int | None,
) -> Tensor:
    """Return the weighted sum of the experts of each token, all of which this process holds.

    Args:
        x_ND: Tokens.
        routing: Their experts and weights.
        counts_E: Assignments to each expert.
        experts: The experts.
        num_assigned: Sum of the counts where some assignments are NO_EXPERT; None where none is.

    Returns:
        The sums, (N, D).
    """
    permutation = build_permutation(routing.experts_NK, experts.num_experts, num_assigned)
    y_MD = experts(gather_tokens(x_ND, permutation), counts_E)
    return combine_expert_outputs(y_MD, routing.weights_NK, permutation)


@dataclass(frozen=True)
class TokenPermutation:
    """The rows of N · K assignments, sorted by expert.

    Attributes:
        order_M: The assignment n · K + k in sorted row m. Where some assignments are NO_EXPERT, one
            row more than is computed: all of those read it.
        slot_NK: The inverse: the row of assignment (n, k).
        num_rows: Rows that are computed.
    """

    order_M: Tensor
    slot_NK: Tensor
    num_rows: int

    @property
    def is_partial(self) -> bool:
        """True where the last row of `order_M` is not computed."""
        return self.order_M.shape[0] > self.num_rows


def build_permutation(
    experts_NK: Tensor, num_experts: int, num_assigned: int | None = None
) -> TokenPermutation:
    """Sort the N · K assignments by expert, stably.

    Args:
        experts_NK: Expert of each assignment, or NO_EXPERT.
        num_experts: E.
        num_assigned: Assignments that are not NO_EXPERT; None where all are.

    Returns:
        The permutation.
    """
    if num_assigned is None:
        return TokenPermutation(*_sort_assignments(experts_NK), experts_NK.numel())
    # NO_EXPERT is sorted last. Those assignments all read one more row that is not computed: zero,
    # in backward too.
    order_A, slot_NK = _sort_assignments(experts_NK.where(experts_NK >= 0, num_experts))
    return TokenPermutation(
        order_A[: num_assigned + 1], slot_NK.clamp(max=num_assigned), num_assigned
    )


def _sort_assignments(experts_NK: Tensor) -> tuple[Tensor, Tensor]:
    order_M = experts_NK.flatten().argsort(stable=True)
    slot_M = torch.empty_like(order_M)
    slot_M[order_M] = torch.arange(order_M.shape[0], device=order_M.device)
    return order_M, slot_M.view_as(experts_NK)


def gather_tokens(x_ND: Tensor, permutation: TokenPermutation) -> Tensor:
    """Return the row of x of every computed assignment.

    Args:
        x_ND: Tokens.
        permutation: From `build_permutation`.

    Returns:
        Rows grouped by expert, (M, D).
    """
    rows_MD: Tensor = _TokenGatherFunction.apply(x_ND, permutation.order_M, permutation.slot_NK)  # type: ignore[no-untyped-call]
    # Cut off, so that the row of NO_EXPERT gets a gradient of zero.
    return rows_MD[: permutation.num_rows] if permutation.is_partial else rows_MD


def combine_expert_outputs(
    y_MD: Tensor, weights_NK: Tensor, permutation: TokenPermutation
) -> Tensor:
    """Sum the expert outputs of each token with its weights.

    Args:
        y_MD: Expert outputs, sorted by expert.
        weights_NK: Weight of each assignment.
        permutation: From `build_permutation`.

    Returns:
        The sums, (N, D), in the dtype of y; added up in float32.
    """
    if permutation.is_partial:
        # The row of zeros that NO_EXPERT reads.
        y_MD = F.pad(y_MD, (0, 0, 0, 1))
    arguments = y_MD, weights_NK, permutation.order_M, permutation.slot_NK
    sums_ND: Tensor = _CombineFunction.apply(*arguments)  # type: ignore[no-untyped-call]
    return sums_ND


def permute_rows(x_MD: Tensor, order_M: Tensor, inverse_M: Tensor) -> Tensor:
    """Return the rows of x in another order.

    Args:
        x_MD: Rows.
        order_M: Which row of x each row of the result is; a permutation.
        inverse_M: Its inverse.

    Returns:
        The rows, (M, D). The backward is a gather too.
    """
    permuted_MD: Tensor = _PermuteFunction.apply(x_MD, order_M, inverse_M)  # type: ignore[no-untyped-call]
    return permuted_MD


# Each token has exactly K assignments (NO_EXPERT reads a row of zeros), so both directions are
# gathers followed by a sum over K. Autograd would derive scatter-adds instead, which on
# accelerators are atomic and differ from run to run.


def _sum_over_assignments(rows_MD: Tensor, slot_NK: Tensor, weights_NK: Tensor | None) -> Tensor:
    if not is_on_host(rows_MD):
        # One kernel, which adds in float32; weights are rounded to the dtype of the rows, as the
        # sum is.
        weights_NK = None if weights_NK is None else weights_NK.to(rows_MD.dtype)
        return F.embedding_bag(slot_NK, rows_MD, mode="sum", per_sample_weights=weights_NK)
    # float32: K outputs in bfloat16 would be rounded K times.
    sums_ND = torch.zeros(
        slot_NK.shape[0], rows_MD.shape[1], dtype=torch.float32, device=rows_MD.device
    )
    for k in range(slot_NK.shape[1]):
        rows_ND = rows_MD.index_select(0, slot_NK[:, k])
        if weights_NK is None:
            sums_ND += rows_ND
        else:
            sums_ND.addcmul_(rows_ND, weights_NK[:, k, None])
    return sums_ND.to(rows_MD.dtype)


class _TokenGatherFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_M: Tensor, slot_NK: Tensor) -> Tensor:
        ctx.save_for_backward(slot_NK)
        # Assignment n · K + k is of token n.
        return x_ND.index_select(0, order_M // slot_NK.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (slot_NK,) = ctx.saved_tensors
        return _sum_over_assignments(gradients[0], slot_NK, None), None, None


class _CombineFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y_MD: Tensor, weights_NK: Tensor, order_M: Tensor, slot_NK: Tensor
    ) -> Tensor:
        ctx.save_for_backward(y_MD, weights_NK, order_M)
        return _sum_over_assignments(y_MD, slot_NK, weights_NK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        y_MD, weights_NK, order_M = ctx.saved_tensors
        gradient_MD = gradients[0].index_select(0, order_M // weights_NK.shape[1])
        weights_gradient_NK = None
        if ctx.needs_input_grad[1]:
            weights_gradient_NK = torch.zeros_like(weights_NK)
            weights_gradient_NK.view(-1)[order_M] = torch.linalg.vecdot(gradient_MD, y_MD).to(
                weights_NK.dtype
            )
        weights_M = weights_NK.flatten().index_select(0, order_M).to(y_MD.dtype)
        return gradient_MD * weights_M[:, None], weights_gradient_NK, None, None


class _PermuteFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, order_M: Tensor, inverse_M: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_M)
        return x_MD.index_select(0, order_M)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inverse_M,) = ctx.saved_tensors
        return gradients[0].index_select(0, inverse_M), None, None
