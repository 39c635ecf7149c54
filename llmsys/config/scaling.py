"""Options of `llmsys scale`: a budget in FLOPs, hours, money or energy, and the limits on its
use.
"""

import math
import re
from collections.abc import Iterator
from typing import Self

from pydantic import Field, field_validator, model_validator

from llmsys.config.section import Section, raise_violations
from llmsys.errors import Violation

CURRENCIES = ("USD", "EUR", "GBP", "CHF", "JPY", "CNY")
# A thousandth of the smallest run that a law was fitted on, and far beyond any machine.
LEAST_FLOPS, MOST_FLOPS = 1e12, 1e36
# Units of energy, in kWh.
ENERGY = {"KWH": 1.0, "MWH": 1e3, "GWH": 1e6}


class ScalingLawConfig(Section):
    """Budget and assumptions of `llmsys scale`. The assumptions are printed with the result."""

    budget: float | str = Field(
        description="Budget in FLOPs (1e21), accelerator-hours (5000h), money (20000USD) or "
        "energy (30MWh)."
    )
    unique_tokens: float | None = Field(None, gt=0, description="Number of unique training tokens.")
    serve_tokens: float = Field(
        0,
        ge=0,
        description="Tokens to serve from the same budget, at 2 FLOPs per parameter and token.",
    )
    serve_utilisation: float | None = Field(
        None,
        gt=0,
        le=1,
        description="MFU of serving, which `llmsys estimate --serve` prints (default: "
        "utilisation).",
    )
    device: str | None = Field(
        None, description="Device profile for a budget in hours, money or energy."
    )
    utilisation: float = Field(0.4, gt=0, le=1, description="Model FLOPs utilisation (MFU).")
    price_per_hour: float | None = Field(None, gt=0, description="Price of one accelerator-hour.")
    pue: float = Field(
        1.2,
        ge=1,
        description="Power usage effectiveness: energy of the site / energy of the accelerators.",
    )
    num_experts: int = Field(
        1,
        ge=1,
        le=10**6,
        description="Routed experts per layer; more than one adds the scaling laws for mixtures "
        "of experts.",
    )
    granularity: float | None = Field(
        None,
        ge=1,
        description="Width of the dense feed-forward layer / width of one expert (default: the "
        "best).",
    )
    highlight: str | None = Field(None, description="Scaling law to highlight in the table.")

    @field_validator("budget", mode="before")
    @classmethod
    def _convert_no_number_to_text(cls, value: object) -> object:
        # YAML reads nothing as null and 1e400 as infinity; both are no budget, as any other text.
        return "" if value is None else str(value) if value in (math.inf, -math.inf) else value

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        raise_violations(self._find_violations())
        return self

    def _find_violations(self) -> Iterator[Violation]:
        try:
            amount, unit = self.parsed_budget
        except ValueError:
            yield Violation(
                "budget",
                f"{self.budget!r} is not a budget. Write FLOPs (1e21), hours (5000h), money "
                f"(20000USD; {', '.join(CURRENCIES)}) or energy (300kWh, 30MWh).",
            )
            return
        if amount <= 0:
            yield Violation("budget", f"{amount:g} is not positive. Use a positive budget.")
        elif unit == "FLOPs" and not LEAST_FLOPS <= amount <= MOST_FLOPS:
            limits = f"{LEAST_FLOPS:g} to {MOST_FLOPS:g}"
            yield Violation("budget", f"{amount:g} FLOPs is no budget of a run. Use {limits}.")
        if self.granularity is not None and self.num_experts == 1:
            yield Violation(
                "granularity",
                f"{self.granularity:g} is of experts. Add num_experts=64, or leave it out.",
            )
        if unit != "FLOPs" and self.device is None:
            yield Violation(
                "device",
                f"is missing: {self.budget} needs a device. Set, for example, device=h100-sxm.",
            )
        if unit == "FLOPs" and self.device is not None:
            yield Violation(
                "device",
                f"{self.device} changes nothing: a budget of FLOPs is the same on every device. "
                "Leave it out, or give hours, money or energy: budget=5000h.",
            )
        if unit in CURRENCIES and self.price_per_hour is None:
            yield Violation(
                "price_per_hour",
                f"is missing: {self.budget} needs a price. Set {unit} per accelerator-hour.",
            )

    @property
    def served_tokens_at_training_cost(self) -> float:
        """Tokens that cost as much at the utilisation of training (Sardana 2023, section 3)."""
        return self.serve_tokens * self.utilisation / (self.serve_utilisation or self.utilisation)

    @property
    def parsed_budget(self) -> tuple[float, str]:
        """Amount and unit of the budget: FLOPs, H, a currency, or KWH.

        Raises:
            ValueError: the text is none of these.
        """
        if isinstance(self.budget, int | float):
            return float(self.budget), "FLOPs"
        found = re.fullmatch(r"\s*([\d_.]+(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*", self.budget)
        if found is None:
            raise ValueError(self.budget)
        amount, unit = float(found[1]), found[2].upper()
        if unit in ENERGY:
            return amount * ENERGY[unit], "KWH"
        if unit in ("", "FLOP", "FLOPS"):
            return amount, "FLOPs"
        if unit in ("H", "HOURS", *CURRENCIES):
            return amount, unit[0] if unit == "HOURS" else unit
        raise ValueError(self.budget)
