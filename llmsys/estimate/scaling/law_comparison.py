"""Compare scaling laws: size, tokens, batch size and learning rate for a budget.

The result always holds every law. A single recommendation would hide that published fits differ by
a factor of five in tokens per parameter at the same compute.

A budget in hours, money or energy is converted to FLOPs, with every assumption.
"""

import math
from dataclasses import dataclass
from statistics import median

from llmsys.config.scaling import ScalingLawConfig
from llmsys.errors import ConfigError
from llmsys.estimate.scaling.expert_laws import CLARK, MIXTURES
from llmsys.estimate.scaling.json_output import (
    Budget,
    ExpertRow,
    Extrapolation,
    LawRow,
    RateRow,
    ScaleOutput,
    Spread,
)
from llmsys.estimate.scaling.law import (
    FLOPS_PER_PF_DAY,
    Axis,
    BudgetRequest,
    FittedRange,
    Optimum,
    ScalingLaw,
    find_extrapolation,
)
from llmsys.estimate.scaling.published_laws import DENSE
from llmsys.estimate.summary_table import format_count


@dataclass(frozen=True)
class Accelerator:
    """A device for the conversion: peak of useful FLOP/s in bf16, and watts under load."""

    name: str
    flops_per_second: float
    watts: float


@dataclass(frozen=True)
class ComputeBudget:
    """Operations, and the sentences that say how they follow from the budget."""

    flops: float
    assumptions: tuple[str, ...]


def convert_budget_to_flops(config: ScalingLawConfig, device: Accelerator | None) -> ComputeBudget:
    """Convert a budget to FLOPs.

    Args:
        config: `scale:` section with the budget in FLOPs, hours, money or energy.
        device: accelerator with prices; None is enough for a budget in FLOPs.

    Returns:
        The FLOPs, with every assumption.
    """
    amount, unit = config.parsed_budget
    if unit == "FLOPs":
        return ComputeBudget(amount, ())
    assert device is not None, "a budget in other units names its device"
    hours, how = _convert_to_hours(config, device, amount, unit)
    flops = hours * 3600 * device.flops_per_second * config.utilisation
    peak = (
        f"{device.name}: {device.flops_per_second / 1e12:,.0f} TFLOP/s at "
        f"utilisation={config.utilisation:g}"
    )
    return ComputeBudget(flops, (*how, f"{hours:,.0f} accelerator-hours", peak))


def _convert_to_hours(
    config: ScalingLawConfig, device: Accelerator, amount: float, unit: str
) -> tuple[float, tuple[str, ...]]:
    if unit == "H":
        return amount, ()
    if unit == "KWH":
        kilowatts = device.watts / 1000 * config.pue
        return amount / kilowatts, (f"{device.watts:g} W for each, times pue={config.pue:g}",)
    assert config.price_per_hour is not None, "the config refuses money without a price"
    return amount / config.price_per_hour, (
        f"{config.price_per_hour:g} {unit} per accelerator-hour",
    )


def predict_deepseek_rates(flops: float) -> RateRow:
    """DeepSeek LLM 2024 (arXiv:2401.02954), 3.1: both are power laws of the compute, fitted from
    1e17 to 2e19.
    """
    span = FittedRange("FLOPs", 1e17, 2e19)
    return RateRow(
        law="deepseek_2024",
        at_parameters=None,
        batch_tokens=0.2920 * flops**0.3271,
        learning_rate=0.3118 * flops**-0.1250,
        outside=_find_rate_extrapolation([(span, flops)]),
    )


def predict_steplaw_rates(parameters: float, tokens: float) -> RateRow:
    """Step Law 2025 (arXiv:2503.04715): N without vocabulary; its rate rises with D, where
    DeepSeek's falls with C.
    """
    spans = [
        (FittedRange("parameters", 6e7, 1.1e9), parameters),
        (FittedRange("tokens", 2e9, 1e11), tokens),
    ]
    return RateRow(
        law="steplaw_2025",
        at_parameters=parameters,
        batch_tokens=0.58 * tokens**0.571,
        learning_rate=1.79 * parameters**-0.713 * tokens**0.307,
        outside=_find_rate_extrapolation(spans),
    )


def predict_kaplan_rates(flops: float, parameters: float) -> RateRow:
    """Kaplan 2020: B = 2.0e6 C^0.24 (table 6), rate 0.003239 - 0.0001395 ln N (D.6), which ends
    at N = 1e10.
    """
    rate = 0.003239 - 0.0001395 * math.log(parameters)
    span = FittedRange("parameters", 768, 1.5e9)
    return RateRow(
        law="kaplan_2020",
        at_parameters=parameters,
        batch_tokens=2.0e6 * (flops / FLOPS_PER_PF_DAY) ** 0.24,
        learning_rate=rate if rate > 0 else None,
        outside=_find_rate_extrapolation([(span, parameters)]),
    )


