"""Which steps count as bad, beside those that are not finite."""

from typing import Self

from pydantic import Field, model_validator

from llmsys.config.base import Section
from llmsys.config.rule import Violation, raise_violations


class SpikeDetectionConfig(Section):
    """A step is a spike when its number is more than so many times the median of the steps before it.

    The median is over the last `window` steps that were taken; before there are as many, nothing is a spike.
    """

    gradient_norm: float = Field(
        0.0, ge=0, description="Times the median gradient norm (before clipping), such as 10; 0: norms are not judged."
    )
    loss: float = Field(0.0, ge=0, description="Times the median loss, such as 1.5; 0: losses are not judged.")
    window: int = Field(100, ge=2, description="Steps whose median is taken.")

    @model_validator(mode="after")
    def _check_ratios(self) -> Self:
        raise_violations(
            Violation(name, f"{value:g} times the median would refuse ordinary steps. Use more than 1, or 0 for no rule.")
            for name, value in (("gradient_norm", self.gradient_norm), ("loss", self.loss))
            if 0 < value <= 1
        )
        return self
