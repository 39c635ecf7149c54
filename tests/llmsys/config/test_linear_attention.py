"""What layers of linear attention cannot be combined with is refused with the value, the rule and
the next step.
"""

from typing import Any

import pytest
from pydantic import ValidationError

from llmsys.config.model import ModelConfig
from llmsys.config.run import RunConfig
from tests.helpers.model_sections import KIMI, LINEAR, SHAPE

MODEL: dict[str, Any] = SHAPE | LINEAR
MUP = {"kind": "mup", "base_hidden_size": 12}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_attention": None}, "section is missing. Set linear_attention.kind=gated_delta"),
        ({"layer_types": ["full_attention"]}, "Add linear_attention to layer_types"),
        (
            {"linear_attention": MODEL["linear_attention"] | {"num_key_heads": 3}},
            "3 does not divide num_value_heads=4. Use 2",
        ),
        (
            {"linear_attention": KIMI["linear_attention"] | {"chunk_length": 100}},
            "100 is no power of two, and kimi_delta computes a chunk by halves. Use 128.",
        ),
        ({"family": "encoder", "head": {"kind": "mlm"}}, "family=encoder cannot use it"),
        (
            {"attention": {"kind": "lsh"}, "position": {"kind": "none"}, "num_key_value_heads": 4},
            "lsh is not proven beside layers of linear_attention. Use multi_head or latent",
        ),
        ({"residual": {"kind": "reversible"}}, "reversible is not proven with layers"),
        ({"parametrization": MUP}, "mup is not proven with layers of linear_attention"),
        ({"recurrence": {"kind": "fixed"}}, "fixed is not proven with layers"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:20],
)
def test_a_model_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ModelConfig.model_validate(MODEL | changes)
    assert message in str(refused.value)


@pytest.mark.parametrize("linear", [LINEAR, KIMI], ids=["gated_delta", "kimi_delta"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": {"tensor": 2}}, "2 would divide the projections of layers of linear_attention"),
        ({"train": {"compile": "block"}}, "block is not proven with layers of linear_attention"),
        ({"train": {"matmul_dtype": "fp8"}}, "fp8 is not proven with layers of linear_attention"),
        ({"train": {"precision": "fp16"}}, "may exceed the range of fp16. Use bf16 or fp32"),
    ],
    ids=["tensor", "compile", "fp8", "fp16"],
)
def test_a_run_is_refused(linear: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        RunConfig.model_validate(
            {"model": SHAPE | linear, "batch": {"sequence_length": 16}} | changes
        )
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ({"num_key_heads": 2, "num_value_heads": 2},
         "2 value heads of linear_attention cannot be divided over context=4 ranks. Use context=1 "
         "or 2, or layout.context_kind=ring"),
        ({"kind": "mamba2", "num_key_heads": 2, "num_value_heads": 8},
         "2 key heads of linear_attention.kind=mamba2, over each of which outputs have a norm, "
         "cannot be divided over context=4 ranks. Use context=1 or 2, or"),
        ({"num_key_heads": 6, "num_value_heads": 12},
         "6 key heads of linear_attention cannot be divided over context=4 ranks"),
    ],
)  # fmt: skip
def test_context_ranks_that_do_not_divide_the_heads_are_refused(
    heads: dict[str, int], message: str
) -> None:
    model = MODEL | {"linear_attention": MODEL["linear_attention"] | heads}
    settings = {"model": model, "batch": {"sequence_length": 16}, "layout": {"context": 4}}
    with pytest.raises(ValidationError) as refused:
        RunConfig.model_validate(settings)
    assert message in str(refused.value)
    settings["layout"]["context_kind"] = "ring"
    assert RunConfig.model_validate(settings).layout.ring_size == 4


def test_compilation_is_not_chosen_for_chunks() -> None:
    run = RunConfig.model_validate({"model": MODEL, "batch": {"sequence_length": 16}})
    assert run.resolve_compile(has_triton=True).train.compile == "none"
