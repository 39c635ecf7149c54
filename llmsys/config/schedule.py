"""The learning-rate schedule: its shape over the tokens of a run.

All lengths are tokens, so that a change of batch size does not move them; only the original counts steps, as its
formula does. Every shape rises linearly from 0 to the peak first.

Factors on other settings that change over the tokens of a run: straight lines between given points.
"""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from llmsys.config.section import Section
from llmsys.config.violation import Violation, raise_violations

Warmup = Annotated[int, Field(ge=0, description="Tokens over which the rate rises from 0 to its peak.")]
Final = Annotated[float, Field(ge=0, le=1, description="Share of the peak rate that is left at the end.")]


class WsdScheduleConfig(Section):
    """Constant at the peak, then a linear fall over the last decay_tokens (MiniCPM, Hu 2024)."""

    kind: Literal["wsd"] = "wsd"
    warmup_tokens: Warmup = 0
    decay_tokens: int = Field(ge=1, description="Tokens of the fall at the end of the run.")
    min_lr_factor: Final = 0.1


class CosineScheduleConfig(Section):
    """A half cosine from the peak to the end (Loshchilov and Hutter 2016)."""

    kind: Literal["cosine"] = "cosine"
    warmup_tokens: Warmup = 0
    min_lr_factor: Final = 0.1


class LinearScheduleConfig(Section):
    """A straight line from the peak to the end."""

    kind: Literal["linear"] = "linear"
    warmup_tokens: Warmup = 0
    min_lr_factor: Final = 0.1


class ConstantScheduleConfig(Section):
    """The peak, to the end."""

    kind: Literal["constant"] = "constant"
    warmup_tokens: Warmup = 0


class InverseSqrtScheduleConfig(Section):
    """1/sqrt(tokens) after the warm-up (Vaswani 2017, 5.3), scaled to 1 where the warm-up ends."""

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"
    warmup_tokens: int = Field(ge=1, description="Tokens over which the rate rises; the fall is measured in it.")


class NoamScheduleConfig(Section):
    """Vaswani 2017, 5.3, to the letter: hidden_size^-1/2 · min(t^-1/2, t · warmup_steps^-3/2) at step t = 1, 2, …

    optimizer.learning_rate is a factor on it, 1 in the original. The peak is at t = warmup_steps.
    """

    kind: Literal["noam"] = "noam"
    warmup_steps: int = Field(4000, ge=1, description="Steps over which the rate rises; the fall is measured in it.")


ScheduleConfig = Annotated[
    WsdScheduleConfig
    | CosineScheduleConfig
    | LinearScheduleConfig
    | ConstantScheduleConfig
    | InverseSqrtScheduleConfig
    | NoamScheduleConfig,
    Field(discriminator="kind"),
]


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
