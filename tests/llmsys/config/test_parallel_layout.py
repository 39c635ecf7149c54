"""Axes that cannot work are refused before anything starts, with values that would do."""

from typing import Any

import pytest
from pydantic import ValidationError

from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.errors import LayoutError

MODEL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 90, "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}  # fmt: skip
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
ENCODER = {"family": "encoder", "head": {"kind": "classification", "num_labels": 2}}


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ({"tensor": 5}, {},
         "12 attention heads cannot be divided over context=1 × tensor=5 ranks. Their product "
         "must be 1, 2, 3, 4, 6 or 12."),
        ({"tensor": 3}, {},
         "4 key-value heads cannot be divided over tensor=3 ranks: one number must divide the "
         "other. Use tensor=1, 2 or 4, or a multiple of 4."),
        ({"context": 6}, {"num_key_value_heads": 4},
         "4 key-value heads of a tensor rank cannot be divided over context=6 ranks: one number "
         "must divide the other. Use context=1, 2 or 4, or a multiple of 4."),
        ({"tensor": 4}, {}, "model.intermediate_size=90 channels cannot be split over tensor=4 "
        "ranks. Use tensor=1, 2, 3 or 6, or make it a multiple of 4."),
        ({"tensor": 4}, {"moe": MOE | {"num_shared_experts": 1}, "intermediate_size": 0},
         "model.moe.num_shared_experts=10 channels cannot be split over tensor=4 ranks. Use "
         "tensor=1 or 2, "),
        ({"tensor": 2}, {"moe": MOE | {"routing": {"kind": "capacity"}}},
         "model.moe.routing.kind=capacity needs full sequences on each rank. Use tensor=1 and "
         "context=1"),
        ({"context": 2}, {"moe": MOE | {"routing": {"kind": "expert_choice"}}},
         "model.moe.routing.kind=expert_choice needs full sequences on each rank."),
        ({"context": 2}, {"family": "encoder_decoder"}, "model.family=encoder_decoder needs full "
        "sequences"),
        ({"context": 2}, {"position": {"kind": "transformer_xl"}},
            "model.position.kind=transformer_xl "
        "needs full"),
        ({"tensor": 2}, ENCODER, "model.head.kind=classification needs full sequences on each "
        "rank."),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_split_says_what_would(
    layout: dict[str, int], changes: dict[str, Any], message: str
) -> None:
    ranks = layout.get("tensor", 1) * layout.get("context", 1)
    model = ModelConfig.model_validate(MODEL | changes)
    with pytest.raises(LayoutError) as caught:
        ParallelLayout(**layout).resolve(ranks, model)
    assert message in str(caught.value)
    with pytest.raises(ValidationError) as refused:
        RunConfig.model_validate({"model": MODEL | changes, "layout": layout})
    assert message in str(refused.value)


RING = {"context": 24, "context_kind": "ring"}
OTHER_HEADS = "context_kind=ulysses, or another position kind without dropout of attention."


def test_a_ring_has_more_ranks_than_heads() -> None:
    model = ModelConfig.model_validate(MODEL)
    with pytest.raises(LayoutError, match="whose ranks share heads"):
        ParallelLayout(context=24).resolve(24, model)
    assert ParallelLayout(context=24, context_kind="ring").resolve(24, model).ring_size == 24
    mixed = ParallelLayout(context=24, context_kind="ulysses_ring", ring=2).resolve(24, model)
    assert (mixed.ring_size, ParallelLayout(context=24).ring_size) == (2, 1)
    assert "context_kind" not in ParallelLayout(context=24).to_settings()
    assert mixed.to_settings()["ring"] == 2
    with pytest.raises(
        LayoutError,
        match=r"ring=5 members cannot share context=24 ranks equally\. Use ring=2, 3, 4, ",
    ):
        ParallelLayout(context=24, context_kind="ulysses_ring", ring=5).resolve(24, model)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"layout": RING | {"context_kind": "ulysses_ring", "ring": 5}},
         "layout.ring: 5 members cannot share context=24 ranks equally. Use ring=2, 3, 4, 6, 8, "
         "12 or 24, or context_kind=ring."),
        ({"batch": {"sequence_length": 24 * 9}},
         "layout.context_kind: ring deals two chunks of a sequence to each of 24 members, and "
         "batch.sequence_length=216 cannot be divided by 48. Use batch.sequence_length=192."),
        ({"model": MODEL | {"position": {"kind": "relative_bias"}}},
         "layout.context_kind: ring merges attention of keys that arrive one after another, "
         "which model.position.kind=relative_bias, whose bias of the scores is trained, has no "
         f"form for. Use {OTHER_HEADS}"),
        ({"model": MODEL | {"dropout": {"attention": 0.1}}},
         f"which model.dropout.attention=0.1 has no form for. Use {OTHER_HEADS}"),
    ],
)  # fmt: skip
def test_a_ring_that_cannot_be_says_what_would(sections: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"model": MODEL, "layout": RING, "batch": {"sequence_length": 24 * 8}}
    RunConfig.model_validate(good)
    with pytest.raises(ValidationError) as refused:
        RunConfig.model_validate(good | sections)
    problems = [
        ".".join(map(str, one["loc"])) + ": " + one["msg"] for one in refused.value.errors()
    ]
    assert any(message in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"engine": {"kind": "deepspeed"}},
         "engine.kind=deepspeed does not shard matrices or sequences. Use engine.kind=torch with "
         "data_parallel=fsdp, or tensor=1 and context=1."),
        ({"engine": {"kind": "accelerate"}}, "engine.kind=accelerate does not shard matrices or "
        "sequences."),
        ({"engine": {"kind": "torch", "data_parallel": "ddp"}},
         "engine.kind=torch with data_parallel=ddp does not shard matrices "),
        ({"batch": {"sequence_length": 510}}, "batch.sequence_length=510 positions cannot be "
        "divided over context=2 × tensor=2 ranks. Use batch.sequence_length=512, or another "
        "multiple of 4."),
    ],
)  # fmt: skip
def test_a_run_that_cannot_be_split_says_what_would(sections: dict[str, Any], message: str) -> None:
    layout = {"tensor": 2, "context": 2}
    with pytest.raises(ValidationError) as refused:
        RunConfig.model_validate({"model": MODEL, "layout": layout} | sections)
    assert message in str(refused.value)


@pytest.mark.parametrize(("tensor", "context"), [(2, 1), (1, 12), (6, 2), (3, 4), (1, 4), (1, 1)])
def test_heads_may_be_fewer_than_ranks_where_ranks_share_them_evenly(
    tensor: int, context: int
) -> None:
    model = ModelConfig.model_validate(MODEL | {"num_key_value_heads": 1})
    fitted = ParallelLayout(tensor=tensor, context=context).resolve(2 * tensor * context, model)
    assert (fitted.shard, fitted.data_parallel_size, fitted.sequence_parallel_size) == (
        2,
        2,
        tensor * context,
    )
    assert [fitted.get_data_rank(rank) for rank in range(fitted.world_size)] == sorted(
        [0, 1] * fitted.sequence_parallel_size
    )
