"""Sections refuse what cannot be built, and name the nearest value that can."""

from typing import Any

import pytest
from pydantic import ValidationError

from llmsys.config.batch import BatchConfig
from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.config.section import find_nearest, find_nearest_multiples, list_divisors
from llmsys.errors import LayoutError

MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def model(**changes: Any) -> ModelConfig:
    shape = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    return ModelConfig.model_validate({**shape, "num_attention_heads": 4, **changes})


def test_heads_follow_from_the_width_unless_given() -> None:
    assert (model().head_dim, model().num_key_value_heads) == (16, 4)
    assert model(head_dim=32, num_key_value_heads=2).head_dim == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_size": 66},
            "num_attention_heads: 4 does not divide hidden_size=66. Use 3 or 6, or hidden_size=64 "
            "or 68, or set head_d",
        ),
        (
            {"moe": {**MOE, "every": 3}},
            "moe.every: 3 is more than num_hidden_layers=2, and no layer has experts. Use at",
        ),
        (
            {"moe": {**MOE, "dense_layers": [0, 1]}},
            "moe.dense_layers: no layer is left with experts. Use fewer",
        ),
        ({"num_key_value_heads": 3}, "3 does not divide num_attention_heads=4. Use 2."),
        (
            {"head_dim": 15},
            "15 is odd, but rope rotates pairs of channels. Use 16, or position.kind=none.",
        ),
        (
            {"intermediate_size": 0},
            "2 dense layers need a width above 0. Set it, for example to 256.",
        ),
        (
            {"moe": {**MOE, "first_dense_layers": 2}},
            "2 leaves no layer of 2 with experts. Use at most 1",
        ),
        (
            {"moe": {**MOE, "num_experts_per_tok": 7}},
            "7 of 6 experts cannot be chosen. Use at most 6.",
        ),
    ],
)
def test_impossible_shapes_name_the_nearest_legal_value(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        model(**changes)
    assert message in str(caught.value)


def test_a_width_with_its_own_head_dim_need_not_divide() -> None:
    assert model(hidden_size=66, head_dim=16).head_dim == 16


def test_a_model_of_experts_alone_needs_no_dense_width() -> None:
    built = model(intermediate_size=0, moe=MOE)
    assert (built.num_dense_layers, built.num_moe_layers) == (0, 2)


def test_sections_are_frozen() -> None:
    with pytest.raises(ValidationError):
        model().hidden_size = 128
    with pytest.raises(ValidationError):
        RunConfig().train.tokens = 1


@pytest.mark.parametrize(
    ("given", "sequences"),
    [({}, 16), ({"sequences": 3}, 3), ({"tokens": 2048}, 4), ({"tokens": 1024, "sequences": 2}, 2)],
)
def test_a_step_is_given_in_sequences_or_tokens(given: dict[str, int], sequences: int) -> None:
    batch = BatchConfig.model_validate({"sequence_length": 512, **given})
    assert (batch.sequences_per_step, batch.tokens_per_step) == (sequences, 512 * sequences)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokens": 1000}, "1000 is not a multiple of sequence_length=512. Use 512 or 1024."),
        ({"tokens": 100}, "100 is not a multiple of sequence_length=512. Use 512."),
        (
            {"tokens": 1024, "sequences": 3},
            "1024 and sequences=3 of 512 tokens disagree. Set one of them to null",
        ),
    ],
)
def test_a_step_that_does_not_add_up_is_refused(given: dict[str, int], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate({"batch": given})
    assert message in str(caught.value)


# Every pair of values of two axes.
@pytest.mark.parametrize(
    ("world_size", "expert", "replicate"),
    [
        (world_size, expert, 1 + (row + column) % 2)
        for row, world_size in enumerate([1, 2, 4, 6, 12])
        for column, expert in enumerate([1, 2, 3, 6])
    ],
)
def test_a_fitted_layout_multiplies_out(world_size: int, expert: int, replicate: int) -> None:
    shard, left = divmod(world_size, replicate)
    if left or shard % expert:
        with pytest.raises(LayoutError):
            ParallelLayout(replicate=replicate, expert=expert).resolve(world_size, model(moe=MOE))
        return
    fitted = ParallelLayout(replicate=replicate, expert=expert).resolve(world_size, model(moe=MOE))
    assert (fitted.replicate, fitted.shard, fitted.expert) == (replicate, shard, expert)
    assert fitted.resolve(world_size, model(moe=MOE)) == fitted


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            {"expert": 4},
            "6 experts cannot be split over expert=4. Use expert=1, 2, 3 or 6, "
            "or set model.moe.num_experts to a multiple of 4.",
        ),
        (
            {"expert": 3},
            "expert=3 does not divide shard=4, the ranks of one replica of the model. Use "
            "expert=1 or 2",
        ),
        (
            {"replicate": 3},
            "4 ranks cannot be split into replicate=3 equal copies. Use replicate=1, 2 or 4",
        ),
        (
            {"shard": 3},
            "replicate=1 × shard=3 is 3, but there are 4 ranks. Use shard=4, or shard=-1",
        ),
        (
            {"shard": 0},
            "layout.shard=0 is not a number of ranks. Use 1 or more, or -1 for all remaining "
            "ranks.",
        ),
    ],
)
def test_a_layout_that_does_not_fit_says_what_would(layout: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        ParallelLayout(**layout).resolve(4, model(moe=MOE))
    assert message in str(caught.value)


def test_a_dense_model_has_no_experts_to_split() -> None:
    with pytest.raises(
        LayoutError, match=r"A dense model has no experts to split over expert=2\. Use expert=1"
    ):
        ParallelLayout(expert=2).resolve(2, model())


@pytest.mark.parametrize(("tokens", "steps"), [(8192, 1), (8193, 2), (16384, 2), (16385, 3)])
def test_the_last_step_completes_the_budget(tokens: int, steps: int) -> None:
    assert RunConfig.model_validate({"train": {"tokens": tokens}}).num_steps == steps


def test_legal_values_are_found() -> None:
    assert list_divisors(12) == [1, 2, 3, 4, 6, 12]
    assert find_nearest(5, list_divisors(12)) == 4
    assert find_nearest_multiples(7, 4) == (4, 8)
