"""Waits for the host in mixtures of experts: launches for each local expert, less what hides
them.
"""

from typing import Any

import pytest

from llmsys.config.loading.load import load_model_config
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.estimate.device_profile import load_device_profile
from llmsys.estimate.program_profile import ProgramProfile, load_program_profile
from llmsys.estimate.software_profile import SoftwareProfile
from llmsys.estimate.step_time import estimate_step_time

H100 = load_device_profile("h100-sxm")
MODEL = load_model_config("model/qwen3-30b-a3b")
SECOND = H100.efficiency.host_seconds


def price(expert: int = 8, micro: int = 1, **time: Any) -> dict[str, float]:
    config = RunConfig.model_validate(
        {
            "model": MODEL,
            "batch": {"sequence_length": 4096, "sequences": 64, "micro_sequences": micro},
            "train": {"tokens": 1e9},
        }
    )
    program = ProgramProfile(name="one", description="one", time=SoftwareProfile(**time))
    step = estimate_step_time(config, ParallelLayout(shard=8, expert=expert), H100, program=program)
    return {name: seconds / step.factor for name, seconds in step.parts.items()}


def test_launches_of_experts_show_where_they_outlast_their_matmuls() -> None:
    found = price(expert_launches=17, expert_rows="node")
    # Eight micro-batches, 48 layers, 16 local experts; forward and twice backward.
    launches = 8 * 48 * 3 * 17 * 16 * SECOND
    assert found["host"] == pytest.approx(launches - found["experts"])
    assert price(expert=4, expert_launches=17, expert_rows="node")["host"] > 1.9 * found["host"]
    assert price(micro=8, expert_launches=17, expert_rows="node")["host"] < 0.1 * found["host"]
    assert price(expert_rows="node")["host"] == 0


def test_fixed_sizes_let_all_compute_hide_the_launches() -> None:
    counted, fixed = (
        price(2, expert_launches=17, expert_rows="node", reads_counts=one) for one in (True, False)
    )
    hidden = counted["host"] - fixed["host"]
    other = sum(fixed[name] for name in ("attention", "elementwise", "permutation"))
    # Matmuls of blocks hide launches too, and those of the head do not.
    assert other < hidden < other + fixed["products"]


def test_a_plain_all_to_all_waits_for_its_counts_too() -> None:
    node, visit = (price(expert_launches=17, expert_rows=rows) for rows in ("node", "visit"))
    assert visit["host"] - node["host"] == pytest.approx(8 * 48 * 3 * 40 * SECOND)


def test_nothing_waits_for_counts_that_the_host_does_not_read() -> None:
    node, visit = (
        price(4, expert_launches=17, expert_rows=rows, reads_counts=False)
        for rows in ("node", "visit")
    )
    # The plain all-to-all sorts what arrived, and these passes hide launches too.
    sorted_again = visit["permutation"] - node["permutation"]
    assert node["host"] - visit["host"] == pytest.approx(sorted_again)
    assert visit["host"] > 0


def test_the_shipped_programs_differ_as_their_sources_say() -> None:
    times = {
        name: load_program_profile(name).time
        for name in (
            *("megatron", "megatron-overlap", "megatron-flex-overlap", "megatron-graph"),
            *("megatron-drop", "hai-llm"),
        )
    }
    assert (times["megatron-drop"].reads_counts, times["megatron"].reads_counts) == (False, True)
    assert times["hai-llm"].expert_launches == 0
    # Every expert of 8-bit steps quantizes and pads, in both micro-batches.
    assert times["megatron-overlap"].expert_launches > 2 * times["megatron"].expert_launches
    found = [times[name] for name in ("megatron-flex-overlap", "megatron-graph")]
    assert [one.expert_overlap for one in found] == [0.35] * 2
    assert [one.reads_counts for one in found] == [False] * 2
    assert [one.expert_rows for one in found] == ["node"] * 2
    assert [one.expert_launches for one in found] == [17, 0]
