"""Convert a budget in hours, money or energy to FLOPs, with every assumption."""

from dataclasses import dataclass

from llmsys.config.scaling import ScalingLawConfig


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
    peak = f"{device.name}: {device.flops_per_second / 1e12:,.0f} TFLOP/s at utilisation={config.utilisation:g}"
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
    return amount / config.price_per_hour, (f"{config.price_per_hour:g} {unit} per accelerator-hour",)
