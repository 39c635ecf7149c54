"""Layers, weights and micro-batches in flight of a rank in the pipeline of another program."""

import pytest

from llmsys.config.loading.load import load_model_config
from llmsys.config.model import ModelConfig
from llmsys.estimate.model_tensors import list_model_tensors
from llmsys.estimate.rank_parameters import PipelineStage, _cut_evenly, list_pipeline_stages
from llmsys.estimate.software_profile import MemoryProfile

LLAMA = load_model_config("model/llama3.1-405b")
DEEPSEEK = load_model_config("model/deepseek-v3")


def list_stages(model: ModelConfig, **program: object) -> list[PipelineStage]:
    return list_pipeline_stages(model, MemoryProfile(pipeline=16, **program))  # type: ignore[arg-type]


def test_short_ends_are_the_chunks_that_llama_3_describes() -> None:
    """The first chunk has only the embedding and the last one only the head (2407.21783, 3.3.2)."""
    first, second, last = list_stages(LLAMA, stages="short_ends", pipeline_chunks=8)
    # 126 layers and two ends in 128 chunks: chunk c of rank r has layer 16 c + r - 1.
    assert sorted(first.layers) == [16 * chunk - 1 for chunk in range(1, 8)]
    assert sorted(second.layers) == [16 * chunk for chunk in range(8)]
    assert sorted(last.layers) == [16 * chunk + 14 for chunk in range(7)]
    assert [(stage.first, stage.last) for stage in (first, second, last)] == [
        (1, 0),
        (0, 0),
        (0, 1),
    ]


@pytest.mark.parametrize(("rank", "layers"), [(0, 16 * 7), (1, 16 * 7 + 2 * 14 + 1)])
def test_a_rank_holds_the_warm_up_of_the_interleaved_schedule_and_one_more(
    rank: int, layers: int
) -> None:
    """Megatron's warm-up of rank r has 2 (p - r - 1) + (v - 1) p forward passes of chunks
    (Narayanan 2021, 2.2).

    Rounds are of 16 micro-batches: chunk 0 of the first rank, which begins the second round, has no
    layer.
    """
    stage = list_stages(LLAMA, stages="short_ends", pipeline_chunks=8)[rank]
    assert stage.in_flight * len(stage.layers) == pytest.approx(layers)


def test_a_bidirectional_pipeline_has_two_stages_on_a_rank_and_a_micro_batch_more() -> None:
    """DeepSeek-V3, table 2: two copies of the parameters, and activations of PP + 1
    micro-batches.
    """
    ends, middle = list_stages(DEEPSEEK, schedule="bidirectional", stages="short_ends")
    # 61 blocks and two ends in 16 stages: 3, then 14 of 4, and 2.
    assert ends.held_layers == ((frozenset(range(3)), 16), (frozenset({59, 60}), 1))
    assert middle.held_layers == ((frozenset(range(27, 31)), 9), (frozenset(range(31, 35)), 8))
    assert (ends.first, ends.last, middle.first, middle.last) == (True, True, False, False)
    names = [row.name for row in ends.iter_parameters(DEEPSEEK)]
    assert {"embed.weight", "head.weight"} <= set(names)
    elements = sum(row.num_elements for row in middle.iter_parameters(DEEPSEEK))
    mean = sum(
        row.num_elements
        for row in PipelineStage(frozenset(range(61)), True, True, 1).iter_parameters(DEEPSEEK)
    )
    assert elements == pytest.approx(2 * mean / 16, rel=0.1)


def test_equal_stages_of_both_directions_cover_neighbouring_layers() -> None:
    ends, middle = list_stages(LLAMA, schedule="bidirectional")
    assert [sorted(layers)[0] for layers, _ in ends.held_layers] == [0, 119]
    (early, _), (late, _) = middle.held_layers
    assert (max(early) + 1, len(early), len(late)) == (min(late), 8, 8)


@pytest.mark.parametrize("ranks", [2, 7, 32, 126, 128])
def test_short_ends_have_every_layer_once_and_no_rank_without_layers_counts(ranks: int) -> None:
    program = MemoryProfile(pipeline=ranks, stages="short_ends")
    assert [
        layer for stage in _cut_evenly(LLAMA.num_hidden_layers, program) for layer in stage
    ] == list(range(126))
    assert all(stage.layers for stage in list_pipeline_stages(LLAMA, program))


@pytest.mark.parametrize("name", ["model/lstm-seq2seq", "model/t5-small", "model/mixtral-8x7b"])
def test_one_stage_has_every_parameter_of_the_model(name: str) -> None:
    model = load_model_config(name)
    (stage,) = list_pipeline_stages(model, MemoryProfile())
    held = [row.name for row in stage.iter_parameters(model)]
    assert held == [row.name for row in list_model_tensors(model)]
