"""An estimate never counts with `auto`: a device profile says which number type it is."""

from typing import Literal

import pytest

from llmsys.config.loading.load import load_run_config
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.config.train import Precision
from llmsys.errors import ConfigError
from llmsys.estimate.device_profile import load_device_profile
from llmsys.estimate.peak_memory import estimate_peak_memory
from llmsys.estimate.run_estimate import estimate_run
from llmsys.estimate.software_profile import resolve_for_profile, select_precision
from llmsys.estimate.step_time import estimate_step_time
from llmsys.estimate.summary_table import format_estimate
from llmsys.launch.preflight.cluster_checks import resolve_for_hosts
from tests.helpers.device_profile import build_abacus


@pytest.mark.parametrize(
    ("profile", "number", "compile"),
    [
        ("h100-sxm", "bf16", "block"),
        ("v100", "fp32", "block"),
        ("p100", "fp32", "none"),
        ("tpu-v4", "bf16", "none"),
    ],
)
def test_a_profile_decides_precision_and_compilation(
    profile: str, number: Precision, compile: Literal["block", "none"]
) -> None:
    config = RunConfig()
    assert resolve_for_profile(config, load_device_profile(profile)).train.precision == number
    found = estimate_run(config, device=load_device_profile(profile))
    train = config.train.model_copy(update={"precision": number, "compile": compile})
    # One rank of a device has room for whole weights.
    plain = config.resolve_data_parallel("plain")
    named = estimate_run(plain.model_copy(update={"train": train}))
    assert found.precision.number == number
    of_device = {"capacity_bytes", "fit_probability"}
    assert found.memory.model_dump(exclude=of_device) == named.memory.model_dump(exclude=of_device)
    assert found.memory.capacity_bytes == load_device_profile(profile).memory_bytes
    text = format_estimate(found)
    assert f"in {number}\n" in text
    assert f"  {number}: train.precision=auto: the profile of " in text


def test_time_is_that_of_compiled_blocks_where_training_compiles_them() -> None:
    h100, config = load_device_profile("h100-sxm"), RunConfig().resolve_precision("bf16")

    def estimate(compile: str, layout: ParallelLayout) -> float:
        train = config.train.model_copy(update={"compile": compile})
        return estimate_step_time(
            config.model_copy(update={"train": train}), layout, h100
        ).seconds.p50

    one, ring = ParallelLayout(shard=1), ParallelLayout(shard=1, context=2, context_kind="ring")
    assert estimate("auto", one) == estimate("block", one) < estimate("none", one)
    assert estimate("auto", ring) == estimate("block", ring) < estimate("none", ring)


def test_a_processor_whose_bf16_is_no_faster_takes_fp32() -> None:
    slow = build_abacus(peak_flops={"fp32": 67e9, "bf16": 1.1e9})
    assert select_precision(slow) == ("fp32", f"the profile of {slow.name} is no faster in bf16")


def test_flops_device_decides_where_no_device_is_named_and_else_accelerators_are_meant() -> None:
    config = load_run_config("train/demo", ["flops.device=v100"])
    assert config.train.precision == "auto"
    assert estimate_run(config).precision.number == "fp32"
    assert estimate_run(load_run_config("train/demo", [])).precision.number == "bf16"


def test_time_and_plan_resolve_for_their_device() -> None:
    config = RunConfig()
    layout = config.resolve_layout(1)
    cases: tuple[tuple[Precision, str], ...] = (("fp32", "v100"), ("bf16", "h100-sxm"))
    for precision, profile in cases:
        device = load_device_profile(profile)
        assert estimate_step_time(config, layout, device) == estimate_step_time(
            config.resolve_precision(precision), layout, device
        )


def test_memory_of_an_unresolved_type_is_refused() -> None:
    config = RunConfig()
    with pytest.raises(ConfigError, match=r"train\.precision=auto needs a device"):
        _ = estimate_peak_memory(config, config.resolve_layout(1)).peak_bytes


def test_hosts_take_bf16_only_where_all_have_it() -> None:
    native, slow = ({"bf16": {"is_native": one, "reason": "no units"}} for one in (True, False))
    assert resolve_for_hosts(RunConfig(), [native, native]).train.precision == "bf16"
    assert resolve_for_hosts(RunConfig(), [native, slow]).train.precision == "fp32"
