"""What the model of time leaves unexplained: one factor and one spread for each class of measurement.

Reads `residual.yaml`, which tools/bench/estimates.py writes from named published rows. The spread is of the logarithm:
measured = modelled · factor · exp(spread · z) with z standard normal.
"""

from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from llmsys.config.base import Section
from llmsys.config.model import ModelConfig
from llmsys.config.yaml_text import parse
from llmsys.estimate.interval import Interval, log_normal
from llmsys.estimate.software import Software

FILE = Path(__file__).with_name("residual.yaml")
Kind = Literal["step", "run"]


class Residual(Section):
    """Of one class."""

    factor: float = Field(gt=0, description="Measured over modelled, the median of the calibration rows.")
    spread: float = Field(ge=0, description="Standard deviation of its logarithm.")
    rows: tuple[str, ...] = Field(description="The published rows that it was calibrated on.")

    def around(self, modelled: float) -> Interval:
        """The interval for a modelled number."""
        return log_normal(modelled * self.factor, self.spread)


class Residuals(Section):
    """The classes: one step of a dense model, one of a mixture of experts, a whole run over its steps, and the energy
    of a whole run over its hours and watts."""

    dense: Residual
    moe: Residual
    run: Residual
    energy: Residual


@cache
def residuals() -> Residuals:
    """What was calibrated."""
    values, _ = parse(FILE.read_text(encoding="utf-8"), FILE.name)
    return Residuals.model_validate(values)


def residual(kind: Kind, model: ModelConfig, software: Software) -> Residual:
    """The class of a measurement."""
    if kind == "run":
        return residuals().run
    return residuals().moe if model.moe is not None else residuals().dense
