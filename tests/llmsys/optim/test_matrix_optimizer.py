"""Adafactor and SOAP take the steps of torch's own and of the paper, for each matrix of a stack."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from llmsys.config.loading.load import load_run_config
from llmsys.config.matrix_optimizers import AdafactorConfig, SoapConfig
from llmsys.doctor.rounding import UNIT_ROUNDOFFS
from llmsys.errors import ConfigError
from llmsys.optim.build_optimizer import build_optimizer
from llmsys.optim.matrix_optimizer import build_first_basis

STEPS, EPS = 8, 1e-6


def run_steps(
    config: AdafactorConfig | SoapConfig, starts: list[Tensor], gradients: list[list[Tensor]]
) -> list[Tensor]:
    named = {
        f"{number}.up_proj.weight": nn.Parameter(start.clone())
        for number, start in enumerate(starts)
    }
    optimizer = build_optimizer(named, config, compute_dtype=torch.float32)
    for step in gradients:
        for parameter, gradient in zip(named.values(), step, strict=True):
            parameter.grad = gradient.clone()
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate
        optimizer.step()
    return [parameter.detach() for parameter in named.values()]


def draw(shapes: list[tuple[int, ...]]) -> tuple[list[Tensor], list[list[Tensor]]]:
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in shapes], [
        [torch.randn(shape) for shape in shapes] for _ in range(STEPS)
    ]


def test_adafactor_takes_the_steps_of_torchs_own() -> None:
    starts, gradients = draw([(12, 7), (5,), (3, 4)])
    starts[2] *= 1e-5  # smaller than the least size of a weight
    config = AdafactorConfig(learning_rate=0.3, weight_decay=0.1)
    theirs = [nn.Parameter(start.clone()) for start in starts]
    groups = [{"params": [one], "weight_decay": 0.1 if one.ndim > 1 else 0.0} for one in theirs]
    oracle = torch.optim.Adafactor(groups, lr=0.3, foreach=False)
    for step in gradients:
        for one, gradient in zip(theirs, step, strict=True):
            one.grad = gradient.clone()
        oracle.step()
    for ours, one in zip(run_steps(config, starts, gradients), theirs, strict=True):
        # About 20 roundings a step, each of at most the largest weight.
        largest = float(one.abs().max())
        allowed = STEPS * 20 * UNIT_ROUNDOFFS[torch.float32] * largest
        torch.testing.assert_close(ours, one.detach(), rtol=0, atol=allowed)


def test_adafactor_treats_each_matrix_of_a_stack_by_itself() -> None:
    [stack], gradients = draw([(3, 6, 5)])
    # Matrices of other sizes, and one whose update is clipped where the others' is not.
    stack *= torch.tensor([1.0, 0.1, 1e-5]).view(3, 1, 1)
    for step, [gradient] in enumerate(gradients):
        gradient[1] *= 10.0**step
    config = AdafactorConfig(learning_rate=0.3, weight_decay=0.1)
    [ours] = run_steps(config, [stack], gradients)
    for number in range(3):
        theirs = nn.Parameter(stack[number].clone())
        oracle = torch.optim.Adafactor([theirs], lr=0.3, weight_decay=0.1, foreach=False)
        for [gradient] in gradients:
            theirs.grad = gradient[number].clone()
            oracle.step()
        torch.testing.assert_close(ours[number], theirs.detach(), rtol=1e-5, atol=1e-7)


def compute_first_basis_twin(matrix: Tensor) -> Tensor:
    """Eigenvectors, and of a null space those of the falling diagonal within it."""
    vectors, values, _ = np.linalg.svd(matrix.numpy())
    rank = int((values > 1e-10 * values[0]).sum())
    null = vectors[:, rank:]
    inside = np.linalg.eigh(null.T @ np.diag(np.linspace(2, 1, len(matrix))) @ null)[1][:, ::-1]
    return torch.from_numpy(np.concatenate([vectors[:, :rank], null @ inside], axis=1))


def compute_soap_twin(config: SoapConfig, start: Tensor, gradients: list[Tensor]) -> Tensor:
    """Return a matrix after SOAP's steps (Vyas 2024, algorithm 3), in float64 and with one
    matrix at a time.
    """
    (beta1, beta2), beta = config.betas, config.shampoo_beta
    weight, first, second = (
        start.double(),
        torch.zeros_like(start).double(),
        torch.zeros_like(start).double(),
    )
    left, right = (torch.zeros(size, size, dtype=torch.float64) for size in start.shape)
    bases: list[Tensor] = []
    for t, gradient in enumerate(g.double() for g in gradients):
        if bases:
            rotated = bases[0].T @ gradient @ bases[1]
            first = beta1 * first + (1 - beta1) * gradient
            second = beta2 * second + (1 - beta2) * rotated**2
            root = (second / (1 - beta2**t)).sqrt()
            root = root.clamp(min=1e-5 * float(root.max())) + config.eps
            ratio = (bases[0].T @ first @ bases[1] / (1 - beta1**t)) / root
            weight = weight * (1 - config.learning_rate * config.weight_decay)
            weight = weight - config.learning_rate * (bases[0] @ ratio @ bases[1].T)
        left = beta * left + (1 - beta) * gradient @ gradient.T
        right = beta * right + (1 - beta) * gradient.T @ gradient
        if not bases:
            bases = [compute_first_basis_twin(one) for one in (left, right)]
        elif t % config.precondition_every_steps == 0:
            for dim, matrix in enumerate((left, right)):
                values = torch.diag(bases[dim].T @ matrix @ bases[dim])
                order = values.argsort(descending=True)
                second = second.index_select(dim, order)
                shifted = matrix + 1e-5 * values.max() * torch.eye(len(matrix))
                bases[dim] = torch.linalg.qr(shifted @ bases[dim][:, order])[0]
    return weight


def test_soap_takes_the_steps_of_the_paper() -> None:
    """A stack is its matrices; a side that is too long is not rotated."""
    # After one gradient the longer side of the first one has a null space.
    starts, gradients = draw([(7, 4), (2, 4, 4)])
    config = SoapConfig(learning_rate=0.05, weight_decay=0.1, eps=EPS, precondition_every_steps=3)
    ours = run_steps(config, starts, gradients)
    for number, matrix in enumerate([ours[0], *ours[1]]):
        member = (lambda one: one) if not number else (lambda one, e=number - 1: one[e])
        own = [member(step[min(number, 1)]) for step in gradients]
        expected = compute_soap_twin(config, member(starts[min(number, 1)]), own)
        torch.testing.assert_close(matrix.double(), expected, rtol=2e-3, atol=2e-4)
    assert config.model_copy(update={"max_precondition_size": 4}).list_rotated_sides((6, 4)) == [-1]
    starts, gradients = draw([(6, 4), (2, 2, 5)])
    short = run_steps(config.model_copy(update={"max_precondition_size": 3}), starts, gradients)
    assert all(one.isfinite().all() for one in short), "plain Adam, from the first step"


def test_the_first_basis_is_a_function_of_the_gradient_in_its_null_space_too() -> None:
    """Rounding of the gradient moves it by rounding; rows of zeros keep their axes."""
    torch.manual_seed(1)
    gradient = torch.randn(2, 8, 3)
    gradient[1, [2, 5]] = 0
    for dim in (-2, -1):
        basis, moved = (
            build_first_basis(one, dim)
            for one in (gradient, gradient * (1 + 1e-7 * torch.randn(2, 8, 3)))
        )
        torch.testing.assert_close(moved, basis, rtol=0, atol=1e-5)
        torch.testing.assert_close(
            basis.mT @ basis, torch.eye(basis.shape[-1]).expand_as(basis), rtol=0, atol=1e-6
        )
    axes = build_first_basis(gradient, -2)[1][[2, 5]]
    assert sorted(axes.abs().amax(-1).tolist()) == [1, 1]
    assert torch.equal(build_first_basis(torch.zeros(4, 4), -1), torch.eye(4)), "an idle expert"


def test_rounding_is_no_direction_of_a_step() -> None:
    """The columns of each gradient sum to zero but for rounding, as behind a LayerNorm."""
    starts, gradients = draw([(6, 6)])
    for step in gradients:
        step[0] -= step[0].mean(0)
    config = SoapConfig(learning_rate=0.05, weight_decay=0.0, precondition_every_steps=3)
    moved = run_steps(config, starts, gradients)[0] - starts[0]
    assert float(moved.mean(0).abs().max()) < 0.01 * float(moved.abs().max())


def test_settings_that_adafactor_would_ignore_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.eps: adafactor has no such term"):
        load_run_config("train/mup-tiny", ["model.parametrization={kind: standard}",
            "optimizer.betas=[0.9,0.95]",
                                           "optimizer.kind=adafactor",
                                           "optimizer.eps=1e-6"])  # fmt: skip
