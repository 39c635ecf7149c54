"""The learning-rate schedule: its shape over the tokens of a run.

All lengths are tokens, so that a change of batch size does not move them; only the original counts steps, as its
formula does. Every shape rises linearly from 0 to the peak first.
"""

from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.base import Section

Warmup = Annotated[int, Field(ge=0, description="Tokens over which the rate rises from 0 to its peak.")]
Final = Annotated[float, Field(ge=0, le=1, description="Share of the peak rate that is left at the end.")]


class WsdScheduleConfig(Section):
    """Constant at the peak, then a linear fall over the last decay_tokens (MiniCPM, Hu 2024)."""

    kind: Literal["wsd"] = "wsd"
    warmup_tokens: Warmup = 0
    decay_tokens: int = Field(ge=1, description="Tokens of the fall at the end of the run.")
    final_fraction: Final = 0.1


class CosineScheduleConfig(Section):
    """A half cosine from the peak to the end (Loshchilov and Hutter 2016)."""

    kind: Literal["cosine"] = "cosine"
    warmup_tokens: Warmup = 0
    final_fraction: Final = 0.1


class LinearScheduleConfig(Section):
    """A straight line from the peak to the end."""

    kind: Literal["linear"] = "linear"
    warmup_tokens: Warmup = 0
    final_fraction: Final = 0.1


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

    kind: Literal["original"] = "original"
    warmup_steps: int = Field(4000, ge=1, description="Steps over which the rate rises; the fall is measured in it.")


ScheduleConfig = Annotated[
    WsdScheduleConfig | CosineScheduleConfig | LinearScheduleConfig | ConstantScheduleConfig | InverseSqrtScheduleConfig | NoamScheduleConfig,
    Field(discriminator="kind"),
]
