"""Time, money and energy of a config on a device, as the parts of an estimate that are unknown without one.

Reads a config, a device profile and a cluster's assumptions; gives plain data with stable keys and drops what it
answers from the estimate's `unknown`.
"""

from dataclasses import dataclass
from typing import Any

from llmsys.config.layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.estimate.cluster import ClusterCosts
from llmsys.estimate.cost import RunCost, compute_mean_watts, estimate_run_cost
from llmsys.estimate.device import DeviceProfile
from llmsys.estimate.interval import PercentileInterval
from llmsys.estimate.memory import resolve_planned_layout
from llmsys.estimate.time import StepTime, estimate_step_time


@dataclass(frozen=True)
class PricingRequest:
    """On what a run is to be priced; without `num_devices`, on as many devices as the config starts processes."""

    device: DeviceProfile
    cluster: ClusterCosts
    num_devices: int | None = None

    def resolve_layout(self, config: RunConfig) -> ParallelLayout:
        """The config's layout on those devices; LayoutError when they cannot be split so."""
        return resolve_planned_layout(config) if self.num_devices is None else config.resolve_layout(self.num_devices)


def add_costs(result: dict[str, Any], config: RunConfig, question: PricingRequest, *, model_only: bool) -> dict[str, Any]:
    """The estimate with `time`, `money` and `energy`; a bare model has no run, so only its step has a price.

    Keys: time.{device, ranks, step_seconds, parts_seconds, tokens_per_second_per_device, utilisation, run};
    money.{currency, accelerator_hours, amount, assumptions}; energy.{kwh, watts_per_device, assumptions}. What is not
    certain is {p10, p50, p90}.
    """
    step = estimate_step_time(config, question.resolve_layout(config), question.device)
    if model_only:
        unknown = dict.fromkeys(("money", "energy"), "a bare model has no run; give a config with train.tokens")
        return result | {"time": _build_time_section(step, question, None), "unknown": unknown}
    cost = estimate_run_cost(config, step, question.device, question.cluster)
    parts = {"time": _build_time_section(step, question, cost), "money": _build_money_section(cost)}
    if cost.energy_kwh is None:
        return result | parts | {"unknown": {"energy": f"the profile of {question.device.name} has no watts"}}
    return result | parts | {"energy": _build_energy_section(cost.energy_kwh, cost, question), "unknown": {}}


def _build_time_section(step: StepTime, question: PricingRequest, cost: RunCost | None) -> dict[str, Any]:
    run = None
    if cost is not None:
        run = {
            "hours": cost.hours.to_dict(),
            "goodput": cost.goodput.fraction,
            "utilisation_model_causal": cost.whole_run_utilisation,
            "checkpoint_every_seconds": cost.goodput.checkpoint_seconds,
            "failures_per_day": cost.goodput.failures_per_day,
        }
    return {"device": question.device.name, **step.to_dict(), "run": run}


def _build_money_section(cost: RunCost) -> dict[str, Any]:
    wanted = (
        "price_per_hour",
        "price_per_kwh",
        "device_failure_hours",
        "save_seconds",
        "restart_seconds",
        "other_loss",
    )
    return {
        "currency": cost.assumptions["currency"],
        "accelerator_hours": cost.accelerator_hours.to_dict(),
        "amount": cost.money.to_dict(),
        "assumptions": {name: cost.assumptions[name] for name in wanted},
    }


def _build_energy_section(kwh: PercentileInterval, cost: RunCost, question: PricingRequest) -> dict[str, Any]:
    return {
        "kwh": kwh.to_dict(),
        "watts_per_device": compute_mean_watts(question.device, question.cluster),
        "assumptions": {name: cost.assumptions[name] for name in ("power_share", "host_watts", "pue")},
    }
