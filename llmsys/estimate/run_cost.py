"""Hours, accelerator-hours, money and energy of a whole run, each as P10, P50 and P90, with what
was assumed.

In-step time comes from `step_time`, the share of time in useful steps from `goodput`. What real
runs lost beyond both is in the residual of whole runs, calibrated on named published
accelerator-hours.

Time, money and energy of a config on a device, as the parts of an estimate that are unknown without
one.

Reads a config, a device profile and a cluster's assumptions; completes an estimate and drops what
it answers from its `unknown`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from llmsys.config.batch_ramp import NoiseRampConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError
from llmsys.estimate.cluster_costs import ClusterCosts
from llmsys.estimate.device_profile import DeviceProfile
from llmsys.estimate.goodput import Goodput, estimate_goodput
from llmsys.estimate.json_output import EstimateOutput, RunEnergy, RunMoney, RunTime, StepPrice
from llmsys.estimate.model_tensors import list_model_tensors
from llmsys.estimate.percentile_interval import Z90, PercentileInterval, build_log_normal_interval
from llmsys.estimate.program_run import ProgramRun
from llmsys.estimate.residual_model import load_residuals
from llmsys.estimate.state_memory import FP32, resolve_planned_layout
from llmsys.estimate.step_time import StepTime, estimate_step_time


@dataclass(frozen=True)
class RunCost:
    """One whole run. `assumptions` are the cluster's numbers that went into it; without watts
    there is no energy.
    """

    hours: PercentileInterval
    accelerator_hours: PercentileInterval
    money: PercentileInterval
    energy_kwh: PercentileInterval | None
    goodput: Goodput
    whole_run_utilisation: float
    assumptions: dict[str, Any]
    evaluation_share: float = 0.0


def count_full_steps(
    config: RunConfig,
    step: StepTime,
    device: DeviceProfile,
    resolve_layout: Callable[[RunConfig], ParallelLayout],
    documents: Sequence[int],
    expert_load: float,
) -> float:
    """Count the steps of a run in steps of full sequences: those of `batch.length_stages` take less
    time.

    Args:
        config: resolved config of a run.
        step: time of a step of full sequences.
        device: profile of the accelerator.
        resolve_layout: returns the layout of a config.
        documents: lengths of documents in a window; empty for one.
        expert_load: rows of the fullest rank's experts over the mean, as in the time of the step.

    Returns:
        Steps, each counted by its time.
    """
    batch, total, first = config.batch, config.num_steps, 0
    if isinstance(batch.ramp, NoiseRampConfig) and not batch.ramp.doubled_after_steps:
        # The doublings are not known before the run; a small step takes less time by about its
        # share of tokens.
        total = batch.count_tokens_before(total) // batch.tokens_per_step
    counted = 0.0
    for stage in batch.length_stages:
        last = min(total, batch.count_steps_for(stage.until_tokens))
        if last > first:
            parts = batch.sequence_length // stage.sequence_length
            micro = (
                batch.micro_sequences
                if batch.micro_sequences == "auto"
                else batch.micro_sequences * parts
            )
            changes = {
                "sequence_length": stage.sequence_length,
                "length_stages": (),
                "tokens": None,
                "ramp": None,
            }
            changes |= {"sequences": batch.sequences_per_step * parts, "micro_sequences": micro}
            shorter = config.model_copy(update={"batch": batch.model_copy(update=changes)})
            cut = [min(length, stage.sequence_length) for length in documents]
            one = estimate_step_time(
                shorter, resolve_layout(shorter), device, documents=cut, expert_load=expert_load
            )
            counted += (last - first) * one.seconds.p50 / step.seconds.p50
            first = last
    return counted + total - first


def _find_checkpoint_seconds(config: RunConfig, step: StepTime) -> float | None:
    """Return the seconds between saves where the config gives their steps or minutes; None: the
    best interval.
    """
    rule = config.checkpoint
    by_clock = 60 * rule.every_minutes
    by_steps = rule.every_steps * step.seconds.p50
    if not by_clock:
        return by_steps if by_steps and "every_steps" in rule.model_fields_set else None
    # A save by either rule restarts the minutes.
    return min(by_clock, by_steps) if by_steps else by_clock


def estimate_save_seconds(
    config: RunConfig, step: StepTime, device: DeviceProfile, cluster: ClusterCosts
) -> float:
    """Estimate the seconds that training waits for a checkpoint.

    Args:
        config: resolved config of a run.
        step: time of one step, for its number of ranks.
        device: profile of the accelerator.
        cluster: costs, whose `save_seconds` is the wait for the write.

    Returns:
        With `checkpoint.mode=async` the copy of each rank's share of weights and moments to host
        memory, if shorter.
    """
    if config.checkpoint.mode == "sync":
        return cluster.save_seconds
    rule, rows = config.optimizer, list_model_tensors(config.model)
    state = sum(
        row.num_elements * (FP32 + rule.compute_state_bytes(row.name, row.shape)) for row in rows
    )
    return min(cluster.save_seconds, state / step.ranks / device.host_bandwidth)


def estimate_evaluation_share(config: RunConfig, step: StepTime) -> float:
    """Estimate the seconds of held-out evaluations over those of all steps.

    Args:
        config: resolved config of a run; `evaluation.max_tokens` gives the size, which is unknown
            where it is 0.
        step: time of one step.

    Returns:
        The share; 0 where no evaluation has a known size.
    """
    evaluation = config.evaluation
    if not evaluation.max_tokens:
        return 0.0
    # A forward pass alone is a third of a step.
    per_evaluation = evaluation.max_tokens / step.tokens / 3
    evaluations = (config.num_steps - 1) // evaluation.every_steps if evaluation.every_steps else 0
    return per_evaluation * (evaluations + 1) / config.num_steps


def estimate_run_cost(
    config: RunConfig,
    step: StepTime,
    device: DeviceProfile,
    cluster: ClusterCosts,
    full_steps: float | None = None,
) -> RunCost:
    """Estimate the cost of all steps of a run.

    Args:
        config: resolved config of a run.
        step: time of one step.
        device: profile of the accelerator.
        cluster: prices, power and failures.
        full_steps: steps of that time that the run takes as long as. None: `config.num_steps`.

    Returns:
        Hours, accelerator-hours, money and energy.

    Raises:
        ConfigError: electricity has a price, and the device's power is unknown.
    """
    write_seconds, every = cluster.save_seconds, _find_checkpoint_seconds(config, step)
    cluster = cluster.model_copy(
        update={"save_seconds": estimate_save_seconds(config, step, device, cluster)}
    )
    good = estimate_goodput(cluster, step.ranks, every)
    # a write in the background ends before the next save
    if every is None and good.checkpoint_seconds < write_seconds:
        good = estimate_goodput(cluster, step.ranks, write_seconds)
    overhead = estimate_evaluation_share(config, step)
    full = config.num_steps if full_steps is None else full_steps
    steps = full * (1 + cluster.straggler) * (1 + overhead) / good.fraction
    hours = estimate_run_seconds(step.seconds, steps).scale(1 / 3600)
    accelerator_hours = hours.scale(step.ranks)
    watts, price, energy = compute_mean_watts(device, cluster), cluster.price_per_hour, None
    if watts is not None:
        energy = load_residuals().energy.compute_interval(
            accelerator_hours.p50 * watts / 1000 * cluster.pue
        )
        # Of an hour of one accelerator.
        price += cluster.price_per_kwh * watts / 1000 * cluster.pue
    elif cluster.price_per_kwh:
        raise ConfigError(
            f"price_per_kwh needs the power of {device.name}. Set watts in its profile."
        )
    used = step.mfu * step.seconds.p50 * full / (hours.p50 * 3600)
    return RunCost(
        hours,
        accelerator_hours,
        accelerator_hours.scale(price),
        energy,
        good,
        used,
        _collect_assumptions(cluster),
        overhead,
    )


def estimate_run_seconds(step_seconds: PercentileInterval, steps: float) -> PercentileInterval:
    """Estimate the seconds of many steps.

    The spread of whole runs was calibrated on their hours, so it holds that of their steps. Where a
    step is less sure than that, as with experts, the spread is the step's.

    Args:
        step_seconds: seconds of a step.
        steps: number of the steps.

    Returns:
        Seconds of all of them, with the calibrated factor of whole runs.
    """
    whole = load_residuals().run
    one = log(step_seconds.p90 / step_seconds.p50) / Z90
    return build_log_normal_interval(
        step_seconds.p50 * steps * whole.factor, max(one, whole.spread)
    )


def compute_mean_watts(device: DeviceProfile, cluster: ClusterCosts) -> float | None:
    """Return the power of one accelerator and its share of the machine, in training.

    Args:
        device: profile of the accelerator.
        cluster: share of its power limit that it draws, and the watts of the rest of the machine.

    Returns:
        Watts; None where the profile has no limit.
    """
    return None if device.watts is None else device.watts * cluster.power_share + cluster.host_watts


def _collect_assumptions(cluster: ClusterCosts) -> dict[str, Any]:
    return cluster.model_dump(exclude={"device", "devices", "host_memory_bytes"})


@dataclass(frozen=True)
class PricingRequest:
    """On what a run is to be priced; without `num_devices`, on as many devices as the config
    starts processes.
    """

    device: DeviceProfile
    cluster: ClusterCosts
    num_devices: int | None = None
    planned: ProgramRun | None = None

    def resolve_layout(self, config: RunConfig) -> ParallelLayout:
        """Return the layout of a config on those devices.

        Args:
            config: resolved config of a run.

        Raises:
            LayoutError: the devices cannot be split so.
        """
        return (
            resolve_planned_layout(config)
            if self.num_devices is None
            else config.resolve_layout(self.num_devices)
        )


def add_costs(
    result: EstimateOutput, config: RunConfig, question: PricingRequest, *, model_only: bool
) -> EstimateOutput:
    """Add `time`, `money` and `energy` to an estimate; a bare model has no run, so only its step
    has a price.

    Args:
        result: what `estimate_run` returned.
        config: resolved config of a run.
        question: device, cluster costs and number of devices.
        model_only: the config is a bare model.

    Returns:
        The estimate with these three; what is still not known is in `unknown`.
    """
    documents = tuple(result.batch.documents or ())
    load = question.cluster.expert_load
    if question.planned is not None:
        step = question.planned.estimate_step(question.device, documents)
    else:
        layout = question.resolve_layout(config)
        step = estimate_step_time(
            config, layout, question.device, documents=documents, expert_load=load
        )
    if model_only:
        unknown = dict.fromkeys(
            ("money", "energy"), "a bare model has no token budget: give train.tokens"
        )
        time = _build_step_price(step, question, None)
        return result.model_copy(update={"time": time, "unknown": unknown})
    steps = count_full_steps(
        config, step, question.device, question.resolve_layout, documents, load
    )
    cost = estimate_run_cost(config, step, question.device, question.cluster, steps)
    found: dict[str, Any] = {
        "time": _build_step_price(step, question, cost),
        "money": _build_run_money(cost),
    }
    if cost.energy_kwh is None:
        found["unknown"] = {"energy": f"the profile of {question.device.name} has no watts"}
    else:
        found["energy"] = _build_run_energy(cost.energy_kwh, cost, question)
        found["unknown"] = {}
    return result.model_copy(update=found)


def _build_step_price(step: StepTime, question: PricingRequest, cost: RunCost | None) -> StepPrice:
    run = None
    if cost is not None:
        run = RunTime(
            hours=cost.hours,
            residual_factor=load_residuals().run.factor,
            goodput=cost.goodput.fraction,
            evaluation_share=cost.evaluation_share,
            utilisation_model_causal=cost.whole_run_utilisation,
            checkpoint_every_seconds=cost.goodput.checkpoint_seconds,
            failures_per_day=cost.goodput.failures_per_day,
        )
    program = "llmsys" if question.planned is None else question.planned.program.name
    return StepPrice(
        device=question.device.name, program=program, run=run, **dict(step.to_output())
    )


def _build_run_money(cost: RunCost) -> RunMoney:
    wanted = (
        "price_per_hour",
        "price_per_kwh",
        "device_failure_hours",
        "save_seconds",
        "restart_seconds",
        "other_loss",
    )
    return RunMoney(
        currency=cost.assumptions["currency"],
        accelerator_hours=cost.accelerator_hours,
        amount=cost.money,
        assumptions={name: cost.assumptions[name] for name in wanted},
    )


def _build_run_energy(
    kwh: PercentileInterval, cost: RunCost, question: PricingRequest
) -> RunEnergy:
    watts = compute_mean_watts(question.device, question.cluster)
    assert watts is not None, "energy was estimated from the power"
    return RunEnergy(
        kwh=kwh,
        watts_per_device=watts,
        assumptions={name: cost.assumptions[name] for name in ("power_share", "host_watts", "pue")},
    )
