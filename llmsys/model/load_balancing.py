"""Load balancing of experts: auxiliary losses and the bias rule.

Invariants:
- Losses are sums over real tokens. The caller, who knows the tokens of all ranks and micro-batches,
  divides once, so a loss does not depend on the layout.
"""

from typing import assert_never

import torch
from torch import Tensor

from llmsys.config.moe import AuxiliaryLossConfig, BiasBalancingConfig, MoeConfig, NoBalancingConfig
from llmsys.model.router import RouterScores, count_bins

# B rows (sequences), T positions, N = B * T tokens, E experts


def compute_auxiliary_losses(
    config: MoeConfig,
    scores: RouterScores,
    asked_BE: Tensor,
    share_E: Tensor | None,
    real_BT: Tensor,
) -> Tensor | None:
    """Return the weighted balance and router z losses, (2,), summed over real tokens; None when the
    config has neither.

    Args:
        config: The losses and their weights.
        scores: Scores of the N tokens.
        asked_BE: Assignments of each sequence to each expert, before any were dropped.
        share_E: Shares of all assignments in the previous step, for `scope: batch`.
        real_BT: False where a token is padding.
    """
    balance_loss = z_loss = None
    match config.balance:
        case BiasBalancingConfig(sequence_weight=weight):
            if weight:
                shares_BE = _compute_expert_shares(asked_BE)
                balance_loss = weight * compute_load_balancing_loss(scores, shares_BE, real_BT)
        case AuxiliaryLossConfig(weight=weight):
            shares_BE = (
                _compute_expert_shares(asked_BE) if share_E is None else share_E.expand_as(asked_BE)
            )
            balance_loss = weight * compute_load_balancing_loss(scores, shares_BE, real_BT)
        case NoBalancingConfig():
            pass
        case unreachable:
            assert_never(unreachable)
    if config.z_loss_weight:
        z_loss = config.z_loss_weight * compute_router_z_loss(scores, real_BT)
    if balance_loss is None and z_loss is None:
        return None
    zero = scores.logits_NE.new_zeros(())
    return torch.stack(
        [zero if balance_loss is None else balance_loss, zero if z_loss is None else z_loss]
    )


def compute_load_balancing_loss(scores: RouterScores, shares_BE: Tensor, real_BT: Tensor) -> Tensor:
    """Compute the load-balancing loss of each sequence, summed over sequences.

    The loss of a sequence is E · sum_e f_e P_e times its tokens: per token 1 when balanced, E at
    worst. f_e is the share of the assignments to expert e, and P_e the mean over tokens of its
    share of the scores (Fedus 2021, arXiv:2101.03961, eq. 4 to 6; per sequence DeepSeek-V3,
    arXiv:2412.19437, eq. 17 to 20).

    Args:
        scores: Scores of the router.
        shares_BE: f of each sequence. With the f of the previous step the loss is linear in the
            tokens, hence independent of the layout.
        real_BT: False at padding, which does not count.

    Returns:
        A float32 scalar with gradients for the router.
    """
    probability_BE = (
        scores.compute_probabilities().unflatten(0, real_BT.shape) * real_BT[..., None]
    ).sum(1)
    total: Tensor = (shares_BE * probability_BE).sum()
    return shares_BE.shape[-1] * total


def compute_router_z_loss(scores: RouterScores, real_BT: Tensor) -> Tensor:
    """Compute the router's z-loss (Zoph 2022, arXiv:2202.08906, eq. 5).

    Args:
        scores: Scores of the router.
        real_BT: False at padding, which does not count.

    Returns:
        logsumexp(router logits)², summed over real tokens; a float32 scalar.
    """
    return (scores.logits_NE.logsumexp(dim=-1).square() * real_BT.flatten()).sum()


def count_tokens_by_row(experts_NK: Tensor, num_experts: int, real_BT: Tensor) -> Tensor:
    """Count the assignments of each row's real tokens to each expert.

    Args:
        experts_NK: Experts of each token; NO_EXPERT where an assignment was dropped.
        num_experts: Experts of the layer.
        real_BT: False at padding, which does not count.

    Returns:
        int64 (B, E).
    """
    rows, length = real_BT.shape
    row_N = torch.arange(rows, device=experts_NK.device).repeat_interleave(length)
    # Bin 0 is for what does not count: padding, and NO_EXPERT.
    bins_NK = (row_N[:, None] * num_experts + experts_NK + 1).where(
        real_BT.view(-1, 1) & (experts_NK >= 0), 0
    )
    return count_bins(bins_NK.flatten(), rows * num_experts + 1)[1:].view(rows, num_experts)


def update_balance_bias(bias_E: Tensor, tokens_E: Tensor, rate: float) -> Tensor:
    """Compute the next balance bias: up by `rate` for experts below the mean load, down for those
    above (sign rule).

    Wang 2024, arXiv:2408.15664, algorithm 1; DeepSeek-V3, arXiv:2412.19437, section 2.1.2.

    Args:
        bias_E: The current bias.
        tokens_E: Assignments to each expert, summed over all ranks and micro-batches of the step.
        rate: Step of the bias, in units of the scores.

    Returns:
        The next bias, (E,).
    """
    tokens_E = tokens_E.to(torch.float32)
    return bias_E + rate * torch.sign(tokens_E.mean() - tokens_E)


@torch.library.custom_op("llmsys::add_step_counts", mutates_args=("sums",))
def add_step_counts(sums: list[Tensor], values: list[Tensor]) -> None:
    """Add to the counters of a step, but not in a pass that activation checkpointing repeats.

    A separate operation, which compiled graphs call as it is: they cannot ask whether they are
    repeated.

    Args:
        sums: The counters, changed in place.
        values: What is added to each.
    """
    if not is_recomputation():
        for total, value in zip(sums, values, strict=True):
            total += value


@add_step_counts.register_fake
def _(sums: list[Tensor], values: list[Tensor]) -> None:
    return None


def is_recomputation() -> bool:
    """Return whether this forward pass runs inside a backward pass, as activation checkpointing
    does.

    Such a pass repeats one that was already counted.
    """
    # Autograd numbers each running backward; -1 is none.
    return torch._C._current_graph_task_id() != -1


def _compute_expert_shares(asked_BE: Tensor) -> Tensor:
    # A row of padding alone has no assignments.
    return asked_BE / asked_BE.sum(dim=-1, keepdim=True).clamp(min=1)
