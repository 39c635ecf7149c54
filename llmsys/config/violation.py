"""Violations of constraints between config values, and helpers to suggest legal values.

The after-validator of a section collects violations and calls `raise_violations`. The loader reports all of them at
once, each under its own key.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pydantic_core import PydanticCustomError


class Violation(NamedTuple):
    """One broken constraint: the key inside the section (dotted if nested) and a message with the fix."""

    key: str
    message: str


def raise_violations(problems: Iterable[Violation]) -> None:
    """Raise one validation error with all violations, if there are any.

    Raises:
        PydanticCustomError: type `rules`; the context holds (key, message) pairs.
    """
    found = list(problems)
    if found:
        text = "; ".join(f"{key}: {message}" for key, message in found)
        # a ValueError carries text alone; this context carries every key
        raise PydanticCustomError("rules", "{text}", {"text": text, "problems": [tuple(problem) for problem in found]})


def list_divisors(number: int) -> list[int]:
    """Return all divisors of a number.

    Args:
        number: a positive integer.

    Returns:
        The positive divisors in ascending order.
    """
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def find_nearest(value: int, legal: Sequence[int]) -> int:
    """Return the legal value closest to `value`; the smaller one of a tie."""
    return min(legal, key=lambda candidate: (abs(candidate - value), candidate))


def find_nearest_multiples(value: int, unit: int) -> tuple[int, ...]:
    """Return the positive multiples of `unit` next to `value`: at or below it, and above it."""
    below = value // unit * unit
    return tuple(multiple for multiple in (below, below + unit) if multiple > 0)


def format_choices(values: Sequence[object]) -> str:
    """Format values for a message: `1, 2, 3 or 6`.

    Args:
        values: at least one value.

    Returns:
        The values joined by commas and a final `or`.
    """
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
