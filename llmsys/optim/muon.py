"""Muon: orthogonalized momentum for matrices. All other parameters use AdamW.

Momentum is averaged, pushed towards the nearest orthogonal matrix by a few Newton-Schulz steps
(Jordan 2024), and scaled to the root mean square of an AdamW step (Moonshot 2025, arXiv:2502.16982,
2.2), so that learning rate and weight decay carry over from AdamW. It needs full matrices; where
parameters are sharded, `apply` gathers them.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

# M, N the sides of a matrix, E experts (any leading dims are a batch of matrices)

# Coefficients of the quintic step, chosen for the steepest slope at 0: singular values end near 1,
# not at it.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)

# Root mean square of a usual AdamW update (Moonshot 2025, 2.2).
ADAMW_RMS = 0.2

Orthogonal = Callable[[Tensor], Tensor]
# (shards of matrices, function of full matrices) → the same shards of the function's results.
Apply = Callable[[Sequence[Tensor], Orthogonal], list[Tensor]]


def orthogonalize_matrices(update_MN: Tensor, steps: int) -> Tensor:
    """Orthogonalize a matrix, or each of a stack.

    Args:
        update_MN: matrices in the last two dims.
        steps: Newton-Schulz iterations.

    Returns:
        Roughly U Vᵀ of the singular value decomposition: singular values of 0.7 to 1.2, same dtype
        and shape.
    """
    a, b, c = COEFFICIENTS
    # the Gram matrix of the shorter side is the smaller one
    tall = update_MN.shape[-2] > update_MN.shape[-1]
    x: Tensor = update_MN.mT if tall else update_MN
    # The Frobenius norm bounds the singular values by 1, below which the steps converge.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


def apply_to_each(updates: Sequence[Tensor], function: Orthogonal) -> list[Tensor]:
    """Call `function` on each matrix: the `Apply` of unsharded parameters."""
    return [function(update) for update in updates]


class Muon(torch.optim.Optimizer):
    """Muon over matrices and stacks of matrices. A group has lr, weight_decay, momentum and steps.

    The momentum is `exp_avg`, an average of gradients as in AdamW; there is no second moment.

    Args:
        groups: Parameter groups, as for every torch optimizer.
        dtype: Dtype of the Newton-Schulz products; the method was published with bfloat16.
        apply: Calls a function on full matrices where parameters are sharded.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], *, dtype: torch.dtype, apply: Apply = apply_to_each
    ) -> None:
        super().__init__(
            list(groups), {"lr": 0.0, "weight_decay": 0.0, "momentum": 0.95, "steps": 5}
        )
        self._dtype = dtype
        self._apply = apply
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step from the gradients. Collective where `apply` is."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            momenta = [
                self._update_momentum(parameter, group["momentum"]) for parameter in parameters
            ]
            updates = self._apply(momenta, partial(orthogonalize_matrices, steps=group["steps"]))
            for parameter, update in zip(parameters, updates, strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                # An orthogonal matrix has the root mean square 1 / sqrt(max(M, N)).
                scale = ADAMW_RMS * math.sqrt(max(parameter.shape[-2:]))
                parameter.add_(update.to(parameter.dtype), alpha=-group["lr"] * scale)

    def _update_momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        """Update the average and return Nesterov's momentum: the average one gradient ahead."""
        state = self.state[parameter]
        state["step"] += 1
        assert parameter.grad is not None
        state["exp_avg"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(state["exp_avg"], momentum).to(self._dtype)
