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
from llmsys.optim.elementwise import apply_weight_decay

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

# Shift of a preconditioner relative to its largest eigenvalue: a hundred roundings of float32, from
# which the vectors of a null space then move by a hundredth or less.
NULL_SHIFT = 1e-5
# Least root of a second moment relative to the largest one of its matrix: a hundred roundings.
MIN_ROOT = 1e-5

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
        """Change weight and state in place.

        Args:
            weight: a full tensor.
            gradient: of its shape.
            state: moments by name.
            step: number of the step, counted from 1.
            rate: learning rate.
            weight_decay: decay, to be multiplied by the rate.
        """
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
        apply_weight_decay(
            weight, update, rate * weight_decay, is_cautious=self.config.cautious_weight_decay
        )
        weight.sub_(update.mul_(size * min(rate, step**-0.5) / excess))


class SoapRule:
    """SOAP (Vyas 2024, algorithm 3): Adam in the eigenbasis of the second moments of a gradient.

    The paper leaves the basis of a null space open, and the product of a gradient with M > N has
    one of M - N dims: eigenvectors there are rounding, in which Adam would take steps of full
    length. So the first basis is completed by a rule (`build_first_basis`), and later ones are
    those of the preconditioner plus a small multiple of the identity, which changes no eigenvector
    and keeps the basis of a null space where it is. A direction in which every gradient is zero but
    for rounding (under LayerNorm, the mean of the residual) gets no step of full length either: a
    root counts as a hundred thousandth of the largest one if it is smaller. Steps then depend on
    the layout by rounding alone.
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
            root = second.sqrt().div_(math.sqrt(1 - beta2**count))
            least = MIN_ROOT * root.amax(tuple(range(-min(2, root.ndim), 0)), keepdim=True)
            root = root.clamp_(min=least).add_(self.config.eps)
            update = _rotate(_rotate(first, state, sides) / root, state, sides, back=True)
            apply_weight_decay(
                weight, update, rate * weight_decay, is_cautious=self.config.cautious_weight_decay
            )
            weight.sub_(update.mul_(rate / (1 - beta1**count)))
        for dim in sides:
            product_SS = gradient @ gradient.mT if dim == -2 else gradient.mT @ gradient
            state[f"preconditioner_{SIDES[dim]}"].lerp_(product_SS, 1 - self.config.shampoo_beta)
        if step == 1:
            for dim in sides:
                state[f"basis_{SIDES[dim]}"].copy_(build_first_basis(gradient, dim))
        elif (step - 1) % self.config.precondition_every_steps == 0:
            for dim in sides:
                self._update_basis(state, dim)

    def _update_basis(self, state: State, dim: int) -> None:
        """Take one step of power iteration, with the vectors in the order of their eigenvalues
        (section 4).
        """
        basis_SS = state[f"basis_{SIDES[dim]}"]
        product_SS = state[f"preconditioner_{SIDES[dim]}"] @ basis_SS
        values_S = (basis_SS * product_SS).sum(-2)
        shift_1 = (NULL_SHIFT * values_S.amax(-1, keepdim=True)).clamp_(min=MIN_SQUARE**2)
        # Eigenvalues below the shift are rounding, and so would be their order.
        order_S = values_S.clamp_(min=shift_1).argsort(dim=-1, descending=True, stable=True)
        second = state["exp_avg_sq"]
        index = order_S[..., :, None] if dim == -2 else order_S[..., None, :]
        second.copy_(second.take_along_dim(index, dim))
        product_SS.add_(basis_SS * shift_1[..., None])
        vectors_SS, triangle_SS = torch.linalg.qr(
            product_SS.take_along_dim(order_S[..., None, :], -1)
        )
        # Without this a vector could turn round, to the same line.
        signs_S = triangle_SS.diagonal(dim1=-2, dim2=-1).sign()
        basis_SS.copy_(vectors_SS * signs_S[..., None, :])


def build_first_basis(gradient: Tensor, dim: int) -> Tensor:
    """Return the eigenvectors of a gradient's product with itself, with the largest eigenvalues
    first.

    Those of the null space are the eigenvectors, within it, of a diagonal matrix whose entries fall
    from 2 to 1. So they are a function of the null space, and axes of rows that are all zero.

    Args:
        gradient: (..., M, N).
        dim: -2 for the M rows, -1 for the N columns.

    Returns:
        (..., S, S) with S = M or N, orthonormal columns in the dtype of `gradient`.
    """
    # In float32 the product would bury singular values below 1e-3 of the largest.
    matrix = gradient.double()
    product_SS = matrix @ matrix.mT if dim == -2 else matrix.mT @ matrix
    size = product_SS.shape[-1]
    # Eigenvalues rise.
    values_S, vectors_SS = (one.flip(-1) for one in torch.linalg.eigh(product_SS))
    # Of smaller singular values a float32 gradient has a digit or two, and no direction.
    is_null_S = values_S <= values_S[..., :1] * MIN_ROOT**2
    range_SS = vectors_SS.where(~is_null_S[..., None, :], 0)
    onto_null_SS = (
        torch.eye(size, dtype=matrix.dtype, device=matrix.device) - range_SS @ range_SS.mT
    )
    falling_S = torch.linspace(2, 1, size, dtype=matrix.dtype, device=matrix.device)
    # Its eigenvalues are 1 to 2 in the null space, and 0 outside of it.
    null_SS = torch.linalg.eigh(onto_null_SS @ (falling_S[:, None] * onto_null_SS))[1].flip(-1)
    place_S = torch.arange(size, device=matrix.device)
    first_null = size - is_null_S.sum(-1, keepdim=True)
    index_S = (place_S - first_null).clamp_(min=0)
    completed_SS = null_SS.take_along_dim(index_S[..., None, :], -1)
    basis_SS = vectors_SS.where((place_S < first_null)[..., None, :], completed_SS)
    # An eigenvector has two directions: its largest entry is positive.
    largest_S = basis_SS.take_along_dim(basis_SS.abs().argmax(-2, keepdim=True), -2)
    directed_SS: Tensor = basis_SS * largest_S.sign()
    return directed_SS.to(gradient.dtype)


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
