"""Muon: orthogonalized momentum for matrices. All other parameters use AdamW.

Momentum is averaged, pushed towards the nearest orthogonal matrix by a few Newton-Schulz steps
(Jordan 2024), and scaled to the root mean square of an AdamW step (Moonshot 2025, arXiv:2502.16982,
2.2), so that learning rate and weight decay carry over from AdamW. It needs full matrices; where
parameters are sharded, `apply` gathers them.

NorMuon (Li 2025, arXiv:2510.05491) then divides the update of each neuron by the root of its second
moment, a number for each neuron. Those stay where the shards are: `sum_shards` adds what the ranks
of a neuron, or of a matrix, have.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, assert_never

import torch
from torch import Tensor

from llmsys.config.matrix_optimizers import MuonConfig, Orthogonalization, get_input_dim
from llmsys.model.local_tensor import get_local_tensor
from llmsys.optim.elementwise import apply_weight_decay

# M, N the sides of a matrix, E experts (any leading dims are a batch of matrices)

# Name of the second moment of neurons in a checkpoint → in the state of the optimizer.
NEURON_STATE_KEYS = {"neuron_moment": "exp_avg_sq_neuron"}

# Coefficients of the quintic step, chosen for the steepest slope at 0: singular values end near 1,
# not at it.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)

# Coefficients of each step that leave the least error of all singular values above a thousandth of
# the norm, if all steps before it do (Amsel 2025, algorithm 1; tests solve for them). Later steps
# have the last ones.
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
# Rounding may lift a singular value above its bound, beyond which the steps diverge (Amsel 2025,
# 3.4): each step is computed for values larger by this factor, but for the last ones.
SAFETY = 1.01

# Root mean square of a usual AdamW update (Moonshot 2025, 2.2).
ADAMW_RMS = 0.2

Orthogonal = Callable[[Tensor], Tensor]
# (shards of matrices, function of full matrices) → the same shards of the function's results.
Apply = Callable[[Sequence[Tensor], Orthogonal], list[Tensor]]
# (sums over this rank's part of a dim, the parameters, the dim of each), which makes them in place
# the sums over all ranks that share the dim.
SumShards = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[int]], None]
# (parameter, dim) → zeros for the sums over a dim, of length 1 there and sharded alike in others.
BuildSums = Callable[[Tensor, int], Tensor]


def list_coefficients(method: Orthogonalization, steps: int) -> list[tuple[float, float, float]]:
    """List the coefficients a, b, c of each step X ← aX + bXXᵀX + c(XXᵀ)²X.

    Args:
        method: Whose coefficients.
        steps: Number of steps.

    Returns:
        As many.
    """
    match method:
        case "newton_schulz":
            return [COEFFICIENTS] * steps
        case "polar_express":
            *first, last = POLAR_EXPRESS
            safe = [(a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in first]
            return safe[:steps] + [last] * (steps - len(safe))
        case unreachable:
            assert_never(unreachable)


def orthogonalize_matrices(
    update_MN: Tensor, steps: int, method: Orthogonalization = "newton_schulz"
) -> Tensor:
    """Orthogonalize a matrix, or each of a stack.

    Args:
        update_MN: matrices in the last two dims.
        steps: Newton-Schulz iterations.
        method: Coefficients of the iterations.

    Returns:
        Roughly U Vᵀ of the singular value decomposition: singular values from a hundredth of the
        norm become 0.68 to 1.13 by five steps, by polar_express 0.87 to 1.12; same dtype and shape.
    """
    # the Gram matrix of the shorter side is the smaller one
    tall = update_MN.shape[-2] > update_MN.shape[-1]
    x: Tensor = update_MN.mT if tall else update_MN
    # The Frobenius norm bounds the singular values by 1, below which the steps converge.
    bound = x.norm(dim=(-2, -1), keepdim=True)
    x = x / (bound * SAFETY if method == "polar_express" else bound).clamp(min=1e-7)
    for a, b, c in list_coefficients(method, steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


def apply_to_each(updates: Sequence[Tensor], function: Orthogonal) -> list[Tensor]:
    """Call `function` on each matrix: the `Apply` of unsharded parameters."""
    return [function(update) for update in updates]


def sum_nothing(sums: Sequence[Tensor], parts: Sequence[Tensor], dims: Sequence[int]) -> None:
    """Leave sums as they are: the `SumShards` of unsharded parameters."""


def build_plain_sums(like: Tensor, dim: int) -> Tensor:
    """Build zeros for the sums over a dim: the `BuildSums` of unsharded parameters.

    Args:
        like: A parameter.
        dim: The dim, of length 1 in the result.

    Returns:
        The zeros.
    """
    return torch.zeros_like(like.detach().narrow(dim, 0, 1))


class Muon(torch.optim.Optimizer):
    """Muon over matrices and stacks of matrices.

    The momentum is `exp_avg`, an average of gradients as in AdamW; there is no second moment but,
    with `neuron_beta`, one for each neuron.

    Args:
        groups: Parameter groups, as for every torch optimizer.
        config: The `optimizer:` section.
        dtype: Dtype of the Newton-Schulz products; the method was published with bfloat16.
        apply: Calls a function on full matrices where parameters are sharded.
        sum_shards: Adds sums over what the ranks of a matrix have.
        build_sums: Builds the second moments of neurons.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        config: MuonConfig,
        *,
        dtype: torch.dtype,
        apply: Apply = apply_to_each,
        sum_shards: SumShards = sum_nothing,
        build_sums: BuildSums = build_plain_sums,
    ) -> None:
        super().__init__(list(groups), {"lr": 0.0, "weight_decay": 0.0})
        self._config = config
        self._dtype = dtype
        self._apply = apply
        self._sum_shards = sum_shards
        for group in self.param_groups:
            for parameter in group["params"]:
                state = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                }
                if config.neuron_beta is not None:
                    dim = get_input_dim(parameter.ndim)
                    state |= {NEURON_STATE_KEYS["neuron_moment"]: build_sums(parameter, dim)}
                self.state[parameter] = state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step from the gradients. Collective where `apply` is."""
        config = self._config
        orthogonalize = partial(
            orthogonalize_matrices,
            steps=config.newton_schulz_steps,
            method=config.orthogonalization,
        )
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            updates = self._apply(
                [self._update_momentum(parameter) for parameter in parameters], orthogonalize
            )
            local = [get_local_tensor(update) for update in updates]
            scales = self._compute_scales(parameters, local)
            for parameter, update, scale in zip(parameters, local, scales, strict=True):
                weight = get_local_tensor(parameter)
                change = update.to(weight.dtype)
                apply_weight_decay(
                    weight,
                    change,
                    group["lr"] * group["weight_decay"],
                    is_cautious=config.cautious_weight_decay,
                )
                if isinstance(scale, Tensor):
                    weight.addcmul_(change, scale, value=-group["lr"])
                else:
                    weight.add_(change, alpha=-group["lr"] * scale)

    def _update_momentum(self, parameter: Tensor) -> Tensor:
        """Update the average and return Nesterov's momentum: the average one gradient ahead."""
        momentum = self._config.momentum
        state = self.state[parameter]
        state["step"] += 1
        assert parameter.grad is not None
        state["exp_avg"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(state["exp_avg"], momentum).to(self._dtype)

    def _compute_scales(
        self, parameters: Sequence[Tensor], updates: Sequence[Tensor]
    ) -> Sequence[float | Tensor]:
        """Compute the factors that give updates the root mean square of AdamW's; with
        `neuron_beta` one for each neuron (Li 2025, algorithm 1). Collective there.

        Args:
            parameters: The parameters.
            updates: This rank's part of the orthogonalized matrices.
        """
        beta = self._config.neuron_beta
        if beta is None:
            # An orthogonal matrix has the root mean square 1 / sqrt(max(M, N)).
            return [ADAMW_RMS * math.sqrt(max(parameter.shape[-2:])) for parameter in parameters]
        inputs = [get_input_dim(parameter.ndim) for parameter in parameters]
        neurons = [-3 - dim for dim in inputs]
        squares = [
            torch.linalg.vector_norm(update, dim=dim, keepdim=True, dtype=torch.float32).square_()
            for update, dim in zip(updates, inputs, strict=True)
        ]
        self._sum_shards(squares, parameters, inputs)
        scales: list[Tensor] = []
        for parameter, square, dim in zip(parameters, squares, inputs, strict=True):
            moment = get_local_tensor(self.state[parameter][NEURON_STATE_KEYS["neuron_moment"]])
            moment.lerp_(square / parameter.shape[dim], 1 - beta)
            scales.append(1 / moment.sqrt().add_(self._config.eps))
        sums = [
            (square * scale.square()).sum(dim, keepdim=True)
            for square, scale, dim in zip(squares, scales, neurons, strict=True)
        ]
        self._sum_shards(sums, parameters, neurons)
        for parameter, scale, total in zip(parameters, scales, sums, strict=True):
            # Without a gradient all of them are zero.
            norm = total.sqrt_().clamp_(min=1e-7)
            scale.mul_(ADAMW_RMS * math.sqrt(math.prod(parameter.shape[-2:])) / norm)
        return scales
