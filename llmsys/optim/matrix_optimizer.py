"""Adafactor and SOAP: update rules of full matrices, with state whose shape is not the parameter's.

Reads and writes parameters and state by `Update`, which gathers what is sharded. State is sharded
like its parameter.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, assert_never

import torch
from torch import Tensor

from llmsys.config.matrix_optimizers import AdafactorConfig, SoapConfig

# M, N the sides of a matrix (any leading dims are a batch of matrices), S one of them

# Name of each state in a checkpoint → in the state of the optimizer.
STATE_KEYS = {
    "row_moment": "exp_avg_sq_row",
    "column_moment": "exp_avg_sq_column",
    "left_moment": "preconditioner_left",
    "right_moment": "preconditioner_right",
    "left_basis_moment": "basis_left",
    "right_basis_moment": "basis_right",
}
SIDES = {-2: "left", -1: "right"}
# torch.optim.Adafactor's least estimate of a squared gradient.
MIN_SQUARE = torch.finfo(torch.float32).eps

State = dict[str, Tensor]
# Shards → full tensors, which the function changes in place, → the same shards.
Update = Callable[[Sequence[Tensor], Callable[[list[Tensor]], None]], None]
# (shape, parameter) → zeros of the shape, sharded like the parameter.
BuildZeros = Callable[[Sequence[int], Tensor], Tensor]


def update_plain_tensors(
    tensors: Sequence[Tensor], function: Callable[[list[Tensor]], None]
) -> None:
    """Call a function on tensors that every rank has in full: the `Update` of unsharded parameters.

    Args:
        tensors: A parameter, its gradient and its state.
        function: Changes them in place.
    """
    function(list(tensors))


def build_plain_zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    """Build zeros: the `BuildZeros` of unsharded parameters.

    Args:
        shape: Their shape.
        like: Gives dtype and device.

    Returns:
        The zeros.
    """
    return torch.zeros(tuple(shape), dtype=like.dtype, device=like.device)


class MatrixRule(Protocol):
    """The step of one full parameter from its gradient and state."""

    def list_state_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return name and shape of each tensor of state for a parameter of `shape`."""
        ...

    def update_parameter(
        self,
        weight: Tensor,
        gradient: Tensor,
        state: State,
        *,
        step: int,
        rate: float,
        weight_decay: float,
    ) -> None:
        """Change weight and state in place; `step` is counted from 1."""
        ...


class AdafactorRule:
    """Adafactor (Shazeer 2018, algorithms 4 and 5), as torch.optim.Adafactor computes it for
    each matrix.
    """

    def __init__(self, config: AdafactorConfig) -> None:
        self.config = config

    def list_state_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Implement `MatrixRule.list_state_shapes`."""
        if len(shape) < 2:
            return {"exp_avg_sq": tuple(shape)}
        return {
            "exp_avg_sq_row": (*shape[:-1], 1),
            "exp_avg_sq_column": (*shape[:-2], 1, shape[-1]),
        }

    def update_parameter(
        self,
        weight: Tensor,
        gradient: Tensor,
        state: State,
        *,
        step: int,
        rate: float,
        weight_decay: float,
    ) -> None:
        """Implement `MatrixRule.update_parameter`."""
        change = step**-self.config.decay_exponent
        dims = tuple(range(-min(2, weight.ndim), 0))
        # Stacked experts are separate matrices, wherever they are.
        size = (
            weight.square().mean(dims, keepdim=True).sqrt().clamp_(min=self.config.min_weight_size)
        )
        weight.mul_(1 - rate * weight_decay)
        square = gradient.square()
        if weight.ndim > 1:
            row, column = state["exp_avg_sq_row"], state["exp_avg_sq_column"]
            row.lerp_(square.mean(-1, keepdim=True), change)
            column.lerp_(square.mean(-2, keepdim=True), change)
            estimate = row @ column / row.mean(-2, keepdim=True).clamp_(min=MIN_SQUARE)
        else:
            estimate = state["exp_avg_sq"].lerp_(square, change).clone()
        update = estimate.clamp_(min=MIN_SQUARE**2).rsqrt_().mul_(gradient)
        excess = (
            update.square()
            .mean(dims, keepdim=True)
            .sqrt()
            .div_(self.config.clip_threshold)
            .clamp_(min=1.0)
        )
        weight.sub_(update.mul_(size * min(rate, step**-0.5) / excess))


class SoapRule:
    """SOAP (Vyas 2024, algorithm 3): Adam in the eigenbasis of the gradients' second moments
    over rows and columns.
    """

    def __init__(self, config: SoapConfig) -> None:
        self.config = config

    def list_state_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Implement `MatrixRule.list_state_shapes`."""
        shapes = {"exp_avg": tuple(shape), "exp_avg_sq": tuple(shape)}
        for dim in self.config.list_rotated_sides(tuple(shape)):
            square = (*shape[:-2], shape[dim], shape[dim])
            shapes |= {f"preconditioner_{SIDES[dim]}": square, f"basis_{SIDES[dim]}": square}
        return shapes

    def update_parameter(
        self,
        weight: Tensor,
        gradient: Tensor,
        state: State,
        *,
        step: int,
        rate: float,
        weight_decay: float,
    ) -> None:
        """Implement `MatrixRule.update_parameter`."""
        sides = [dim for dim, name in SIDES.items() if f"basis_{name}" in state]
        beta1, beta2 = self.config.betas
        if step > 1 or not sides:
            count = step - 1 if sides else step  # of the steps that moved the weights
            rotated = _rotate(gradient, state, sides)
            first = state["exp_avg"].lerp_(gradient, 1 - beta1)
            second = state["exp_avg_sq"].mul_(beta2).add_(rotated.square().mul_(1 - beta2))
            root = second.sqrt().div_(math.sqrt(1 - beta2**count)).add_(self.config.eps)
            update = _rotate(_rotate(first, state, sides) / root, state, sides, back=True)
            weight.mul_(1 - rate * weight_decay).sub_(update.mul_(rate / (1 - beta1**count)))
        for dim in sides:
            product_SS = gradient @ gradient.mT if dim == -2 else gradient.mT @ gradient
            state[f"preconditioner_{SIDES[dim]}"].lerp_(product_SS, 1 - self.config.shampoo_beta)
        if step == 1:
            for dim in sides:
                # Eigenvalues rise.
                basis_SS = torch.linalg.eigh(state[f"preconditioner_{SIDES[dim]}"])[1].flip(-1)
                state[f"basis_{SIDES[dim]}"].copy_(basis_SS)
        elif (step - 1) % self.config.precondition_every_steps == 0:
            for dim in sides:
                self._update_basis(state, dim)

    def _update_basis(self, state: State, dim: int) -> None:
        """Take one step of power iteration, with the vectors in the order of their eigenvalues
        (section 4).
        """
        basis_SS = state[f"basis_{SIDES[dim]}"]
        matrix_SS = state[f"preconditioner_{SIDES[dim]}"]
        product_SS = matrix_SS @ basis_SS
        order_S = (basis_SS * product_SS).sum(-2).argsort(-1, descending=True)
        second = state["exp_avg_sq"]
        index = order_S[..., :, None] if dim == -2 else order_S[..., None, :]
        second.copy_(second.take_along_dim(index, dim))
        basis_SS.copy_(torch.linalg.qr(product_SS.take_along_dim(order_S[..., None, :], -1))[0])


