"""How a section refuses values that are legal one by one but not together.

A section's after-validator collects every broken rule as (key, message) and calls `raise_violations`; the loader
spreads them again, so that a person sees all of them at once, each under its own key. Also the small searches for the
nearest value that would have been legal.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pydantic_core import PydanticCustomError


class Violation(NamedTuple):
    """One broken rule: the key inside the section (dotted if deeper) and what to do about it."""

    key: str
    message: str


def raise_violations(problems: Iterable[Violation]) -> None:
    """Raise one validation error that carries every problem, or return when there is none."""
    found = list(problems)
    if found:
        text = "; ".join(f"{key}: {message}" for key, message in found)
        raise PydanticCustomError("rules", "{text}", {"text": text, "problems": [tuple(one) for one in found]})


def list_divisors(number: int) -> list[int]:
    """All positive divisors of a positive number, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def find_nearest(value: int, legal: Sequence[int]) -> int:
    """The legal value closest to `value`; the smaller one when two are equally close."""
    return min(legal, key=lambda candidate: (abs(candidate - value), candidate))


def find_nearest_multiples(value: int, unit: int) -> tuple[int, ...]:
    """The positive multiples of `unit` directly below and above `value`."""
    below = value // unit * unit
    return tuple(multiple for multiple in (below, below + unit) if multiple > 0)


def format_choices(values: Sequence[object]) -> str:
    """`1, 2, 3 or 6`."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
