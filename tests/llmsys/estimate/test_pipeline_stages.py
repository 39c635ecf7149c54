"""The cut of a model into stages: against every possible cut, and what its ranks hold."""

from itertools import combinations, pairwise
from typing import Any

import pytest

from llmsys.config.loading.load import load_model_config
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import SMALL_MODEL, RunConfig
from llmsys.doctor.parity_models import DEEP
from llmsys.errors import LayoutError
from llmsys.estimate.activation_memory import IN_EVALUATION
from llmsys.estimate.device_profile import load_device_profile
from llmsys.estimate.flops import count_flops
from llmsys.estimate.model_tensors import count_parameters, list_model_tensors, needs_embedding_copy
from llmsys.estimate.peak_memory import estimate_peak_memory, find_largest_micro_batch
from llmsys.estimate.pipeline_stages import (
    LayerCosts,
    compute_imbalance,
    cut_layers,
    list_rank_stages,
)
from llmsys.estimate.rank_parameters import BlockWeights, count_gathered_weights
from llmsys.estimate.software_profile import MemoryProfile
from llmsys.estimate.step_time import estimate_step_time

LENGTH = 16
MODELS = {
    "dense": SMALL_MODEL.model_copy(update={"num_hidden_layers": 7}),
    "tied": SMALL_MODEL.model_copy(
        update={"num_hidden_layers": 6, "vocab_size": 2048, "tie_word_embeddings": True}
    ),
    "experts after dense layers": DEEP.model.model_copy(update={"num_hidden_layers": 8}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_no_cut_has_a_cheaper_costliest_stage(name: str, stages: int) -> None:
    model = MODELS[name]
    costs, layers = LayerCosts(model, LENGTH), model.num_hidden_layers

    def judge(ends: tuple[int, ...]) -> tuple[int, int]:
        spans = list(pairwise((0, *ends, layers)))
        return (
            max(sum(costs.operations[first:last]) for first, last in spans),
            max(sum(costs.parameters[first:last]) for first, last in spans),
        )

    cut = cut_layers(model, ParallelLayout(pipeline=stages), LENGTH).stages
    assert [layer for stage in cut for layer in stage] == list(range(layers))
    assert judge(tuple(stage.start for stage in cut[1:])) == min(
        map(judge, combinations(range(1, layers), stages - 1))
    )


@pytest.mark.parametrize("name", MODELS)
def test_layers_cost_what_the_model_costs(name: str) -> None:
    model, costs = MODELS[name], LayerCosts(MODELS[name], LENGTH)
    assert 2 * sum(costs.operations) == pytest.approx(
        count_flops(model, LENGTH, 1, "causal").forward, rel=0.02
    )
    copies = 2 if model.tie_word_embeddings else 1
    assert (
        sum(costs.parameters)
        == count_parameters(model).total + (copies - 1) * model.vocab_size * model.hidden_size
    )


def test_head_and_dense_layers_weigh_in_and_layers_per_stage_decides() -> None:
    # its head costs as much as three layers
    heavy_head = SMALL_MODEL.model_copy(update={"num_hidden_layers": 8})

    def cut(**layout: Any) -> list[int]:
        return [
            len(stage)
            for stage in cut_layers(heavy_head, ParallelLayout.model_validate(layout), 512).stages
        ]

    assert cut(pipeline=2) == [5, 3]
    assert cut(pipeline=2, layers_per_stage=[2, 6]) == [2, 6]
    costs = LayerCosts(heavy_head, 512).operations
    expected = 2 * max(sum(costs[:5]), sum(costs[5:])) / sum(costs)
    assert compute_imbalance(heavy_head, ParallelLayout(pipeline=2), 512) == pytest.approx(expected)
    assert expected > 1.03
    loop = cut_layers(
        heavy_head,
        ParallelLayout.model_validate(
            {"pipeline": 2, "pipeline_schedule": {"kind": "interleaved"}}
        ),
        512,
    )
    assert [loop.list_rank_stages(rank) for rank in (0, 1)] == [[0, 2], [1, 3]]


def test_ranks_hold_every_tensor_once_and_a_tied_embedding_twice() -> None:
    for model in (*MODELS.values(), DEEP.model):
        copies = needs_embedding_copy(model) * model.vocab_size * model.hidden_size
        for schedule in ({"kind": "1f1b"}, {"kind": "interleaved"}):
            layout = ParallelLayout.model_validate({"pipeline": 2, "pipeline_schedule": schedule})
            ranks = list_rank_stages(model, layout, LENGTH, 4)
            held = [row.num_elements for rank in ranks for row in rank.iter_parameters(model)]
            assert sum(held) == count_parameters(model).total + copies


def build_run(**layout: Any) -> tuple[RunConfig, ParallelLayout]:
    settings = {
        "layout": layout,
        "batch": {"sequences": 16, "micro_sequences": 1},
        "train": {"precision": "bf16"},
    }
    config = RunConfig.model_validate(settings)
    return config, config.resolve_layout(4)


def test_a_pipelined_config_is_priced_as_it_runs() -> None:
    device = load_device_profile("h100-sxm")
    plain, loop = (
        build_run(pipeline=4),
        build_run(pipeline=2, pipeline_schedule={"kind": "interleaved"}, shard=2),
    )
    # A bubble is (p - 1) / (v M) of the work of a rank's M micro-batches, and longer where stages
    # differ.
    for run, share in ((plain, 3 / 16), (loop, 1 / (2 * 8))):
        step = estimate_step_time(*run, device)
        apart = ("bubble", "data", "copies", "optimizer", "offload", "host")
        busy = sum(seconds for name, seconds in step.parts.items() if name not in apart)
        # all wait for the rank with the head
        late = compute_imbalance(run[0].model, run[1], 512) - 1
        assert step.parts["bubble"] == pytest.approx((share + late) * busy, rel=0.05)
        assert step.ranks == 4


def test_auto_takes_micro_batches_that_fill_the_pipeline() -> None:
    def choose(sequences: int, **layout: Any) -> int:
        batch = {"sequences": sequences, "micro_sequences": "auto"}
        config = RunConfig.model_validate(
            {"layout": layout, "batch": batch, "train": {"precision": "bf16"}}
        )
        return find_largest_micro_batch(
            config, config.resolve_layout(4), 1 << 40, MemoryProfile()
        ).sequences

    # Four for each rank of the pipeline; where there are fewer sequences, as many as there are.
    assert choose(64, pipeline=4) == 4
    assert choose(64, pipeline=2) == 4
    assert choose(8, pipeline=4) == 1
    # The rounds of an interleaved schedule are equal, so it takes 3 micro-batches and not 9, 15 or
    # 45.
    assert choose(90, pipeline=2) == 5
    assert choose(90, pipeline=2, pipeline_schedule={"kind": "interleaved"}) == 15
    with pytest.raises(
        LayoutError, match=r"cuts the 2 sequences of a rank .* Use more batch.sequences"
    ):
        choose(2, pipeline=4)


def test_weights_and_gradients_of_a_backward_are_those_of_the_blocks_of_a_stage() -> None:
    """Two blocks are gathered where there are two, and another's gradients are reduced from the
    third one on.
    """

    def find_items(layers: int, name: str) -> dict[str, int]:
        config, layout = build_run(pipeline=2, shard=2, layers_per_stage=[layers, 4 - layers])
        train = config.train.model_copy(update={"activation_checkpoint": "full"})
        config = config.model_copy(update={"train": train})
        timeline = estimate_peak_memory(
            config, layout, system=MemoryProfile(measured="allocated"), pipeline_rank=0
        )
        return {
            item.name: item.bytes
            for one in timeline.instants
            if one.name == name
            for item in one.items
        }

    weights, reduced = "gathered weights of blocks", "gradients before reduction"
    last, first = "in the backward of the last block", "in the backward of the first block"
    block = find_items(1, last)[weights]
    assert [find_items(layers, last)[weights] // block for layers in (1, 2, 3)] == [1, 2, 2]
    assert [reduced in find_items(layers, last) for layers in (1, 2, 3)] == [False, False, True]
    assert [reduced in find_items(layers, first) for layers in (1, 2)] == [False, True]


def test_experts_are_reduced_apart_from_their_block() -> None:
    block = BlockWeights(full=10, travelling=12, staged=0, experts=7)
    assert [block.count_reduced(follows, begins=True) for follows in (False, True)] == [0, 5]
    assert block.count_reduced(follows=True, begins=False) == 7
    layout = ParallelLayout(expert=2).resolve(4, DEEP.model)
    whole = count_gathered_weights(
        DEEP.model, layout, list_model_tensors(DEEP.model), MemoryProfile()
    )
    experts = 3 * 2 * 16 * 32  # two of four experts on a rank, three matrices each
    assert [whole.select_block("blocks.", layer).block.experts for layer in (0, 1)] == [0, experts]
    assert whole.block == max(whole.by_block.values())


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("deepseek-v3", "pipeline=16 shard=8 expert=8"),
        ("deepseek-v3", "pipeline=8 shard=8 expert=8 interleaved"),
        ("gemma2-9b", "pipeline=6 shard=4"),
        ("llama3.1-8b", "pipeline=4 tensor=2 shard=2 interleaved"),
        ("llama3.1-405b", "pipeline=32 tensor=4 shard=2 interleaved"),
    ],
)
@pytest.mark.parametrize("policy", ["none", "full"])
def test_the_fullest_rank_is_the_fullest_of_all(model: str, layout: str, policy: str) -> None:
    """Few ranks are looked at: no other one holds more."""
    words = [one for one in layout.split() if "=" in one]
    axes = {name: int(size) for name, size in (one.split("=") for one in words)}
    kind = "interleaved" if "interleaved" in layout else "1f1b"
    asked = ParallelLayout.model_validate(axes | {"pipeline_schedule": {"kind": kind}})
    config = RunConfig.model_validate(
        {
            "model": load_model_config(f"model/{model}"),
            "batch": {"sequence_length": 2048, "sequences": 256, "micro_sequences": 1},
            "train": {"precision": "bf16", "compile": "block", "activation_checkpoint": policy},
            "layout": asked,
        }
    )
    resolved = config.resolve_layout(asked.world_size)
    every = [
        estimate_peak_memory(config, resolved, pipeline_rank=rank)
        for rank in range(resolved.pipeline)
    ]
    fullest = estimate_peak_memory(config, resolved)
    assert fullest.instants == max(every, key=lambda one: one.peak_bytes).instants


def test_memory_counts_the_passes_in_flight_and_the_buffers_of_messages() -> None:
    def find_items(
        name: str = "at the end of forward", rank: int | None = None, **layout: Any
    ) -> dict[str, int]:
        config, resolved = build_run(**layout)
        timeline = estimate_peak_memory(config, resolved, pipeline_rank=rank)
        return {
            item.name: item.bytes
            for one in timeline.instants
            if one.name == name
            for item in one.items
        }

    stream = 512 * SMALL_MODEL.hidden_size * 2  # one sequence in bf16
    sizes = [1, 1, 1, 1]
    held = {
        kind: find_items(pipeline=4, layers_per_stage=sizes, pipeline_schedule={"kind": kind})
        for kind in ("gpipe", "1f1b")
    }
    assert held["1f1b"]["messages between stages"] in (16 * stream, 2 * 16 * stream)
    assert (
        held["gpipe"]["activations saved by blocks"]
        > 3 * held["1f1b"]["activations saved by blocks"]
    )
    assert "messages between stages" not in find_items(shard=4)
    # The first rank holds four micro-batches, and three of them after a backward pass.
    stages: dict[str, Any] = {"pipeline": 4, "layers_per_stage": sizes}
    saved, after = "activations saved by blocks", find_items("at the end of backward", 0, **stages)
    assert after[saved] == pytest.approx(3 / 4 * find_items(rank=0, **stages)[saved], rel=1e-6)
    # In an evaluation only the last stage has logits.
    logits = ["logits" in find_items(IN_EVALUATION, rank, **stages) for rank in (0, 3)]
    assert logits == [False, True]
