"""Whole runs: failures and the best time between saves, money and energy from stated
assumptions.
"""

import random
from math import exp, log, sqrt
from typing import Any

import pytest
from pydantic import ValidationError

from llmsys.config.loading.load import load_model_config
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError
from llmsys.estimate.cluster_costs import ClusterCosts
from llmsys.estimate.communication_time import RankGroup, estimate_all_gather_seconds
from llmsys.estimate.device_profile import DeviceProfile, load_device_profile
from llmsys.estimate.goodput import (
    compute_daly_interval,
    compute_expected_seconds,
    estimate_goodput,
)
from llmsys.estimate.percentile_interval import Z90, build_log_normal_interval
from llmsys.estimate.residual_model import load_residuals
from llmsys.estimate.run_cost import (
    RunCost,
    estimate_run_cost,
    estimate_run_seconds,
    estimate_save_seconds,
)
from llmsys.estimate.step_time import estimate_step_time

H100 = load_device_profile("h100-sxm")


def cost(device: DeviceProfile = H100, **changes: Any) -> RunCost:
    config = RunConfig()
    return estimate_run_cost(
        config,
        estimate_step_time(config, ParallelLayout(shard=8), device),
        device,
        ClusterCosts(**changes),
    )


@pytest.mark.parametrize(
    ("save", "restart", "failure"), [(30, 600, 11_000), (120, 300, 3_600), (5, 60, 1e6)]
)
def test_dalys_interval_minimises_the_expected_time(
    save: float, restart: float, failure: float
) -> None:
    best = compute_daly_interval(save, failure)
    at_best = compute_expected_seconds(best, save, restart, failure) / best
    searched = min(
        compute_expected_seconds(tau, save, restart, failure) / tau for tau in range(10, 40_000, 10)
    )
    assert at_best == pytest.approx(searched, rel=1e-3)
    first_order = sqrt(2 * save * failure)  # Young 1974
    seconds = compute_expected_seconds(first_order, save, restart, failure)
    assert at_best <= seconds / first_order * (1 + 1e-9)


def test_the_expected_time_is_what_a_simulation_takes() -> None:
    save, restart, failure, interval = 20.0, 40.0, 500.0, 150.0
    draw = random.Random(0)
    total, segments = 0.0, 20_000
    for _ in range(segments):
        while True:
            lasted = draw.expovariate(1 / failure)
            if lasted >= interval + save:
                total += interval + save
                break
            total += lasted
            # it fails again while it comes back
            while (lasted := draw.expovariate(1 / failure)) < restart:
                total += lasted
            total += restart
    assert total / segments == pytest.approx(
        compute_expected_seconds(interval, save, restart, failure), rel=0.02
    )


def test_goodput_falls_with_ranks_and_rises_with_reliable_machines() -> None:
    plain = ClusterCosts()
    fractions = [estimate_goodput(plain, ranks).fraction for ranks in (8, 512, 16_384)]
    assert fractions == sorted(fractions, reverse=True)
    # Llama 3, 3.3.4
    assert estimate_goodput(plain, 16_384).failures_per_day == pytest.approx(419 / 54, rel=0.05)
    assert estimate_goodput(ClusterCosts(device_failure_hours=5e6), 16_384).fraction > fractions[-1]
    assert estimate_goodput(plain, 512, checkpoint_seconds=60).fraction < fractions[1]


def test_money_and_energy_follow_the_stated_assumptions() -> None:
    one = cost()
    assert cost(price_per_hour=5).money.p50 == pytest.approx(2 * one.money.p50)
    assert one.money.p50 == pytest.approx(2.5 * one.accelerator_hours.p50)
    assert one.accelerator_hours.p50 == pytest.approx(8 * one.hours.p50)
    assert one.energy_kwh is not None
    watts = 700 * 0.85 + 180
    assert one.energy_kwh.p50 == pytest.approx(
        one.accelerator_hours.p50 * watts / 1000 * 1.1 * load_residuals().energy.factor
    )
    dearer = cost(price_per_kwh=0.1).money.p50 - one.money.p50
    assert dearer == pytest.approx(0.1 * one.accelerator_hours.p50 * watts / 1000 * 1.1)
    stated = {
        "price_per_hour",
        "price_per_kwh",
        "power_share",
        "host_watts",
        "pue",
        "device_failure_hours",
    }
    assert stated | {"save_seconds", "restart_seconds", "other_loss"} <= set(one.assumptions)


def test_a_run_takes_its_steps_over_goodput_and_what_runs_lose_beside_them() -> None:
    config = RunConfig()
    step = estimate_step_time(config, ParallelLayout(shard=8), H100)
    one = estimate_run_cost(config, step, H100, ClusterCosts())
    steps = config.num_steps * step.seconds.p50 / one.goodput.fraction / 3600
    assert one.hours.p50 == pytest.approx(steps * load_residuals().run.factor)
    assert load_residuals().run.factor > 1


