"""Laws of the derived micro-batch: the largest that fits, by the arithmetic of the estimate, and no silent overflow."""

import pytest

from llmsys.config.load import load_run_config
from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError
from llmsys.estimate.micro_batch_size import USABLE_SHARE, find_largest_micro_batch
from llmsys.estimate.peak_memory import estimate_peak_memory
from llmsys.estimate.software_profile import MemoryProfile

CPU = MemoryProfile(device="cpu")


def config(*overrides: str) -> RunConfig:
    return load_run_config(
        "train/demo", ["batch.sequences=48", "batch.micro_sequences=auto", "train.precision=bf16", *overrides]
    )


def peak(one: RunConfig, ranks: int, sequences: int) -> int:
    batch = one.batch.model_copy(update={"micro_sequences": sequences})
    one = one.model_copy(update={"batch": batch})
    return estimate_peak_memory(one, one.layout.resolve(ranks, one.model), system=CPU).peak_bytes


@pytest.mark.parametrize("sequences", [1, 2, 3, 4, 6, 8, 12, 24])
def test_the_largest_divisor_that_fits_is_taken(sequences: int) -> None:
    one, ranks = config(), 2
    memory = int(peak(one, ranks, sequences) / USABLE_SHARE) + 1
    choice = find_largest_micro_batch(one, one.layout.resolve(ranks, one.model), memory, CPU)
    assert (choice.sequences, choice.share) == (sequences, 24)
    assert choice.peak_bytes <= USABLE_SHARE * memory
    assert f"selects {sequences} of a rank's 24 sequences per forward pass" in str(choice)


def test_a_micro_batch_divides_every_size_of_a_ramp() -> None:
    one = config("batch.ramp={start_tokens: 6144, ramp_tokens: 90000}")
    choice = find_largest_micro_batch(one, one.layout.resolve(2, one.model), 1 << 40, CPU)
    assert choice.sequences == 6
    assert all(size // 2 % choice.sequences == 0 for size in one.batch.step_sizes)


def test_when_nothing_fits_the_message_says_what_binds_and_what_would_help() -> None:
    one = config()
    with pytest.raises(ConfigError, match=r"auto finds no size that fits; .* runs out .* GiB over capacity .*"):
        find_largest_micro_batch(one, one.layout.resolve(2, one.model), 1 << 26, CPU)
