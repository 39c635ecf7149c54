"""The rules of a pipeline: what it takes, and what is refused before start with value, rule and
remedy.
"""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from llmsys.config.combinations import find_refused_combinations
from llmsys.config.loading.load import read_config
from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.pipeline import (
    GPipeScheduleConfig,
    InterleavedScheduleConfig,
    OneForwardOneBackwardConfig,
)
from llmsys.config.run import SMALL_MODEL, RunConfig
from llmsys.errors import ConfigError, LayoutError

MICRO = ["batch.micro_sequences=2", "generation.prompts=[]"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "layout.pipeline_schedule.kind=zero_bubble",
            "zero_bubble is not available: it computes gradients of inputs",
        ),
        (
            "layout.pipeline_schedule.kind=zbv",
            "gives wrong gradients without an error.*Use 1f1b, interleaved or gpipe",
        ),
        ("layout.pipeline_schedule.kind=dualpipev", "selective recomputation fails. Use 1f1b"),
        (
            "layout.pipeline=8",
            "8 stages cannot share 4 layers: each needs one. Use pipeline=1, 2, 3 or 4",
        ),
        (
            "layout.pipeline=2 layout.pipeline_schedule={kind: interleaved, stages_per_rank: 3}",
            "6 stages cannot share 4 layers: .* Use pipeline=1, or pipeline_schedule.kind=1f1b",
        ),
        (
            "layout.pipeline=2 layout.layers_per_stage=[3,2]",
            r"\[3, 2\] must be 2 numbers .* sum 4, .* Use \[2, 2\]",
        ),
        ("layout.layers_per_stage=[4]", "pipeline=1 has no stages"),
        (
            "layout.pipeline=2 engine.kind=deepspeed",
            "deepspeed runs no stages. Use torch with data_parallel=fsdp",
        ),
        (
            "layout.pipeline=2 engine.data_parallel=ddp",
            "torch with data_parallel=ddp runs no stages",
        ),
        (
            "layout.pipeline=2 train.reproducibility=bitwise model.tie_word_embeddings=true",
            "bitwise sums the gradient of one embedding .* model.tie_word_embeddings=true .* Use "
            "fast",
        ),
        (
            "layout.pipeline=2 train.reproducibility=bitwise model.dropout.residual=0.1",
            "bitwise draws dropout layer by layer .* Use fast, model.dropout={}, or "
            "layout.pipeline=1",
        ),
        (
            "layout.pipeline=2 model.position={kind: relative_bias}",
            "model.position.kind=relative_bias does not run in stages. Use pipeline=1",
        ),
    ],
)
def test_what_a_pipeline_does_not_take_is_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_config("train/demo", [*MICRO, *re.split(r" (?=\w+\.)", words)])
    assert re.search(message, str(raised.value).replace("\n", " ")), raised.value


def resolve(ranks: int, sequences: int, micro: int, **layout: Any) -> ParallelLayout:
    config = RunConfig.model_validate(
        {"layout": layout, "batch": {"sequences": sequences, "micro_sequences": micro}}
    )
    return config.resolve_layout(ranks)


