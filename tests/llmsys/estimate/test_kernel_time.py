"""Seconds of kernels that are kept are those that would be computed again."""

from itertools import product

import pytest

from llmsys.config.loading.load import load_model_config, read_config
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.estimate import kernel_time, step_time
from llmsys.estimate.cluster_costs import ClusterCosts
from llmsys.estimate.device_profile import load_device_profile
from llmsys.estimate.kernel_context import KernelContext, MicroBatchShape
from llmsys.estimate.kernel_time import compute_kernel_seconds, estimate_kernel_seconds
from llmsys.estimate.plan.layout_candidate import PlanTarget
from llmsys.estimate.plan.layout_search import search_layouts
from llmsys.estimate.program_profile import load_program_profile

H100, H200 = load_device_profile("h100-sxm"), load_device_profile("h200")
MODELS = [load_model_config(f"model/{name}") for name in ("llama3.2-1b", "olmoe-1b-7b")]
LAYOUTS = [
    ParallelLayout(replicate=replicate, shard=shard, tensor=tensor, **context)  # type: ignore[arg-type]
    for replicate, shard, tensor, context in product(
        (1, 2),
        (4, 8),
        (1, 2),
        ({}, {"context": 4}, {"context": 4, "context_kind": "ring"}),
    )
]


def test_kept_seconds_are_those_of_the_same_kernels() -> None:
    programs = [load_program_profile(name).time for name in ("llmsys", "llmsys-eager")]
    shapes = [
        MicroBatchShape(sequences, length, 0, "bf16", has_documents)
        for sequences, length, has_documents in product((1, 2), (4096, 8192), (False, True))
    ]
    for model, device, software, shape, layout in product(
        MODELS, (H100, H200), programs, shapes, LAYOUTS
    ):
        for expert in (1, 4) if model.moe is not None else (1,):
            for load in (1.0, 1.5):
                axes = layout.model_copy(update={"expert": expert})
                bench = KernelContext(model, axes, device, software, shape, expert_load=load)
                assert estimate_kernel_seconds(bench) == compute_kernel_seconds(bench)


@pytest.mark.parametrize("model", ["llama3.2-1b", "olmoe-1b-7b"])
def test_a_plan_is_the_same_as_one_that_keeps_nothing(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["batch.sequence_length=4096", "batch.sequences=16"]
    config = read_config(f"model/{model}", words).run
    place = PlanTarget(ClusterCosts(devices=4), H100)
    kept = search_layouts(config, place)
    monkeypatch.setattr(step_time, "estimate_kernel_seconds", compute_kernel_seconds)
    again = search_layouts(config, place)
    assert [one.choice for one in kept.ranked] == [one.choice for one in again.ranked]
    assert [one.step for one in kept.ranked] == [one.step for one in again.ranked]
    assert kept.rejected == again.rejected


def test_what_is_kept_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_time, "MAX_KEPT", 3)
    software = load_program_profile("llmsys").time
    for length in range(128, 128 * 12, 128):
        shape = MicroBatchShape(1, length, 0, "bf16")
        estimate_kernel_seconds(KernelContext(MODELS[0], LAYOUTS[0], H100, software, shape))
        assert len(kernel_time._kept) <= 3