def _rotate(matrix_MN: Tensor, state: State, sides: Sequence[int], *, back: bool = False) -> Tensor:
    """Return a matrix in the bases of its sides, or from them."""
    for dim in sides:
        basis_SS = state[f"basis_{SIDES[dim]}"]
        if dim == -2:
            matrix_MN = (basis_SS if back else basis_SS.mT) @ matrix_MN
        else:
            matrix_MN = matrix_MN @ (basis_SS.mT if back else basis_SS)
    return matrix_MN


def build_matrix_rule(config: AdafactorConfig | SoapConfig) -> MatrixRule:
    """Build the rule of an optimizer of full matrices.

    Args:
        config: The section `optimizer`.

    Returns:
        The rule of Adafactor or SOAP.
    """
    match config:
        case AdafactorConfig():
            return AdafactorRule(config)
        case SoapConfig():
            return SoapRule(config)
        case unreachable:
            assert_never(unreachable)


class MatrixOptimizer(torch.optim.Optimizer):
    """An optimizer of one matrix rule. The state exists at once.

    Args:
        groups: Parameter groups, as for every torch optimizer.
        config: The `optimizer:` section.
        update: Calls a function on full tensors where they are sharded.
        build_zeros: Builds the state.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        config: AdafactorConfig | SoapConfig,
        *,
        update: Update = update_plain_tensors,
        build_zeros: BuildZeros = build_plain_zeros,
    ) -> None:
        super().__init__(
            [dict(group) for group in groups], {"lr": config.learning_rate, "weight_decay": 0.0}
        )
        self.rule = build_matrix_rule(config)
        self._update = update
        for group in self.param_groups:
            for parameter in group["params"]:
                shapes = self.rule.list_state_shapes(parameter.shape)
                self.state[parameter] = {"step": torch.zeros(())} | {
                    key: build_zeros(shape, parameter.detach()) for key, shape in shapes.items()
                }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step from the gradients. Collective where `update` is."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(parameter, group)

    def _step_parameter(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] += 1
        step = int(state["step"])
        keys = [key for key in state if key != "step"]
        assert parameter.grad is not None

        def update_full(full: list[Tensor]) -> None:
            weight, gradient, *values = full
            named = dict(zip(keys, values, strict=True))
            options = {"rate": float(group["lr"]), "weight_decay": group["weight_decay"]}
            self.rule.update_parameter(weight, gradient, named, step=step, **options)

        self._update(
            [parameter.detach(), parameter.grad, *(state[key] for key in keys)], update_full
        )
