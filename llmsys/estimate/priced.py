"""Time, money and energy of a config on a device, as the parts of an estimate that are unknown without one.

Reads a config, a device profile and a cluster's assumptions; gives plain data with stable keys and drops what it
answers from the estimate's `unknown`.
"""

from dataclasses import dataclass
from typing import Any

from llmsys.config.layout import Layout
from llmsys.config.run import RunConfig
from llmsys.estimate.cluster import Cluster
from llmsys.estimate.cost import RunCost, mean_watts, run_cost
from llmsys.estimate.device import Device
from llmsys.estimate.interval import Interval
from llmsys.estimate.memory import planned_layout
from llmsys.estimate.time import StepTime, step_time


@dataclass(frozen=True)
class Question:
    """On what a run is to be priced; without `gpus`, on as many devices as the config starts processes."""

    device: Device
    cluster: Cluster
    gpus: int | None = None

    def layout(self, config: RunConfig) -> Layout:
        """The config's layout on those devices; LayoutError when they cannot be split so."""
        return planned_layout(config) if self.gpus is None else config.fitted_layout(self.gpus)


def priced(result: dict[str, Any], config: RunConfig, question: Question, *, model_only: bool) -> dict[str, Any]:
    """The estimate with `time`, `money` and `energy`; a bare model has no run, so only its step has a price.

    Keys: time.{device, ranks, step_seconds, parts_seconds, tokens_per_second_per_device, utilisation, run};
    money.{currency, accelerator_hours, amount, assumptions}; energy.{kwh, watts_per_device, assumptions}. What is not
    certain is {p10, p50, p90}.
    """
    step = step_time(config, question.layout(config), question.device)
    if model_only:
        unknown = dict.fromkeys(("money", "energy"), "a bare model has no run; give a config with train.tokens")
        return result | {"time": _time(step, question, None), "unknown": unknown}
    cost = run_cost(config, step, question.device, question.cluster)
    parts = {"time": _time(step, question, cost), "money": _money(cost)}
    if cost.energy_kwh is None:
        return result | parts | {"unknown": {"energy": f"the profile of {question.device.name} has no watts"}}
    return result | parts | {"energy": _energy(cost.energy_kwh, cost, question), "unknown": {}}


def _time(step: StepTime, question: Question, cost: RunCost | None) -> dict[str, Any]:
    run = None
    if cost is not None:
        run = {
            "hours": cost.hours.as_data(),
            "goodput": cost.goodput.fraction,
            "utilisation_model_causal": cost.whole_run_utilisation,
            "checkpoint_every_seconds": cost.goodput.checkpoint_seconds,
            "failures_per_day": cost.goodput.failures_per_day,
        }
    return {"device": question.device.name, **step.as_data(), "run": run}


def _money(cost: RunCost) -> dict[str, Any]:
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
        "accelerator_hours": cost.accelerator_hours.as_data(),
        "amount": cost.money.as_data(),
        "assumptions": {name: cost.assumptions[name] for name in wanted},
    }


def _energy(kwh: Interval, cost: RunCost, question: Question) -> dict[str, Any]:
    return {
        "kwh": kwh.as_data(),
        "watts_per_device": mean_watts(question.device, question.cluster),
        "assumptions": {name: cost.assumptions[name] for name in ("power_share", "host_watts", "pue")},
    }
