"""Factors on other settings that change over the tokens of a run: straight lines between given points."""

from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import Field, model_validator

from llmsys.config.base import Section
from llmsys.config.rule import Violation, raise_violations

Point = tuple[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=0)]]


class MultiplierScheduleConfig(Section):
    """`factors:` — each a list of points [tokens, factor]: constant before the first and after the last of them.

    Two points at the same tokens are a jump: [[0, 1], [900, 1], [900, 0]] is 1 up to 900 tokens and 0 from there on.
    """

    weight_decay: tuple[Point, ...] = Field((), description="On optimizer.weight_decay; empty: always 1.")
    balance: tuple[Point, ...] = Field(
        (),
        description="On the rate or weights of model.moe.balance; empty: always 1. DeepSeek-V3 ends its last 500 of "
        "14,800 billion tokens at 0.",
    )

    @model_validator(mode="after")
    def _check_points(self) -> Self:
        raise_violations(self._find_violations())
        return self

    def _find_violations(self) -> Iterator[Violation]:
        for name in ("weight_decay", "balance"):
            places = [tokens for tokens, _ in getattr(self, name)]
            if places != sorted(places):
                text = f"the points are at {', '.join(map(str, places))} tokens. Sort them by tokens."
                yield Violation(name, text)

    @property
    def is_active(self) -> bool:
        """Whether any factor is ever another than 1."""
        return bool(self.weight_decay or self.balance)


def interpolate_multiplier(points: tuple[Point, ...], tokens: int) -> float:
    """The factor after so many tokens; of two points at the same tokens the later holds."""
    before = [point for point in points if point[0] <= tokens]
    after = [point for point in points if point[0] > tokens]
    if not before:
        return points[0][1] if points else 1.0
    if not after:
        return before[-1][1]
    (start, low), (end, high) = before[-1], after[0]
    return low + (high - low) * (tokens - start) / (end - start)