def test_whole_run_utilisation_is_below_that_of_a_step() -> None:
    config = RunConfig()
    step = estimate_step_time(config, ParallelLayout(shard=8), H100)
    assert estimate_run_cost(config, step, H100, ClusterCosts()).whole_run_utilisation < step.mfu


def test_without_watts_there_is_no_energy_and_no_price_for_it() -> None:
    unknown = H100.model_copy(update={"watts": None})
    assert cost(unknown).energy_kwh is None
    with pytest.raises(
        ConfigError,
        match=r"price_per_kwh needs the power of H100 SXM 80GB. Set watts in its profile.",
    ):
        cost(unknown, price_per_kwh=0.1)


def test_an_interval_holds_its_percentiles() -> None:
    one, draw = build_log_normal_interval(10, 0.5), random.Random(1)
    values = [10 * exp(draw.gauss(0, 0.5)) for _ in range(20_000)]
    assert sum(one.contains(value) for value in values) / len(values) == pytest.approx(
        0.8, abs=0.01
    )
    assert one.scale(2).p50 == 20


def test_hours_of_a_run_are_no_surer_than_those_that_were_measured() -> None:
    whole = load_residuals().run
    for spread in (0.0, whole.spread / 2, whole.spread * 2):
        hours = estimate_run_seconds(build_log_normal_interval(2.0, spread), 10)
        assert hours.p50 == pytest.approx(2.0 * 10 * whole.factor)
        # A step that is less sure than a run makes its run so too.
        wider = max(spread, whole.spread)
        assert log(hours.p90 / hours.p50) == pytest.approx(Z90 * wider)
        assert log(hours.p50 / hours.p10) == pytest.approx(Z90 * wider)


def test_hours_of_a_run_contain_evaluations_saves_and_the_slowest_device() -> None:
    plain = RunConfig()
    step = estimate_step_time(plain, ParallelLayout(shard=8), H100)

    def count_hours(cluster: ClusterCosts, **sections: Any) -> float:
        config = RunConfig.model_validate(plain.model_dump(exclude_unset=True) | sections)
        return estimate_run_cost(config, step, H100, cluster).hours.p50

    calm = ClusterCosts(save_seconds=0)
    assert count_hours(ClusterCosts(save_seconds=0, straggler=0.05)) == pytest.approx(
        1.05 * count_hours(calm)
    )
    # Each evaluation is the forward pass of three steps' tokens: as long as one step.
    every = {"every_steps": 10, "max_tokens": 3 * step.tokens}
    evaluations = (plain.num_steps - 1) // 10 + 1
    more = count_hours(calm, evaluation=every) / count_hours(calm)
    assert more == pytest.approx(1 + evaluations / plain.num_steps)
    slow = ClusterCosts(save_seconds=step.seconds.p50)
    often = count_hours(slow, checkpoint={"every_steps": 1})
    assert often == pytest.approx(2 * count_hours(calm), rel=1e-2)
    # A save every two steps' minutes; a rule of steps that comes first decides.
    minutes = 2 * step.seconds.p50 / 60
    by_clock = count_hours(slow, checkpoint={"every_minutes": minutes})
    assert by_clock == pytest.approx(1.5 * count_hours(calm), rel=1e-2)
    both = count_hours(slow, checkpoint={"every_minutes": minutes, "every_steps": 1})
    assert both == pytest.approx(often)


def test_a_save_in_the_background_waits_for_the_copy_of_a_ranks_state() -> None:
    config = RunConfig.model_validate(
        {"model": load_model_config("model/llama3.1-8b"), "checkpoint": {"mode": "async"}}
    )
    step = estimate_step_time(config, ParallelLayout(shard=8), H100)
    copied = estimate_save_seconds(config, step, H100, ClusterCosts())
    assert copied == pytest.approx(8_030_261_248 * 12 / 8 / H100.host_bandwidth)
    assert estimate_save_seconds(config, step, H100, ClusterCosts(save_seconds=0.1)) == 0.1
    waited = estimate_run_cost(config, step, H100, ClusterCosts())
    assert waited.assumptions["save_seconds"] == copied


def test_levels_of_a_cluster_file_slow_down_what_crosses_them() -> None:
    rail = {"devices": 64, "bandwidth": 50e9}
    levels = [{"devices": 8, "bandwidth": 450e9, "latency_seconds": 6e-6}, rail]
    spine = {"devices": 4096, "bandwidth": 50e9, "oversubscription": 4}
    flat, steep = (
        ClusterCosts.model_validate({"network": [*levels, *more]}).load_device()
        for more in ((), (spine,))
    )
    for size, factor in ((8, 1.0), (64, 1.0), (512, 4.0)):
        one, other = (
            estimate_all_gather_seconds(RankGroup(size), 1e13, device) for device in (flat, steep)
        )
        assert other / one == pytest.approx(factor, rel=1e-3)
    with pytest.raises(
        ValidationError, match="levels of 8, 12 devices: each must be a multiple of the one before"
    ):
        ClusterCosts.model_validate({"network": [levels[0], rail | {"devices": 12}]})