def _find_rate_extrapolation(values: list[tuple[FittedRange, float]]) -> Extrapolation | None:
    worst = max((span.compute_extrapolation(value), span.axis) for span, value in values)
    return _build_extrapolation(worst if worst[0] > 1 else None)


def _build_extrapolation(found: tuple[float, Axis] | None) -> Extrapolation | None:
    return None if found is None else Extrapolation(times=found[0], axis=found[1])


# Repeating tokens up to four times is about as good as new ones (Muennighoff 2023, 5).
FAMILIAR_EPOCHS = 4


def compare_laws(config: ScalingLawConfig, bought: ComputeBudget) -> ScaleOutput:
    """Compare the recommendations of all scaling laws for a budget.

    Args:
        config: `scale:` section.
        bought: budget in FLOPs.

    Returns:
        The object that `llmsys scale --json` prints.

    Raises:
        ConfigError: `highlight` names no law.
    """
    request = BudgetRequest(
        bought.flops,
        config.unique_tokens,
        config.served_tokens_at_training_cost,
        config.num_experts,
        config.granularity,
    )
    laws: tuple[ScalingLaw, ...] = (*DENSE, *MIXTURES) if config.num_experts > 1 else DENSE
    if config.highlight is not None and config.highlight not in (
        names := [law.name for law in laws]
    ):
        raise ConfigError(
            f"highlight={config.highlight} is not a law of this table. Use one of "
            f"{', '.join(names)}."
        )
    found = [(law, law.find_optimum(request)) for law in laws]
    optima = [best for _, best in found]
    return ScaleOutput(
        budget=Budget(flops=bought.flops, assumptions=list(bought.assumptions)),
        unique_tokens=config.unique_tokens,
        served_tokens=config.serve_tokens,
        laws=[
            _build_law_row(law, best, request, marked=law.name == config.highlight)
            for law, best in found
        ],
        spread=_compute_spread(optima),
        rates=_list_rates(bought.flops, optima),
        experts=_list_dense_equivalents(config, optima),
    )


def _build_law_row(
    law: ScalingLaw, best: Optimum, request: BudgetRequest, *, marked: bool
) -> LawRow:
    epochs = (
        None if request.unique_tokens is None else max(1.0, best.tokens / request.unique_tokens)
    )
    return LawRow(
        law=law.name,
        marked=marked,
        source=law.origin.source,
        counts=law.origin.counts,
        evidence=law.origin.evidence,
        parameters=best.parameters,
        total_parameters=best.total_parameters,
        granularity=best.granularity,
        tokens=best.tokens,
        tokens_per_parameter=best.tokens_per_parameter,
        loss=best.loss,
        epochs=epochs,
        outside=_build_extrapolation(find_extrapolation(law, request.flops, best)),
        remarks=_list_remarks(best, epochs, request),
    )


def _list_remarks(best: Optimum, epochs: float | None, request: BudgetRequest) -> list[str]:
    said = []
    if best.granularity is not None:
        total = (
            ""
            if best.total_parameters is None
            else f", {format_count(best.total_parameters)} in all"
        )
        active = format_count(best.parameters)
        said.append(f"{request.experts} × {active} active{total}, granularity {best.granularity:g}")
    if "granularity" in best.ignores:
        said.append("has no term for granularity: experts as wide as the dense layer")
    if "repetition" in best.ignores and epochs is not None and epochs > FAMILIAR_EPOCHS:
        said.append(f"counts {epochs:.0f} repetitions of a token as new tokens")
    if "serving" in best.ignores:
        said.append("has no term for inference: training uses the full budget")
    return said


def _compute_spread(optima: list[Optimum]) -> dict[str, Spread]:
    columns = {
        "parameters": [best.parameters for best in optima],
        "tokens": [best.tokens for best in optima],
        "tokens_per_parameter": [best.tokens_per_parameter for best in optima],
    }
    return {
        name: Spread(low=min(one), median=median(one), high=max(one))
        for name, one in columns.items()
    }


def _list_rates(flops: float, optima: list[Optimum]) -> list[RateRow]:
    """Step Law at the smallest, the median and the largest model of the table, since it depends
    on size and tokens.
    """
    by_size = sorted(optima, key=lambda best: best.parameters)
    chosen = [by_size[0], by_size[len(by_size) // 2], by_size[-1]]
    return [
        predict_kaplan_rates(flops, chosen[1].parameters),
        predict_deepseek_rates(flops),
        *(predict_steplaw_rates(best.parameters, best.tokens) for best in chosen),
    ]


def _list_dense_equivalents(config: ScalingLawConfig, optima: list[Optimum]) -> list[ExpertRow]:
    """Return the gain of experts over the median model, for each kind of routing that Clark
    measured.
    """
    if config.num_experts == 1:
        return []
    size = median(best.parameters for best in optima)
    return [
        ExpertRow(
            law=law.name,
            parameters=size,
            experts=config.num_experts,
            dense_parameters=law.compute_dense_equivalent(size, config.num_experts),
            outside=law.origin.spans[0].compute_extrapolation(size),
        )
        for law in CLARK
    ]
