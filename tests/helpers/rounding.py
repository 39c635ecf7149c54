"""Bounds of rounding: how far it may move a result, measured by larger errors that are planted.

An operation of torch is stable: it gives the exact result of operands that differ by a few units
roundoff, rounded once more (N. Higham, Accuracy and Stability of Numerical Algorithms, 2002,
section 1.5). `RoundingErrors` plants such differences at random. What they change in a result is
its forward error: it includes the condition of the computation, whatever its depth and its
cancellations, and depends neither on the processor nor on the order in which a library sums.

Invariants:

- The random numbers have fixed seeds: a bound is the same on every machine, up to rounding.
"""

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

UNIT_ROUNDOFFS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative error of a rounding to nearest."""

PLANTED = {torch.float32: 8, torch.bfloat16: 2, torch.float16: 2}
"""Largest relative error that is planted, in units roundoff of the dtype of the operations.

In float32 a sum of n terms rounds n times, and errors of random sign add up to sqrt(n) units
(N. Higham and T. Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019, theorem 2.4);
tiny models sum at most 64 terms. Sums of 16-bit terms are taken in float32 and rounded to 16 bits
once, so that 2 leaves a factor of two.
"""

USUAL = 1e-5
"""Error of a float32 result that needs no measured bound: about 170 units roundoff of its norm."""

ILL_CONDITIONED = 1e-3
"""A computation that blows errors up beyond this share of a result is a defect itself."""

SAMPLES = 3
"""One sample can be far below the others by chance: the largest of three is the bound."""


class RoundingErrors(TorchDispatchMode):
    """Changes operands and results of operations by random relative errors of at most `largest`."""

    def __init__(self, largest: float, seed: int) -> None:
        super().__init__()
        self._largest = largest
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func` on changed operands, and change its results."""
        if any(value.alias_info is not None for value in func._schema.returns):
            # A view, or an operation in place: what it would change belongs to others.
            return func(*args, **(kwargs or {}))
        operands, named = tree_map(self._change_tensor, (args, kwargs or {}))
        return tree_map(self._change_tensor, func(*operands, **named))

    def _change_tensor(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        noise = 2 * torch.rand(value.shape, generator=self._generator, dtype=torch.float64) - 1
        return (value.double() * (1 + self._largest * noise)).to(value.dtype)


def measure_rounding_errors(
    compute: Callable[[AbstractContextManager[Any]], Mapping[str, Tensor]], dtype: torch.dtype
) -> dict[str, float]:
    """Return how far rounding in `dtype` may move each result, as a Frobenius norm.

    Args:
        compute: Returns results by name, computed in float32 or float64. It enters the context
            that it is given around the operations whose rounding counts.
        dtype: The dtype of these operations in what is tested.
    """
    exact = compute(contextlib.nullcontext())
    allowed = dict.fromkeys(exact, 0.0)
    for seed in range(SAMPLES):
        errors = RoundingErrors(PLANTED[dtype] * UNIT_ROUNDOFFS[dtype], seed)
        for name, value in compute(errors).items():
            change = float((value.double() - exact[name].double()).norm())
            allowed[name] = max(allowed[name], change)
    return allowed


def assert_within_rounding(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    compute: Callable[[AbstractContextManager[Any]], Mapping[str, Tensor]],
    *,
    computations: int = 1,
) -> None:
    """Assert that float32 results are off by no more than rounding explains.

    The bound is measured only for results whose error is above `USUAL`. A result whose norm is
    below a hundredth of the largest counts as one of that size: some are 0 by symmetry.

    Args:
        found: Results by name.
        expected: Their values by another computation.
        compute: Repeats the computation of `found`; see `measure_rounding_errors`.
        computations: How many are in float32: 2 where that of `expected` is as well.
    """
    assert found.keys() == expected.keys()
    norms = {name: float(value.detach().double().norm()) for name, value in expected.items()}
    least = max(norms.values()) / 100
    allowed: dict[str, float] = {}
    for name, value in expected.items():
        error = float((found[name].detach().double() - value.detach().double()).norm())
        size = max(norms[name], least)
        if error < USUAL * size:
            continue
        allowed = allowed or measure_rounding_errors(compute, torch.float32)
        assert allowed[name] < ILL_CONDITIONED * size, f"{name} blows rounding errors up"
        bound = computations * allowed[name]
        assert error < bound, f"{name} is off by {error:.2e}; rounding explains {bound:.2e}"
