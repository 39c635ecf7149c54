"""The lowest point of a curve with one valley, on a logarithmic axis."""

import math
from collections.abc import Callable

GOLDEN = (math.sqrt(5) - 1) / 2


def minimize_golden_section(curve: Callable[[float], float], low: float, high: float, steps: int = 120) -> float:
    """Golden-section search (Kiefer 1953): the x in [low, high] where `curve` is lowest; x is positive.

    A step shrinks the interval by 0.618; 120 of them reach the last digit of a double from any start.
    """
    left, right = math.log(low), math.log(high)
    first, second = right - GOLDEN * (right - left), left + GOLDEN * (right - left)
    at_first, at_second = curve(math.exp(first)), curve(math.exp(second))
    for _ in range(steps):
        if at_first <= at_second:
            right, second, at_second = second, first, at_first
            first = right - GOLDEN * (right - left)
            at_first = curve(math.exp(first))
        else:
            left, first, at_first = first, second, at_second
            second = left + GOLDEN * (right - left)
            at_second = curve(math.exp(second))
    return math.exp((left + right) / 2)
