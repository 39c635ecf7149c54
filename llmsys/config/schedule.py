"""The learning-rate schedule, and piecewise-linear factors on weight decay and expert balance.

Lengths are in tokens, so that they do not depend on the batch size. Only `noam` counts steps, as
its formula does. Every schedule starts with a linear warm-up from 0 to the peak.
"""

from abc import abstractmethod
from typing import Annotated, Literal

from pydantic import Field, field_validator

from llmsys.config.python_code import PythonCode
from llmsys.config.section import Section, raise_violation

Warmup = Annotated[int, Field(ge=0, description="Warmup tokens.")]
Final = Annotated[
    float, Field(ge=0, le=1, description="Final learning rate as a share of the peak.")
]


class WsdScheduleConfig(Section):
    """Constant at the peak, then linear decay over the last `decay_tokens` (MiniCPM, Hu 2024)."""

    kind: Literal["wsd"] = "wsd"
    warmup_tokens: Warmup = 0
    decay_tokens: int = Field(ge=1, description="Tokens of the decay at the end of the run.")
    min_lr_factor: Final = 0.1


class CosineScheduleConfig(Section):
    """Half-cosine decay from the peak to the end (Loshchilov and Hutter 2016)."""

    kind: Literal["cosine"] = "cosine"
    warmup_tokens: Warmup = 0
    min_lr_factor: Final = 0.1


class LinearScheduleConfig(Section):
    """Linear decay from the peak to the end."""

    kind: Literal["linear"] = "linear"
    warmup_tokens: Warmup = 0
    min_lr_factor: Final = 0.1


class ConstantScheduleConfig(Section):
    """Constant at the peak."""

    kind: Literal["constant"] = "constant"
    warmup_tokens: Warmup = 0


class InverseSqrtScheduleConfig(Section):
    """Decay as 1/sqrt(tokens) after the warm-up (Vaswani 2017, 5.3), scaled to 1 at its end."""

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"
    warmup_tokens: int = Field(ge=1, description="Warmup tokens; also the time scale of the decay.")


class NoamScheduleConfig(Section):
    """Schedule of Vaswani 2017, 5.3: hidden_size^-1/2 · min(t^-1/2, t · warmup_steps^-3/2) at step
    t = 1, 2, …

    `optimizer.learning_rate` multiplies it (1 in the paper). The peak is at t = warmup_steps.
    """

    kind: Literal["noam"] = "noam"
    warmup_steps: int = Field(
        4000, ge=1, description="Warmup steps; also the time scale of the decay."
    )


class PythonScheduleConfig(PythonCode):
    """A schedule of your own: a class that extends `llmsys.config.schedule.PythonSchedule`,
    after a linear warm-up.
    """

    kind: Literal["python"] = "python"
    warmup_tokens: Warmup = 0

    __hash__ = PythonCode.__hash__


class PythonSchedule(Section):
    """Base class of a schedule: fields are options."""

    @abstractmethod
    def compute_multiplier(self, tokens: float, budget_tokens: float) -> float:
        """Return the share of the peak learning rate.

        Args:
            tokens: training tokens before the step.
            budget_tokens: training tokens of the run.
        """


ScheduleConfig = Annotated[
    WsdScheduleConfig
    | CosineScheduleConfig
    | LinearScheduleConfig
    | ConstantScheduleConfig
    | InverseSqrtScheduleConfig
    | NoamScheduleConfig
    | PythonScheduleConfig,
    Field(discriminator="kind"),
]


Point = tuple[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=0)]]


class MultiplierScheduleConfig(Section):
    """`factors:` — lists of points [tokens, factor], interpolated linearly and constant outside the
    points.

    Two points at the same token count are a step: [[0, 1], [900, 1], [900, 0]] is 1 before 900
    tokens and 0 from 900.
    """

    weight_decay: tuple[Point, ...] = Field(
        (), validate_default=False, description="Factor on optimizer.weight_decay. Empty: always 1."
    )
    balance: tuple[Point, ...] = Field(
        (),
        validate_default=False,
        description="Factor on the rate or weight of load balancing. Empty: always 1. DeepSeek-V3 "
        "uses 0 for the last 500 of 14,800 billion tokens.",
    )

    @field_validator("weight_decay", "balance")
    @classmethod
    def _check_points(cls, points: tuple[Point, ...]) -> tuple[Point, ...]:
        positions = [tokens for tokens, _ in points]
        if positions != sorted(positions):
            raise_violation(
                "",
                f"the points are at {', '.join(map(str, positions))} tokens. Sort them by tokens.",
            )
        return points

    @property
    def is_active(self) -> bool:
        """True if any factor has points."""
        return bool(self.weight_decay or self.balance)


def interpolate_multiplier(points: tuple[Point, ...], tokens: int) -> float:
    """Return the factor after `tokens` training tokens.

    Args:
        points: (tokens, factor) pairs sorted by tokens; empty: the factor is 1. Of two points at
            the same token count, the later one applies.
        tokens: training tokens so far.

    Returns:
        The linearly interpolated factor.
    """
    before = [point for point in points if point[0] <= tokens]
    after = [point for point in points if point[0] > tokens]
    if not before:
        return points[0][1] if points else 1.0
    if not after:
        return before[-1][1]
    (start, low), (end, high) = before[-1], after[0]
    return low + (high - low) * (tokens - start) / (end - start)
