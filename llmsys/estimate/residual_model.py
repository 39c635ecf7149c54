"""Residuals of the time model: one factor and one spread for each class of measurement.

Reads `residual.yaml`, which tools/bench/estimates.py writes from named published rows. The spread
is of the logarithm: measured = modelled · factor · exp(spread · z) with z standard normal.
"""

from functools import cache
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, median
from typing import Literal

from pydantic import Field

from llmsys.config.loading.yaml_files import parse_yaml
from llmsys.config.model import ModelConfig
from llmsys.config.section import Section
from llmsys.estimate.device_profile import DeviceProfile, ModelClass, RunResidual
from llmsys.estimate.percentile_interval import (
    PercentileInterval,
    build_log_normal_interval,
)
from llmsys.estimate.program_profile import ProgramProfile

FILE = Path(__file__).with_name("residual.yaml")
Kind = Literal["step", "run"]


class ResidualModel(Section):
    """Of one class."""

    factor: float = Field(
        gt=0,
        description="Measured / estimated time: weighted mean of the rows, of runs their median.",
    )
    spread: float = Field(ge=0, description="Standard deviation of its natural logarithm.")
    between: float = Field(
        0.0,
        ge=0,
        description="Part of the spread that is between programs: what is not known of this one.",
    )
    rows: tuple[str, ...] = Field(description="Published rows used for calibration.")

    def compute_interval(self, modelled: float) -> PercentileInterval:
        """The interval for a modelled number."""
        return build_log_normal_interval(modelled * self.factor, self.spread)


class ResidualModels(Section):
    """The classes: one step of a dense model, one of a mixture of experts, a whole run over its
    steps, and the energy
    of a whole run over its hours and watts."""

    dense: ResidualModel
    moe: ResidualModel
    run: ResidualModel
    energy: ResidualModel


@cache
def load_residuals() -> ResidualModels:
    """Load the calibrated residuals."""
    values, _ = parse_yaml(FILE.read_text(encoding="utf-8"), FILE.name)
    return ResidualModels.model_validate(values)


def get_model_class(model: ModelConfig) -> ModelClass:
    """Return the class of residuals for a model's steps."""
    return "dense" if model.moe is None else "moe"


def get_residual(
    kind: Kind,
    model: ModelConfig,
    device: DeviceProfile | None = None,
    program: ProgramProfile | None = None,
) -> ResidualModel:
    """Return the class of a measurement: of what was measured on the device, else of published
    rows.

    A program that was fitted has its own factor and spread.
    """
    if kind == "run":
        return load_residuals().run
    name = get_model_class(model)
    if (
        device is not None
        and (own := device.residual.get(name))
        and (program is None or program.is_own)
    ):
        return ResidualModel(factor=own.factor, spread=own.spread, rows=tuple(own.runs))
    found = load_residuals().moe if model.moe is not None else load_residuals().dense
    if program is not None and (fit := program.fit.get(name)) is not None:
        spread = found.spread if fit.spread is None else fit.spread
        between = found.between if fit.between is None else fit.between
        return ResidualModel(factor=fit.factor, spread=spread, between=between, rows=fit.rows)
    return found


def fit_run_residual(ratios: dict[str, float], published: ResidualModel) -> RunResidual:
    """The residual of runs on one device, from measured over modelled of each.

    The published spread counts as one run more: a single run keeps it, and many runs replace it by
    their own.
    """
    logarithms = [log(one) for one in ratios.values()]
    middle = fmean(logarithms)
    # the published spread counts as one run more, because a single run has none
    squares = published.spread**2 + sum((one - middle) ** 2 for one in logarithms)
    return RunResidual(
        factor=exp(median(logarithms)), spread=sqrt(squares / len(ratios)), runs=ratios
    )
