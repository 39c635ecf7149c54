"""What a whole run takes: hours, accelerator-hours, money, energy, each as P10, P50 and P90, with what was assumed.

In-step time comes from `time`, the share of time in useful steps from `goodput`; what real runs lost beyond both is in
the residual of whole runs, calibrated on named published accelerator-hours.
"""

from dataclasses import dataclass
from math import log
from typing import Any

from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError
from llmsys.estimate.cluster import ClusterCosts
from llmsys.estimate.device import DeviceProfile
from llmsys.estimate.goodput import Goodput, estimate_goodput
from llmsys.estimate.interval import Z90, PercentileInterval, build_log_normal_interval
from llmsys.estimate.residual import load_residuals
from llmsys.estimate.time import StepTime


@dataclass(frozen=True)
class RunCost:
    """One whole run. `assumptions` are the cluster's numbers that went into it; without watts there is no energy."""

    hours: PercentileInterval
    accelerator_hours: PercentileInterval
    money: PercentileInterval
    energy_kwh: PercentileInterval | None
    goodput: Goodput
    whole_run_utilisation: float
    assumptions: dict[str, Any]


def estimate_run_cost(config: RunConfig, step: StepTime, device: DeviceProfile, cluster: ClusterCosts) -> RunCost:
    """Cost of all `config.steps` steps of that time."""
    good = estimate_goodput(cluster, step.ranks)
    hours = estimate_run_seconds(step.seconds, config.num_steps / good.fraction).scale(1 / 3600)
    accelerator_hours = hours.scale(step.ranks)
    watts, price, energy = compute_mean_watts(device, cluster), cluster.price_per_hour, None
    if watts is not None:
        energy = load_residuals().energy.compute_interval(accelerator_hours.p50 * watts / 1000 * cluster.pue)
        price += cluster.price_per_kwh * watts / 1000 * cluster.pue
    elif cluster.price_per_kwh:
        raise ConfigError(f"price_per_kwh needs the power of {device.name}. Give watts: in its profile.")
    used = step.mfu * step.seconds.p50 * config.num_steps / (hours.p50 * 3600)
    return RunCost(hours, accelerator_hours, accelerator_hours.scale(price), energy, good, used, _collect_assumptions(cluster))


def estimate_run_seconds(step_seconds: PercentileInterval, steps: float) -> PercentileInterval:
    """Seconds of many steps. The spread of whole runs was calibrated on their hours, so it holds that of their steps;
    where a step is less sure than that (experts), its own."""
    whole = load_residuals().run
    one = log(step_seconds.p90 / step_seconds.p50) / Z90
    return build_log_normal_interval(step_seconds.p50 * steps * whole.factor, max(one, whole.spread))


def compute_mean_watts(device: DeviceProfile, cluster: ClusterCosts) -> float | None:
    """Power of one accelerator and its share of the machine, in training; None when nobody said its limit."""
    return None if device.watts is None else device.watts * cluster.power_share + cluster.host_watts


def _collect_assumptions(cluster: ClusterCosts) -> dict[str, Any]:
    return cluster.model_dump(exclude={"device", "devices", "host_memory_bytes"})
