"""Price of bitwise mode: sums through memory, gathers in place of reductions, experts one by
one, and nothing else.
"""

import pytest

from llmsys.config.loading.load import load_model_config
from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.estimate.device_profile import load_device_profile
from llmsys.estimate.model_tensors import count_parameters
from llmsys.estimate.program_profile import load_program_profile
from llmsys.estimate.step_time import estimate_step_time

H100 = load_device_profile("h100-sxm")
DENSE, MOE = load_model_config("model/llama3.2-1b"), load_model_config("model/olmoe-1b-7b")
EAGER = load_program_profile("llmsys-eager")


def price(
    mode: str, layout: ParallelLayout, model: ModelConfig = DENSE, sequences: int = 64
) -> dict[str, float]:
    config = RunConfig.model_validate(
        {
            "model": model,
            "batch": {"sequence_length": 4096, "sequences": sequences, "micro_sequences": 1},
            "train": {
                "tokens": 1e9,
                "reproducibility": mode,
                "threads_per_process": 1,
                "compile": "none",
            },
        }
    )
    step = estimate_step_time(config, layout, H100, program=EAGER)
    return {name: seconds / step.factor for name, seconds in step.parts.items()}


def test_fast_mode_has_no_such_part_and_all_others_are_equal() -> None:
    layout = ParallelLayout(shard=8)
    fast, bitwise = price("fast", layout), price("bitwise", layout)
    assert bitwise.pop("bitwise") > 0
    assert fast == bitwise


def test_sums_of_a_dense_model_are_their_bytes() -> None:
    found = price("bitwise", ParallelLayout(shard=8))
    own = 4 * count_parameters(DENSE).total / 8
    rate = H100.memory_bandwidth * H100.efficiency.memory
    # Eight micro-batches on each rank; AdamW's operations one by one; ordered sums in attention's
    # backward.
    attention = 0.15 * found["attention"]
    least, most = (8 * 3 + 30) * own / rate, (8 * 3 + 30) * own / rate + attention
    assert least < found["bitwise"] < most


def test_replicas_gather_whole_gradients() -> None:
    shared, copied = (
        price("bitwise", ParallelLayout(shard=8 // one, replicate=one)) for one in (1, 4)
    )
    own = 4 * count_parameters(DENSE).total / 2
    links = H100.get_interconnect("node").bandwidth * H100.efficiency.links
    # Three gradients of others arrive in place of 2 · 3/4 of one, for each of eight micro-batches.
    gathered = 8 * (3 - 1.5) * own / links
    assert copied["bitwise"] - shared["bitwise"] > gathered


@pytest.mark.parametrize("expert", [1, 8])
def test_experts_one_by_one_wait_for_the_host_and_read_weights_for_each_source(expert: int) -> None:
    layout = ParallelLayout(shard=8, expert=expert)
    experts = price("bitwise", layout, MOE, 8)
    assert experts["bitwise"] > price("bitwise", ParallelLayout(shard=8), DENSE, 8)["bitwise"]
    # 64 experts of 16 layers with 3 + 5 kernels, forward and twice backward, 6 µs each, less what
    # matmuls hide.
    launches = 3 * 8 * 64 * 16 * H100.efficiency.host_seconds
    assert experts["bitwise"] > launches - experts["experts"]
