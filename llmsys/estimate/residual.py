"""What the model of time leaves unexplained: one factor and one spread for each class of measurement.

Reads `residual.yaml`, which tools/bench/estimates.py writes from named published rows. The spread is of the logarithm:
measured = modelled · factor · exp(spread · z) with z standard normal.
"""

from functools import cache
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, median
from typing import Literal

from pydantic import Field

from llmsys.config.base import Section
from llmsys.config.model import ModelConfig
from llmsys.config.yaml_text import parse
from llmsys.estimate.device import Device, MeasuredRuns, ModelClass
from llmsys.estimate.interval import Interval, log_normal

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


def class_of(model: ModelConfig) -> ModelClass:
    """Which residual the steps of a model have."""
    return "dense" if model.moe is None else "moe"


def residual(kind: Kind, model: ModelConfig, device: Device | None = None) -> Residual:
    """The class of a measurement: of published rows, or of what was measured on the device where its profile says."""
    if kind == "run":
        return residuals().run
    if device is not None and (own := device.residual.get(class_of(model))):
        return Residual(factor=own.factor, spread=own.spread, rows=tuple(own.runs))
    return residuals().moe if model.moe is not None else residuals().dense


def of_runs(ratios: dict[str, float], published: Residual) -> MeasuredRuns:
    """The residual of runs on one device, from measured over modelled of each.

    The published spread counts as one run more: a single run keeps it, and many runs replace it by their own.
    """
    logarithms = [log(one) for one in ratios.values()]
    middle = fmean(logarithms)
    squares = published.spread**2 + sum((one - middle) ** 2 for one in logarithms)
    return MeasuredRuns(factor=exp(median(logarithms)), spread=sqrt(squares / len(ratios)), runs=ratios)
