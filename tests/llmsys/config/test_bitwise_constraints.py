"""What bitwise mode refuses, and that each refusal says what would do."""

import pytest

from llmsys.config.batch import BatchConfig
from llmsys.config.bitwise_constraints import list_micro_batch_counts, require_ranks
from llmsys.config.loading.load import load_run_config
from llmsys.errors import ConfigError

BITWISE = (
    "train.reproducibility=bitwise",
    "train.threads_per_process=1",
    "batch={sequences: 8, sequence_length: 32, micro_sequences: 2}",
)


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run_config("train/demo", (*BITWISE, *overrides))
    return str(caught.value)


def test_a_config_that_says_what_bits_depend_on_is_taken_and_remembers_it() -> None:
    config = load_run_config("train/demo", BITWISE).resolve_precision("fp32")
    expected = {"threads_per_process": 1, "micro_sequences": 2, "assignment": "sequential"}
    assert config.trajectory_settings["bitwise"] == expected
    assert (
        "bitwise"
        not in load_run_config("train/demo", ()).resolve_precision("fp32").trajectory_settings
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "engine={kind: deepspeed}",
            "engine.kind: deepspeed sums gradients in its own order. Use torch, or ",
        ),
        (
            "engine={kind: torch, data_parallel: ddp}",
            "data_parallel: ddp sums gradients in its own order. Use fsdp",
        ),
        (
            "engine={kind: torch, gradient_accumulation: whole}",
            "engine.gradient_accumulation: whole sums gradients in its own order.",
        ),
        (
            "engine={kind: torch, cpu_offload: state}",
            "engine.cpu_offload: state runs the optimizer with other kernels. Use none, or set",
        ),
        (
            "train.precision=fp16",
            "train.precision: fp16 adapts the loss scale to earlier overflows, which bitwise mode "
            "does not support. Use bf16 or fp32, or set train.reproducibility=fast.",
        ),
        (
            "train.compile=block",
            "train.compile: block selects kernels by the first shapes that it sees. Use none",
        ),
        (
            "train.threads_per_process=0",
            "train.threads_per_process: 0 selects the threads by the number of cores, and sums on "
            "CPUs depend on it. Use 1, or the same number",
        ),
        (
            "optimizer={kind: muon}",
            "optimizer.kind: muon has operations that are not elementwise and exact. Use adamw, "
            "or set",
        ),
        (
            "batch.micro_sequences=0",
            "batch.micro_sequences: 0 makes the size of a micro-batch, and so its sums, depend on "
            "the number of ranks. Use 1, 2, 4 or 8: a step then has 8, 4, 2 or 1 micro-batches, "
            "which the number of processes must divide.",
        ),
        (
            "batch.micro_sequences=auto",
            "batch.micro_sequences: auto makes the size of a micro-batch",
        ),
        (
            "batch.micro_sequences=3",
            "batch.micro_sequences: 3 does not divide a step of 8 sequences. Use 1, 2, 4 or 8.",
        ),
        (
            "layout={tensor: 2}",
            "layout.tensor: 2 ranks would each sum a part of one matmul, so the result would "
            "depend on their number. Use tensor=1 with shard, replicate and expert, or set "
            "train.reproducibility=fast.",
        ),
        ("layout={context: 2}", "layout.context: 2 ranks would each sum a part of one matmul"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(override: str, message: str) -> None:
    assert message in refusal(override)


def test_a_number_of_processes_that_is_no_power_of_two_or_does_not_divide_is_refused() -> None:
    counts = list_micro_batch_counts(BatchConfig(sequences=24, micro_sequences=2), windows=True)
    for ranks in (1, 2, 4):
        require_ranks(ranks, counts)
    for ranks in (3, 8, 12):
        with pytest.raises(
            ConfigError,
            match="distributes the 12 micro-batches of a step over a power of two of processes "
            f"that divides them, but there are {ranks}. Start 1, 2 or 4, or choose another "
            "batch.micro_sequences",
        ):
            require_ranks(ranks, counts)
    assert list_micro_batch_counts(BatchConfig(num_length_buckets=6), windows=False) == (6,)