def test_a_schedule_takes_the_micro_batches_that_torch_takes() -> None:
    """The rules of torch.distributed.pipelining, which raises in the first step."""
    schedules = (GPipeScheduleConfig(), OneForwardOneBackwardConfig(), InterleavedScheduleConfig())
    legal = {
        schedule.kind: [n for n in range(1, 10) if schedule.find_micro_batch_problem(4, n) is None]
        for schedule in schedules
    }
    assert legal["gpipe"] == list(range(1, 10))
    assert legal["1f1b"] == list(range(4, 10))
    # rounds of max(1, n // 4), of equal size
    assert legal["interleaved"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert InterleavedScheduleConfig().find_micro_batch_problem(2, 5) is not None


def test_micro_batches_that_a_schedule_does_not_take_are_refused_with_the_sizes_that_it_does() -> (
    None
):
    with pytest.raises(
        LayoutError,
        match=r"micro_sequences=8 cuts the 8 sequences of a rank into 1 micro-batches, .*"
        r"kind=1f1b takes at least as many .* \(2\). Use batch.micro_sequences=1, 2 or 4",
    ):
        resolve(4, 16, 8, pipeline=2)
    assert resolve(4, 16, 4, pipeline=2).shard == 2
    with pytest.raises(
        LayoutError, match=r"into 5 micro-batches, .* takes a multiple of the pipeline's 2 ranks"
    ):
        resolve(2, 5, 1, pipeline=2, pipeline_schedule={"kind": "interleaved"})
    with pytest.raises(
        LayoutError,
        match=r"3 ranks cannot be split into pipeline=2 equal parts. Start a multiple of 2",
    ):
        resolve(3, 16, 2, pipeline=2)


def test_ranks_of_a_pipeline_share_rows_and_count_them_once() -> None:
    layout = ParallelLayout(pipeline=2, replicate=2, tensor=2).resolve(16, SMALL_MODEL)
    assert (layout.shard, layout.ranks_per_stage, layout.world_size, layout.data_parallel_size) == (
        2,
        8,
        16,
        4,
    )
    assert [layout.get_data_rank(rank) for rank in range(16)] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert [rank for rank in range(16) if layout.has_own_rows(rank)] == [0, 2, 4, 6]


def test_forward_passes_in_flight_are_those_that_torch_holds() -> None:
    """Measured with 4 ranks, 8 micro-batches and 2 stages per rank."""
    for schedule, layers, expected in (
        (GPipeScheduleConfig(), [1], [8, 8, 8, 8]),
        (OneForwardOneBackwardConfig(), [1], [4, 3, 2, 1]),
        (InterleavedScheduleConfig(), [1, 1], [11, 9, 7, 5]),
    ):
        assert [schedule.count_held_layers(4, rank, 8, layers)[0] for rank in range(4)] == expected


@pytest.mark.parametrize(
    "layers", [[1, 1, 1], [1, 5, 2], [5, 2, 3]], ids=["even", "head last", "more first"]
)
@pytest.mark.parametrize(
    ("ranks", "chunks", "micro_batches"), [(4, 2, 4), (4, 2, 16), (4, 3, 8), (2, 2, 3), (4, 2, 3)]
)
def test_interleaved_layers_in_flight_follow_from_torchs_order(
    ranks: int, chunks: int, micro_batches: int, layers: list[int]
) -> None:
    """Over a whole step, and while the first stage of a rank runs its backward passes."""
    schedule, rounds = (
        InterleavedScheduleConfig(stages_per_rank=chunks),
        max(1, micro_batches // ranks),
    )
    settings = {"pp_group_size": ranks, "n_local_stages": chunks, "_n_microbatches": micro_batches}
    order: Any = SimpleNamespace(**settings, microbatches_per_round=micro_batches // rounds)
    for rank in range(ranks):
        held, most, waiting = 0, 0, 0
        for action in filter(
            None, ScheduleInterleaved1F1B._calculate_single_rank_operations(order, rank)
        ):
            is_forward = action.computation_type.name == "FORWARD"
            held += layers[action.stage_index // ranks] * (1 if is_forward else -1)
            if not is_forward and action.stage_index == rank:
                waiting = max(waiting, held)
            most = max(most, held)
        assert schedule.count_held_layers(ranks, rank, micro_batches, layers[:chunks]) == (
            most,
            waiting,
        )


def test_a_layout_without_a_pipeline_is_what_it_was() -> None:
    assert ParallelLayout().pipeline == 1
    model = ModelConfig.model_validate(
        SMALL_MODEL.model_dump() | {"position": {"kind": "relative_bias"}}
    )
    alone = SimpleNamespace(model=model, layout=ParallelLayout())
    assert list(find_refused_combinations(alone)) == []
    staged = SimpleNamespace(model=model, layout=ParallelLayout(pipeline=2))
    [broken] = find_refused_combinations(staged)
    assert broken.message == (
        "model.position.kind=relative_bias does not run in stages. Use pipeline=1 with shard, "
        "tensor or context."
    )
