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
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

UNIT_ROUNDOFFS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative error of a rounding to nearest."""

PLANTED_16_BITS = 2
"""Largest relative error that is planted in operations of 16 bits, in units roundoff.

Sums of 16-bit terms are taken in float32 and rounded to 16 bits once, so that 2 leaves a factor of
two. In float32 a sum of n terms rounds n times, and errors of random sign add up to sqrt(n) units
(N. Higham and T. Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019, theorem 2.4).
"""

TERMS = 64
"""Terms that the layers of tiny models sum at most."""

EXACT = frozenset(
    getattr(torch.ops.aten, name)
    for name in [
        "amax",
        "amin",
        "argmax",
        "argmin",
        "cat",
        "clone",
        "constant_pad_nd",
        "embedding",
        "flip",
        "gather",
        "index",
        "index_put",
        "index_select",
        "masked_fill",
        "maximum",
        "minimum",
        "repeat",
        "roll",
        "scatter",
        "sort",
        "stack",
        "topk",
        "where",
    ]
)
"""Operations that move or choose numbers, and round none. Errors in them would be others than those
of the same numbers elsewhere, and choices would contradict each other."""

SAMPLES = 3
"""One sample can be far below the others by chance: the largest of three is the bound."""

FACTORS = 250_007
"""Random factors that are drawn, a prime."""


class RoundingErrors(TorchDispatchMode):
    """Change operands and results of torch's operations by random relative errors.

    Tensors of float32 and float64 are changed, others are left as they are.

    Args:
        dtype: The dtype of the operations whose rounding is planted; see `PLANTED_16_BITS`.
        seed: Seed of the errors.
        terms: Terms of the longest sum, in float32.
    """

    def __init__(self, dtype: torch.dtype, seed: int, terms: int = TERMS) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        units = math.sqrt(terms) if dtype == torch.float32 else PLANTED_16_BITS
        largest = units * UNIT_ROUNDOFFS[dtype]
        generator = torch.Generator().manual_seed(seed)
        # Drawn once, and used again from other places on: to draw them for each operand would take
        # longer than the operations.
        factors = torch.empty(FACTORS, dtype=torch.float64).uniform_(
            1 - largest, 1 + largest, generator=generator
        )
        # One of each dtype that is computed in: a product of two dtypes takes three operations.
        self._factors = {kind: factors.to(kind) for kind in (torch.float32, torch.float64)}
        self._next = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func` on changed operands, and change its results."""
        if not _is_rounding(func):
            return func(*args, **(kwargs or {}))
        named = {name: self._change_values(value) for name, value in (kwargs or {}).items()}
        return self._change_values(func(*self._change_values(args), **named))

    def _change_values(self, value: Any) -> Any:
        """Return a tensor, or each of a list or tuple of values, changed; others as they are."""
        if isinstance(value, Tensor):
            return self._change_tensor(value)
        if isinstance(value, (list, tuple)):
            return type(value)([self._change_values(one) for one in value])
        return value

    def _change_tensor(self, value: Tensor) -> Tensor:
        factors = self._factors.get(value.dtype)
        if factors is None:
            return value
        # The lowest number of a dtype, as masks have it, would become infinite.
        largest = torch.finfo(value.dtype).max
        changed = (value * self._take_factors(factors, value.shape)).clamp_(-largest, largest)
        if changed.stride() == value.stride() or 0 in value.stride():
            return changed
        # Grouped products need rows that begin at multiples of 16 bytes, as padded ones do.
        padded = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
        return padded.copy_(changed)

    def _take_factors(self, factors: Tensor, shape: torch.Size) -> Tensor:
        """Return the next factors."""
        count = shape.numel()
        if count > FACTORS - 1:
            return factors.repeat(-(-count // FACTORS))[:count].view(shape)
        if self._next + count > FACTORS:
            # Not from the beginning, or the same operands would have the same factors again.
            self._next = (self._next + count) % (FACTORS - count)
        start = self._next
        self._next += count
        return factors[start : start + count].view(shape)


@cache
def _is_rounding(func: Any) -> bool:
    """Return whether an operation computes new numbers: a view, or an operation in place, would
    change what belongs to others.
    """
    is_shared = any(value.alias_info is not None for value in func._schema.returns)
    return not is_shared and func.overloadpacket not in EXACT


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
        for name, value in compute(RoundingErrors(dtype, seed)).items():
            change = float((value.double() - exact[name].double()).norm())
            allowed[name] = max(allowed[name], change)
    return allowed
