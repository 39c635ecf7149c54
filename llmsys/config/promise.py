"""Promise of `llmsys init --minutes` for a run (`promise:`), to compare with its outcome.

Training does not read it.
"""

from typing import Literal

from pydantic import Field

from llmsys.config.section import Section


class PromisedInterval(Section):
    """A promised number: eight of ten runs should end between `low` and `high`."""

    low: float = Field(gt=0, description="One run in ten ends below.")
    middle: float = Field(gt=0, description="The promise.")
    high: float = Field(gt=0, description="One run in ten ends above.")

    def contains(self, value: float) -> bool:
        """Return whether a value is inside of the interval.

        Args:
            value: Number in the unit of the interval.
        """
        return self.low <= value <= self.high


class PromiseConfig(Section):
    """`promise:` — minutes and loss that `llmsys init --minutes` promised. Training ignores it."""

    format_version: Literal[1] = Field(1, description="Version of the format of the promise.")
    minutes: PromisedInterval = Field(
        description="Wall minutes from the first step to the end of the final evaluation."
    )
    bits_per_byte: PromisedInterval = Field(description="Held-out bits per byte at the end.")
    tokens: int = Field(ge=1, description="Planned tokens: `train.tokens`.")
    machine: str = Field(description="Machine that it holds for.")
    date: str = Field(description="Day on which the machine and the text were measured.")
