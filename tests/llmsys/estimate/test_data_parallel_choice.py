"""The choice of `engine.data_parallel=auto`: plain where it is allowed and fits, else FSDP with the
reason.
"""

from typing import Any

import pytest

from llmsys.config.loading.load import load_run_config
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError
from llmsys.estimate.data_parallel_choice import (
    DataParallelChoice,
    choose_data_parallel,
    resolve_data_parallel_for_profile,
)
from llmsys.estimate.device_profile import load_device_profile
from llmsys.estimate.memory_timeline import GIB
from llmsys.estimate.peak_memory import estimate_peak_memory, find_largest_micro_batch
from llmsys.estimate.run_estimate import estimate_run
from llmsys.estimate.software_profile import MemoryProfile

CPU = MemoryProfile(device="cpu")


def run(*words: str, micro: str = "4") -> RunConfig:
    return load_run_config(
        "train/demo",
        [
            "engine.data_parallel=auto",
            "layout.expert=1",
            "batch.sequences=48",
            f"batch.micro_sequences={micro}",
            "train.precision=bf16",
            *words,
        ],
    )


def choose(
    config: RunConfig, ranks: int = 1, memory: int = 1 << 40, **more: Any
) -> DataParallelChoice:
    layout = config.resolve_layout(ranks)
    return choose_data_parallel(config, layout, lambda: memory, CPU, **more)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_ranks_of_a_machine_need_no_wrapper(ranks: int) -> None:
    choice = choose(run(), ranks)
    assert choice == DataParallelChoice(
        "plain", "whole weights fit, and no wrapper is in their way"
    )


def test_more_ranks_and_several_machines_hide_their_messages() -> None:
    many = choose(run(), 16)
    assert many.name == "fsdp"
    assert many.reason.startswith("16 ranks hide their messages behind layers")
    far = choose(run(), 2, is_one_machine=False)
    assert far.name == "fsdp"
    assert far.reason.startswith("2 ranks on several machines hide")


@pytest.mark.parametrize(("words", "ranks", "reason"), [
    (["layout.tensor=2"], 2, "layout.tensor: engine.kind=torch with data_parallel=plain does not"),
    (["layout.expert=2"], 2, "layout.expert: 2 ranks cannot shard experts that"),
    (["layout.replicate=2"], 2, "layout.replicate: 2 replicas have nothing to repeat"),
    (["engine.cpu_offload=state"], 1, "engine.cpu_offload: state needs FSDP"),
    (["engine.reshard=after_step"], 1, "engine.reshard: after_step says when FSDP frees"),
])  # fmt: skip
def test_what_forbids_plain_is_the_reason_for_fsdp(
    words: list[str], ranks: int, reason: str
) -> None:
    choice = choose(run(*words), ranks)
    assert choice.name == "fsdp"
    assert choice.reason.startswith(reason)


def test_weights_that_do_not_fit_whole_are_sharded() -> None:
    config = run()
    plain = config.resolve_data_parallel("plain")
    ledger = estimate_peak_memory(plain, plain.resolve_layout(1), system=CPU)
    needed = ledger.peak_bytes + ledger.driver_bytes
    assert choose(config, memory=2 * needed).name == "plain"
    choice = choose(config, memory=needed)
    assert choice.name == "fsdp"
    assert choice.reason.startswith(f"whole weights take {needed / GIB:.2f} GiB in the ")


def test_a_smaller_micro_batch_is_no_price_for_whole_weights() -> None:
    config = run(micro="auto")
    plain, sharded = (config.resolve_data_parallel(kind) for kind in ("plain", "fsdp"))
    layout = config.resolve_layout(1)

    def find(one: RunConfig, memory: int) -> int:
        try:
            return find_largest_micro_batch(one, layout, memory, CPU).sequences
        except ConfigError:
            return 0

    seen = set()
    for memory in range(1 << 27, 1 << 31, 1 << 26):
        ours, theirs = find(plain, memory), find(sharded, memory)
        choice = choose(config, memory=memory)
        assert choice.name == ("plain" if ours >= theirs else "fsdp")
        if choice.name == "fsdp":
            assert (
                f"room for {ours} sequences in a micro-batch, shards for {theirs}" in choice.reason
            )
        seen.add(choice.name)
    assert seen == {"plain", "fsdp"}


def test_a_choice_that_the_config_makes_stays() -> None:
    for kind in ("fsdp", "ddp", "plain"):
        config = run(f"engine.data_parallel={kind}")
        assert config.resolve_data_parallel("fsdp") is config
        device = load_device_profile("h100-sxm")
        assert resolve_data_parallel_for_profile(config, ParallelLayout(shard=1), device) is config


def test_auto_counts_as_fsdp_until_a_device_is_known() -> None:
    config = run()
    engine: Any = config.engine
    assert engine.title == "torch with data_parallel=fsdp"
    layout = config.resolve_layout(1)
    ledgers = [
        estimate_peak_memory(config.resolve_data_parallel(kind), layout).peak_bytes
        for kind in ("fsdp", "plain")
    ]
    assert estimate_peak_memory(config, layout).peak_bytes == ledgers[0] != ledgers[1]
    without = estimate_run(config).memory
    device = load_device_profile("h100-sxm")
    assert estimate_run(config, device=device).memory != without
    named = run("engine.data_parallel=plain")
    assert estimate_run(config, device=device).memory == estimate_run(named, device=device).memory
