"""Assert that a result is off by no more than rounding explains; see llmsys/doctor/rounding.py."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from llmsys.doctor.rounding import measure_rounding_errors

USUAL = 1e-5
"""Error of a float32 result that needs no measured bound: about 170 units roundoff of its norm."""

ILL_CONDITIONED = 1e-3
"""A computation that blows errors up beyond this share of a result is a defect itself."""


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
