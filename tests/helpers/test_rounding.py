"""Bounds of rounding cover what float32 does in any order, and little more."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from llmsys.doctor.rounding import measure_rounding_errors
from tests.helpers.rounding import assert_within_rounding

GENERATOR = torch.Generator().manual_seed(0)
LEFT_NK = torch.randn(50, 64, generator=GENERATOR)
RIGHT_KM = torch.randn(64, 30, generator=GENERATOR)


def multiply(errors: AbstractContextManager[Any]) -> dict[str, Tensor]:
    with errors:
        return {"product": LEFT_NK @ RIGHT_KM}


def cancel(errors: AbstractContextManager[Any]) -> dict[str, Tensor]:
    """Subtract nearly all of a product from itself: its errors stay, and it is a thousandth."""
    with errors:
        product_NM = LEFT_NK @ RIGHT_KM
        rest_NM = (LEFT_NK * 1.001) @ RIGHT_KM - product_NM
    return {"rest": rest_NM}


@pytest.mark.parametrize("compute", [multiply, cancel])
def test_the_bound_covers_the_error_of_any_order_of_sums(compute: Any) -> None:
    allowed = measure_rounding_errors(compute, torch.float32)
    exact_NM = LEFT_NK.double() @ RIGHT_KM.double()
    if compute is cancel:
        exact_NM = (LEFT_NK * 1.001).double() @ RIGHT_KM.double() - exact_NM
    for seed in range(10):
        order_K = torch.randperm(64, generator=torch.Generator().manual_seed(seed))
        total_NM = torch.zeros(50, 30)
        other_NM = torch.zeros(50, 30)
        for k in order_K.tolist():
            total_NM += LEFT_NK[:, k : k + 1] * RIGHT_KM[k]
            other_NM += (LEFT_NK * 1.001)[:, k : k + 1] * RIGHT_KM[k]
        found_NM = other_NM - total_NM if compute is cancel else total_NM
        error = float((found_NM.double() - exact_NM).norm())
        [bound] = allowed.values()
        assert bound / 100 < error < bound


def test_an_error_beyond_rounding_is_named_and_one_of_cancellation_is_not() -> None:
    found = cancel(contextlib.nullcontext())
    exact_NM = (LEFT_NK * 1.001).double() @ RIGHT_KM.double() - LEFT_NK.double() @ RIGHT_KM.double()
    size = float(exact_NM.norm())
    assert float((found["rest"].double() - exact_NM).norm()) > 1e-5 * size
    assert_within_rounding(found, {"rest": exact_NM}, cancel)
    with pytest.raises(AssertionError, match=r"rest is off by .*; rounding explains "):
        assert_within_rounding({"rest": found["rest"] * 1.01}, {"rest": exact_NM}, cancel)


def test_a_computation_that_blows_errors_up_is_no_excuse() -> None:
    def blow_up(errors: AbstractContextManager[Any]) -> dict[str, Tensor]:
        with errors:
            return {"rest": (LEFT_NK + 1e5) - 1e5}

    with pytest.raises(AssertionError, match="rest blows rounding errors up"):
        assert_within_rounding(blow_up(contextlib.nullcontext()), {"rest": LEFT_NK}, blow_up)
