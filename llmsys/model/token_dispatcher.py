"""Token dispatch in one process: gather tokens by expert, compute, and combine the weighted outputs.

A distributed dispatcher has the same signature and is assigned to `MoELayer.dispatcher` from outside; the layer never
learns about ranks.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from llmsys.model.experts import GroupedExperts
from llmsys.model.router import count_tokens

# N tokens, K experts per token, M = N * K assignments, D width


class TokenDispatcher(Protocol):
    """A callable that sends tokens through their experts and returns the weighted sum per token."""

    def __call__(
        self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, experts: GroupedExperts, *, partial: bool = False
    ) -> Tensor:
        """Return y_ND with y_n = sum_k weights_nk * expert_{experts_nk}(x_n).

        With `partial`, experts_NK may hold NO_EXPERT: such an assignment is not computed and contributes nothing.
        """
        ...


class LocalTokenDispatcher:
    """Dispatcher of one process, which holds all experts. Deterministic to the bit."""

    def __call__(
        self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, experts: GroupedExperts, *, partial: bool = False
    ) -> Tensor:
        """Return the weighted sum of expert outputs for every token, in the dtype of `x_ND`."""
        counts_E = count_tokens(experts_NK, experts.num_experts, partial=partial)
        if partial:
            return dispatch_to_experts(
                x_ND, experts_NK, weights_NK, counts_E, lambda rows_MD: experts(rows_MD, counts_E)
            )
        order_M, slot_NK = sort_assignments(experts_NK)
        y_MD = experts(gather_tokens(x_ND, order_M, slot_NK), counts_E)
        return combine_expert_outputs(y_MD, weights_NK, order_M, slot_NK)


def dispatch_to_experts(
    x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, counts_E: Tensor, compute: Callable[[Tensor], Tensor]
) -> Tensor:
    """Dispatch where some assignments are NO_EXPERT.

    Args:
        x_ND: Tokens.
        experts_NK: Expert of each assignment, or NO_EXPERT.
        weights_NK: Weight of each assignment.
        counts_E: Assignments to each expert.
        compute: Called with the M assigned rows, sorted by expert; returns their outputs.

    Returns:
        The weighted sum of each token, (N, D).
    """
    # NO_EXPERT is sorted last. Those assignments all read one more row that is not computed: zero, in backward too.
    order_A, slot_NK = sort_assignments(experts_NK.where(experts_NK >= 0, counts_E.shape[0]))
    num_assigned = int(counts_E.sum())
    order_M, slot_NK = order_A[: num_assigned + 1], slot_NK.clamp(max=num_assigned)
    y_MD = compute(gather_tokens(x_ND, order_M, slot_NK)[:num_assigned])
    y_MD = F.pad(y_MD, (0, 0, 0, len(order_M) - num_assigned))
    return combine_expert_outputs(y_MD, weights_NK, order_M, slot_NK)


def sort_assignments(experts_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Sort the N · K assignments by expert, stably.

    Args:
        experts_NK: Expert of each assignment.

    Returns:
        `order_M`, the assignment n · K + k in sorted row m, and its inverse `slot_NK`, the sorted row of assignment (n,
        k).
    """
    order_M = experts_NK.flatten().argsort(stable=True)
    slot_M = torch.empty_like(order_M)
    slot_M[order_M] = torch.arange(order_M.shape[0], device=order_M.device)
    return order_M, slot_M.view_as(experts_NK)


def gather_tokens(x_ND: Tensor, order_M: Tensor, slot_NK: Tensor) -> Tensor:
    """Return the row of x of every sorted assignment.

    Args:
        x_ND: Tokens.
        order_M: From `sort_assignments`.
        slot_NK: From `sort_assignments`.

    Returns:
        Rows grouped by expert, (M, D).
    """
    rows_MD: Tensor = _TokenGatherFunction.apply(x_ND, order_M, slot_NK)  # type: ignore[no-untyped-call]
    return rows_MD


def combine_expert_outputs(y_MD: Tensor, weights_NK: Tensor, order_M: Tensor, slot_NK: Tensor) -> Tensor:
    """Sum the expert outputs of each token with its weights.

    Args:
        y_MD: Expert outputs, sorted by expert.
        weights_NK: Weight of each assignment.
        order_M: From `sort_assignments`.
        slot_NK: From `sort_assignments`.

    Returns:
        The sums, (N, D), in the dtype of y; added up in float32.
    """
    sums_ND: Tensor = _CombineFunction.apply(y_MD, weights_NK, order_M, slot_NK)  # type: ignore[no-untyped-call]
    return sums_ND


# Each token has exactly K assignments (NO_EXPERT reads a row of zeros), so both directions are gathers followed by a
# sum over K. Autograd would derive scatter-adds instead, which on accelerators are atomic and differ from run to run.


def _sum_over_assignments(rows_MD: Tensor, slot_NK: Tensor, weights_NK: Tensor | None) -> Tensor:
    # float32: K outputs in bfloat16 would be rounded K times.
    sums_ND = torch.zeros(slot_NK.shape[0], rows_MD.shape[1], dtype=torch.float32, device=rows_MD.device)
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
        return x_ND.index_select(0, order_M // slot_NK.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (slot_NK,) = ctx.saved_tensors
        return _sum_over_assignments(gradients[0], slot_NK, None), None, None


class _CombineFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_MD: Tensor, weights_NK: Tensor, order_M: Tensor, slot_NK: Tensor) -> Tensor:
        ctx.save_for_backward(y_MD, weights_NK, order_M)
        return _sum_over_assignments(y_MD, slot_NK, weights_NK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y_MD, weights_NK, order_M = ctx.saved_tensors
        gradient_MD = gradients[0].index_select(0, order_M // weights_NK.shape[1])
        products_M = torch.linalg.vecdot(gradient_MD, y_MD).to(weights_NK.dtype)
        weights_gradient_NK = torch.zeros_like(weights_NK)
        weights_gradient_NK.view(-1)[order_M] = products_M
        weights_M = weights_NK.flatten().index_select(0, order_M).to(y_MD.dtype)
        return gradient_MD * weights_M[:, None], weights_gradient_NK, None, None
